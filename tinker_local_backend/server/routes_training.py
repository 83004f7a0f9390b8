"""Routes of training: models, forward_backward, optim_step, and what is saved and loaded.

Whatever has a model and a sequence number is accepted, and what is wrong with it is told by its future: a number that never
arrived would hold up every later request of the model.
"""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response

from tinker_local_backend.errors import LocalBackendError, RequestError
from tinker_local_backend.server.adapters import COPIES_IN_TRAINING
from tinker_local_backend.server.config import MIB
from tinker_local_backend.server.errors import Refused
from tinker_local_backend.server.held import Holding
from tinker_local_backend.server.link import served
from tinker_local_backend.server.routes_common import Ask, Asked, DirectRoute, IdempotencyKey, Once, Posted, digest
from tinker_local_backend.server.schemas import (
    METADATA_BYTES,
    CreateModel,
    LoadWeights,
    ModelId,
    OptimizerConfig,
    OptimStep,
    SaveWeights,
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
    once = Once()

    @routes.post("/create_model")
    async def create_model(body: CreateModel, asked: Ask) -> Any:
        service = asked.service
        body.base_model = served(service.link.models, body.base_model).name
        _check_optimizer(body.optimizer_config)
        lora = body.lora_config
        if lora.rank > service.config.max_rank:
            raise Refused(400, f"lora_config.rank is {lora.rank}; this server takes at most {service.config.max_rank}")
        return await _create(asked, "create_model", body, service.adapters.size(body.base_model, lora.spec))

    @routes.post("/load_weights")
    async def load_weights(body: LoadWeights, asked: Ask) -> Any:
        why = None
        if body.weights_access_token is not None:
            why = "weights_access_token is only understood by the hosted service; leave it out"
        if body.model_id is not None and body.seq_id is not None:
            return _submit(asked, "load_weights", body, why)
        if why is not None:
            raise Refused(400, why)
        _check_optimizer(body.optimizer_config)
        if body.session_id is None or body.model_seq_id is None:
            raise Refused(
                422, "give model_id and seq_id (a model that exists) or session_id and model_seq_id (a new one)"
            )
        if body.base_model is not None:
            body.base_model = served(asked.service.link.models, body.base_model).name
        return await _create(asked, "load_model", body, await _size_of(asked, body.path))

    @routes.post("/unload_model")
    async def unload_model(body: ModelId, asked: Ask, key: IdempotencyKey = None) -> Any:
        """Only older SDKs know it."""

        async def unload() -> dict[str, str]:
            request = asked.service.unload_model(asked.tenant, body.model_id)
            return {"request_id": request.request_id, "model_id": body.model_id}

        return await once.run(asked.tenant, key, unload)

    @routes.post("/get_info")
    async def get_info(body: ModelId, asked: Ask) -> Any:
        model = asked.service.model(asked.tenant, body.model_id)
        if model.info is None:
            raise Refused(404, f"model {body.model_id} is still being made; wait for the result of its request")
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
    """The body waits as it came. Its data are looked at by the engine's process, when their turn has come."""
    service, most = posted.service, posted.service.config.max_decompressed_mib * MIB
    try:
        envelope, size = await posted.read(
            most, "max_decompressed_mib", lambda plain: (read_envelope(plain), len(plain))
        )
    except RequestError as error:
        raise Refused(400, str(error)) from None
    fields = {
        "op": "forward_backward",
        "forward_only": envelope.forward_only,
        "tokens": envelope.tokens,
        "decompressed": size if posted.is_compressed else None,
    }
    posted.holding.release()
    request = service.submit(posted.tenant, envelope.model_id, envelope.seq_id, fields, envelope.digest, posted.data)
    return JSONResponse({"request_id": request.request_id, "model_id": envelope.model_id})


async def optim_step(posted: Posted, body: OptimStep) -> Response:
    why = None
    if body.optimizer_params is not None:
        kind = str(body.optimizer_params.get("type", "another optimizer"))[:64]
        why = f"optimizer_params are of {kind!r}; this server trains with AdamW, so send adam_params"
    return JSONResponse(_submit(posted, "optim_step", body, why))


DIRECT = (
    DirectRoute("/api/v1/forward_backward", None, forward_backward),
    DirectRoute("/api/v1/optim_step", OptimStep, optim_step),
)


def _add_saves(routes: APIRouter) -> None:
    @routes.post("/save_weights")
    async def save_weights(body: SaveWeights, asked: Ask) -> Any:
        return await _save(asked, "save_weights", body, copies=COPIES_IN_TRAINING)

    @routes.post("/save_weights_for_sampler")
    async def save_weights_for_sampler(body: SaveWeightsForSampler, asked: Ask) -> Any:
        if body.path is not None:
            return await _save(asked, "save_weights_for_sampler", body, copies=1)
        if body.sampling_session_seq_id is None:
            raise Refused(422, "give path (a name to save under) or sampling_session_seq_id (a snapshot in memory)")
        why = None
        if body.kind != "snapshot":
            why = f"kind is {body.kind[:64]!r}; this server's sampling clients are snapshots, so leave it out"
        # The SDK counts this number up with every attempt to send the same request.
        return _submit(asked, "snapshot", body, why, without="sampling_session_seq_id")

    @routes.post("/save_weights_external")
    async def save_weights_external(body: SaveWeights, asked: Ask) -> Any:
        why = "this server exports no external weights; save_weights_for_sampler writes PEFT files under the server's home"
        return _submit(asked, "save_weights_external", body, why)


async def _create(asked: Asked, op: str, body: Any, size: int) -> dict[str, str]:
    """Accept a new model, whose adapter takes so many bytes."""
    fields = {"op": op, **body.model_dump()}
    model = await asked.service.create_model(
        asked.tenant, body.session_id, body.model_seq_id, fields, digest(body), size
    )
    return {"request_id": model.creation.request_id, "model_id": model.model_id}


async def _size_of(asked: Asked, path: str) -> int:
    """Bytes of a checkpoint's adapter. What is wrong with the path is told by the engine."""
    try:
        info = await asyncio.to_thread(read_info, asked.tenant.home, CheckpointPath.parse(path))
    except LocalBackendError:
        return 0
    return asked.service.adapters.size(info.base_model, info.spec)


def _submit(
    asked: Asked, op: str, body: Any, why: str | None = None, room: Holding | None = None, without: str = ""
) -> dict[str, str]:
    """Accept an operation of a model, which gets all fields of the body. With `why` it is never carried out, but keeps its place
    in the order of its model's requests. What is sent again may differ in the field `without`."""
    fields = {"op": op, **body.model_dump()} if why is None else {"op": "refuse", "why": why}
    identity = digest(body, without) + op.encode()
    request = asked.service.submit(asked.tenant, body.model_id, body.seq_id, fields, identity)
    if room is not None:
        request.keep(room)
    return {"request_id": request.request_id, "model_id": body.model_id}


async def _save(asked: Asked, op: str, body: SaveWeights | SaveWeightsForSampler, copies: int) -> dict[str, str]:
    """Accept what writes so many copies of an adapter, or refuse it by its result where there is no room on the disk."""
    size = asked.service.model(asked.tenant, body.model_id).bytes // COPIES_IN_TRAINING * copies
    try:
        room = await asked.service.disk.room(asked.tenant, size + 2 * METADATA_BYTES)
    except Refused as refusal:
        return _submit(asked, op, body, refusal.detail)
    with room:
        return _submit(asked, op, body, room=room)


def _check_optimizer(config: OptimizerConfig | None) -> None:
    if config is not None and config.type != "adamw":
        raise Refused(400, f"optimizer_config.type is {config.type[:64]!r}; this server trains with adamw")
