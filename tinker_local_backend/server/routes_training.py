"""Routes for training: models, forward_backward, optim_step, saving and loading.

A request with a model and a sequence number is accepted even if it is invalid, and its result is the error: a missing number
would block every later request of the model.
"""

from __future__ import annotations

import asyncio
from typing import Any, get_args

from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response
from tinker.types import SamplingClientKind

from tinker_local_backend.errors import LocalBackendError, RequestError
from tinker_local_backend.server.adapters import COPIES_IN_TRAINING
from tinker_local_backend.server.budget import Reservation
from tinker_local_backend.server.config import MIB
from tinker_local_backend.server.errors import Refused
from tinker_local_backend.server.link import served
from tinker_local_backend.server.routes_common import (
    Context,
    DirectRoute,
    IdempotencyKey,
    IdempotentCalls,
    Posted,
    RequestContext,
    digest,
)
from tinker_local_backend.server.schemas import (
    METADATA_BYTES,
    CreateModel,
    LoadWeights,
    ModelId,
    OptimizerConfig,
    OptimStep,
    SaveWeights,
    SaveWeightsExternal,
    SaveWeightsForSampler,
)
from tinker_local_backend.storage.catalog import read_info
from tinker_local_backend.storage.paths import CheckpointPath
from tinker_local_backend.wire.envelope import read_envelope


def router() -> APIRouter:
    routes = APIRouter(prefix="/api/v1")
    _add_models(routes)
    _add_saves(routes)
    return routes


def _add_models(routes: APIRouter) -> None:
    calls = IdempotentCalls()

    @routes.post("/create_model")
    async def create_model(body: CreateModel, context: Context) -> Any:
        service = context.service
        body.base_model = served(service.link.models, body.base_model).name
        _check_optimizer(body.optimizer_config)
        lora = body.lora_config
        if lora.rank > service.config.max_rank:
            raise Refused(400, f"lora_config.rank is {lora.rank}; this server takes at most {service.config.max_rank}")
        return await _create(context, "create_model", body, service.adapters.size(body.base_model, lora.spec))

    @routes.post("/load_weights")
    async def load_weights(body: LoadWeights, context: Context) -> Any:
        why = None
        if body.weights_access_token is not None:
            why = "weights_access_token is only understood by the hosted service; leave it out"
        if body.model_id is not None and body.seq_id is not None:
            return _submit(context, "load_weights", body, why)
        if why is not None:
            raise Refused(400, why)
        _check_optimizer(body.optimizer_config)
        if body.session_id is None or body.model_seq_id is None:
            raise Refused(422, "give model_id and seq_id (existing model) or session_id and model_seq_id (new model)")
        if body.base_model is not None:
            body.base_model = served(context.service.link.models, body.base_model).name
        return await _create(context, "load_model", body, await _size_of(context, body.path))

    @routes.post("/unload_model")
    async def unload_model(body: ModelId, context: Context, key: IdempotencyKey = None) -> Any:
        """Called only by older SDKs."""

        async def unload() -> dict[str, str]:
            request = context.service.unload_model(context.tenant, body.model_id)
            return {"request_id": request.request_id, "model_id": body.model_id}

        return await calls.run(context.tenant, key, unload)

    @routes.post("/get_info")
    async def get_info(body: ModelId, context: Context) -> Any:
        model = context.service.model(context.tenant, body.model_id)
        if model.info is None:
            raise Refused(404, f"model {body.model_id} is still being created; wait for the result of its request")
        name = model.info["base_model"]
        return {
            "type": "get_info",
            "model_id": model.model_id,
            "model_data": {"arch": model.info["arch"], "model_name": name, "tokenizer_id": name},
            "is_lora": True,
            "lora_rank": model.info["rank"],
            "model_name": name,
            "execution": model.info["execution"],  # beyond the protocol: the SDK ignores it
        }


async def forward_backward(posted: Posted, _: None) -> Response:
    """The body stays compressed while it waits; the engine's process parses its data when the operation begins."""
    service, limit = posted.service, posted.service.config.max_decompressed_mib * MIB
    try:
        envelope, size = await posted.read(
            limit, "max_decompressed_mib", lambda plain: (read_envelope(plain), len(plain))
        )
    except RequestError as error:
        raise Refused(400, str(error)) from None
    fields = {
        "op": "forward_backward",
        "forward_only": envelope.forward_only,
        "tokens": envelope.tokens,
        "decompressed": size if posted.is_compressed else None,
    }
    posted.reservation.release()
    request = service.submit(posted.tenant, envelope.model_id, envelope.seq_id, fields, envelope.digest, posted.data)
    return JSONResponse({"request_id": request.request_id, "model_id": envelope.model_id})


async def optim_step(posted: Posted, body: OptimStep) -> Response:
    why = None
    if body.optimizer_params is not None:
        kind = str(body.optimizer_params.get("type", "another optimizer"))[:64]
        why = f"optimizer_params are for {kind!r}; this server trains with AdamW, so send adam_params"
    return JSONResponse(_submit(posted, "optim_step", body, why))


DIRECT = (
    DirectRoute("/api/v1/forward_backward", None, forward_backward),
    DirectRoute("/api/v1/optim_step", OptimStep, optim_step),
)


def _add_saves(routes: APIRouter) -> None:
    @routes.post("/save_weights")
    async def save_weights(body: SaveWeights, context: Context) -> Any:
        return await _save(context, "save_weights", body, copies=COPIES_IN_TRAINING)

    @routes.post("/save_weights_for_sampler")
    async def save_weights_for_sampler(body: SaveWeightsForSampler, context: Context) -> Any:
        if body.path is not None:
            return await _save(context, "save_weights_for_sampler", body, copies=1)
        if body.sampling_session_seq_id is None:
            raise Refused(422, "give path (a name to save under) or sampling_session_seq_id (a snapshot in memory)")
        why = None
        if body.kind not in get_args(SamplingClientKind):
            why = f"kind is {body.kind[:64]!r}; this server's sampling clients are snapshot or inflight"
        # The SDK increments this number with every retry of the same request.
        return _submit(context, "snapshot", body, why, without="sampling_session_seq_id")

    @routes.post("/save_weights_external")
    async def save_weights_external(body: SaveWeightsExternal, context: Context) -> Any:
        return await _save(context, "save_weights_external", body, copies=1)


async def _create(context: RequestContext, op: str, body: Any, size: int) -> dict[str, str]:
    """Accept a new model with an adapter of `size` bytes."""
    fields = {"op": op, **body.model_dump()}
    model = await context.service.create_model(
        context.tenant, body.session_id, body.model_seq_id, fields, digest(body), size
    )
    return {"request_id": model.creation.request_id, "model_id": model.model_id}


async def _size_of(context: RequestContext, path: str) -> int:
    """Bytes of a checkpoint's adapter; 0 for an invalid path, which the engine reports."""
    try:
        info = await asyncio.to_thread(read_info, context.tenant.home, CheckpointPath.parse(path))
    except LocalBackendError:
        return 0
    return context.service.adapters.size(info.base_model, info.spec)


def _submit(
    context: RequestContext,
    op: str,
    body: Any,
    why: str | None = None,
    room: Reservation | None = None,
    without: str = "",
) -> dict[str, str]:
    """Accept an operation of a model, with all fields of the body. With `why`, the operation fails with this message when its
    turn comes. `without`: a field in which a retry may differ."""
    fields = {"op": op, **body.model_dump()} if why is None else {"op": "refuse", "why": why}
    identity = digest(body, without) + op.encode()
    request = context.service.submit(context.tenant, body.model_id, body.seq_id, fields, identity)
    if room is not None:
        request.attach(room)
    return {"request_id": request.request_id, "model_id": body.model_id}


async def _save(
    context: RequestContext, op: str, body: SaveWeights | SaveWeightsForSampler | SaveWeightsExternal, copies: int
) -> dict[str, str]:
    """Accept an operation that writes `copies` times an adapter's size. If the disk quota is exceeded, the operation fails when
    its turn comes."""
    size = context.service.model(context.tenant, body.model_id).bytes // COPIES_IN_TRAINING * copies
    try:
        room = await context.service.disk.room(context.tenant, size + 2 * METADATA_BYTES)
    except Refused as refusal:
        return _submit(context, op, body, refusal.detail)
    with room:
        return _submit(context, op, body, room=room)


def _check_optimizer(config: OptimizerConfig | None) -> None:
    if config is not None and config.type != "adamw":
        raise Refused(400, f"optimizer_config.type is {config.type[:64]!r}; this server trains with adamw")
