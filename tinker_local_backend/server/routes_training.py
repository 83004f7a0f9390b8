"""Routes of training: models, forward_backward, optim_step, and what is saved and loaded.

Whatever has a model and a sequence number is accepted, and what is wrong with it is told by its future: a number that never
arrived would hold up every later request of the model.
"""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response

from tinker_local_backend.engine.model.lora_spec import LoraSpec
from tinker_local_backend.errors import LocalBackendError, RequestError
from tinker_local_backend.server.access import Tenant
from tinker_local_backend.server.adapters import COPIES_IN_TRAINING
from tinker_local_backend.server.config import MIB
from tinker_local_backend.server.direct import DirectRoute, Posted
from tinker_local_backend.server.routes_common import IdempotencyKey, Once, ServiceOf, TenantOf, digest
from tinker_local_backend.server.schemas import (
    METADATA_BYTES,
    AdamParams,
    CreateModel,
    LoadWeights,
    LoraConfig,
    ModelId,
    OptimizerConfig,
    OptimStep,
    SaveWeights,
    SaveWeightsForSampler,
)
from tinker_local_backend.server.service import Service
from tinker_local_backend.server.sessions import Refused
from tinker_local_backend.storage.info import read_info
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
    async def create_model(body: CreateModel, service: ServiceOf, tenant: TenantOf) -> Any:
        base_model = service.served(body.base_model)
        _check_optimizer(body.optimizer_config)
        lora = body.lora_config or LoraConfig(rank=32)
        if lora.rank > service.config.max_rank:
            raise Refused(400, f"lora_config.rank is {lora.rank}; this server takes at most {service.config.max_rank}")
        fields = {
            "op": "create_model",
            "base_model": base_model,
            "user_metadata": body.user_metadata or {},
            **lora.model_dump(),
        }
        spec = LoraSpec(lora.rank, lora.train_attn, lora.train_mlp, lora.train_unembed)
        request, model_id = await service.create_model(
            tenant, body.session_id, body.model_seq_id, fields, digest(body), base_model, spec
        )
        return {"request_id": request.request_id, "model_id": model_id}

    @routes.post("/load_weights")
    async def load_weights(body: LoadWeights, service: ServiceOf, tenant: TenantOf) -> Any:
        fields: dict[str, Any] = {"op": "load_weights", "path": body.path, "optimizer": body.optimizer}
        token = "weights_access_token is only understood by the hosted service; leave it out"
        if body.model_id is not None and body.seq_id is not None:
            if body.weights_access_token is not None:
                fields = _refusal(token)
            return _accepted(service, tenant, body, body.model_id, body.seq_id, fields)
        if body.weights_access_token is not None:
            raise Refused(400, token)
        _check_optimizer(body.optimizer_config)
        if body.session_id is None or body.model_seq_id is None:
            raise Refused(
                422, "give model_id and seq_id (a model that exists) or session_id and model_seq_id (a new one)"
            )
        base_model = None if body.base_model is None else service.served(body.base_model)
        fields |= {"op": "load_model", "base_model": base_model, "user_metadata": body.user_metadata or {}}
        kind = await _kind_of(tenant, body.path)
        request, model_id = await service.create_model(
            tenant, body.session_id, body.model_seq_id, fields, digest(body), *kind
        )
        return {"request_id": request.request_id, "model_id": model_id}

    @routes.post("/unload_model")
    async def unload_model(body: ModelId, service: ServiceOf, tenant: TenantOf, key: IdempotencyKey) -> Any:
        """Only older SDKs know it."""

        async def unload() -> str:
            return service.unload_model(tenant, body.model_id).request_id

        return {"request_id": await once.run(tenant, key, unload), "model_id": body.model_id}

    @routes.post("/get_info")
    async def get_info(body: ModelId, service: ServiceOf, tenant: TenantOf) -> Any:
        model = service.model(tenant, body.model_id)
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


async def _forward_backward(posted: Posted, _: None) -> Response:
    """The body waits as it came. Its data are looked at by the engine's process, when their turn has come."""
    service = posted.service
    most = service.config.max_decompressed_mib * MIB
    try:
        envelope, size = await posted.read(
            most, "max_decompressed_mib", lambda plain: (read_envelope(plain), len(plain))
        )
    except RequestError as error:
        raise Refused(400, str(error)) from None
    fields: dict[str, Any] = {
        "op": "forward_backward",
        "forward_only": envelope.forward_only,
        "tokens": envelope.tokens,
    }
    if posted.is_compressed:
        fields["decompressed"] = size
    posted.holding.release()
    request = service.model_request(
        posted.tenant, envelope.model_id, envelope.seq_id, fields, envelope.digest, posted.data
    )
    return JSONResponse({"request_id": request.request_id, "model_id": envelope.model_id})


async def _optim_step(posted: Posted, body: OptimStep) -> Response:
    if body.optimizer_params is not None:
        kind = str(body.optimizer_params.get("type", "another optimizer"))[:64]
        fields = _refusal(f"optimizer_params are of {kind!r}; this server trains with AdamW, so send adam_params")
    else:
        fields = {"op": "optim_step", "adam_params": (body.adam_params or AdamParams()).model_dump()}
    return JSONResponse(_accepted(posted.service, posted.tenant, body, body.model_id, body.seq_id, fields))


DIRECT = (
    DirectRoute("/api/v1/forward_backward", None, _forward_backward),
    DirectRoute("/api/v1/optim_step", OptimStep, _optim_step),
)


def _add_saves(routes: APIRouter) -> None:
    @routes.post("/save_weights")
    async def save_weights(body: SaveWeights, service: ServiceOf, tenant: TenantOf) -> Any:
        fields = {
            "op": "save_weights",
            "name": body.path,
            "ttl_seconds": body.ttl_seconds,
            "overwrite": body.overwrite,
            "user_metadata": body.user_metadata,
        }
        return await _save(service, tenant, body, service.model(tenant, body.model_id).bytes, fields)

    @routes.post("/save_weights_for_sampler")
    async def save_weights_for_sampler(body: SaveWeightsForSampler, service: ServiceOf, tenant: TenantOf) -> Any:
        if body.path is not None:
            fields = {
                "op": "save_weights_for_sampler",
                "name": body.path,
                "ttl_seconds": body.ttl_seconds,
                "user_metadata": body.user_metadata,
            }
            size = service.model(tenant, body.model_id).bytes // COPIES_IN_TRAINING
            return await _save(service, tenant, body, size, fields)
        if body.sampling_session_seq_id is None:
            raise Refused(422, "give path (a name to save under) or sampling_session_seq_id (a snapshot in memory)")
        if body.kind != "snapshot":
            fields = _refusal(
                f"kind is {body.kind[:64]!r}; this server's sampling clients are snapshots, so leave it out"
            )
            return _accepted(service, tenant, body, body.model_id, body.seq_id, fields)
        fields = {"op": "snapshot", "sampling_session_seq_id": body.sampling_session_seq_id}
        # The SDK counts this number up with every attempt to send the same request.
        identity = digest(body, "sampling_session_seq_id")
        request = service.model_request(tenant, body.model_id, body.seq_id, fields, identity)
        return {"request_id": request.request_id, "model_id": body.model_id}

    @routes.post("/save_weights_external")
    async def save_weights_external(body: SaveWeights, service: ServiceOf, tenant: TenantOf) -> Any:
        fields = _refusal(
            "this server exports no external weights; save_weights_for_sampler writes PEFT files under the server's home"
        )
        return _accepted(service, tenant, body, body.model_id, body.seq_id, fields)


async def _kind_of(tenant: Tenant, path: str) -> tuple[str, LoraSpec]:
    """Base model and adapter of a checkpoint. What is wrong with the path is told by the engine."""
    try:
        info = await asyncio.to_thread(read_info, tenant.home, CheckpointPath.parse(path))
    except LocalBackendError:
        return "", LoraSpec(1)
    return info.base_model, info.spec


def _refusal(why: str) -> dict[str, Any]:
    """What is never carried out, but keeps its place in the order of its model's requests."""
    return {"op": "refuse", "why": why}


async def _save(
    service: Service, tenant: Tenant, body: SaveWeights | SaveWeightsForSampler, size: int, fields: dict[str, Any]
) -> dict[str, str]:
    """Accept what writes so many bytes of weights, or refuse it by its result where there is no room on the disk."""
    try:
        room = await service.disk.hold(tenant, size + 2 * METADATA_BYTES)
    except Refused as refusal:
        return _accepted(service, tenant, body, body.model_id, body.seq_id, _refusal(refusal.detail))
    try:
        accepted = _accepted(service, tenant, body, body.model_id, body.seq_id, fields)
    except BaseException:
        room.release()
        raise
    request = service.requests.find(tenant, accepted["request_id"])
    if request is None:
        room.release()
    else:
        service.disk.release_after(request, room)
    return accepted


def _accepted(
    service: Service, tenant: Tenant, body: Any, model_id: str, seq_id: int, fields: dict[str, Any]
) -> dict[str, str]:
    identity = digest(body) + fields["op"].encode()
    request = service.model_request(tenant, model_id, seq_id, fields, identity)
    return {"request_id": request.request_id, "model_id": model_id}


def _check_optimizer(config: OptimizerConfig | None) -> None:
    if config is not None and config.type != "adamw":
        raise Refused(400, f"optimizer_config.type is {config.type[:64]!r}; this server trains with adamw")
