"""Routes that list and manage what was saved, over a RestClient of the tenant's home. They need no engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Query, Response
from fastapi import Path as PathParameter
from pydantic import BaseModel

from tinker_local_backend.futures import EngineFuture
from tinker_local_backend.rest_client import RestClient
from tinker_local_backend.server.access import Tenant
from tinker_local_backend.server.pool import Pool
from tinker_local_backend.server.quotas import bytes_below
from tinker_local_backend.server.routes_common import IdempotencyKey, Once, ServiceOf, TenantOf
from tinker_local_backend.server.schemas import METADATA_BYTES, CopyWeights, TinkerPath, Ttl
from tinker_local_backend.server.service import Service
from tinker_local_backend.server.sessions import Refused
from tinker_local_backend.storage.paths import SHAPES, CheckpointKind, CheckpointPath

T = TypeVar("T")

Limit = Annotated[int, Query(ge=0, le=10000)]
Offset = Annotated[int, Query(ge=0, lt=2**31)]
Name = Annotated[str, PathParameter(max_length=512)]

_BOTH_PARTS = f"a checkpoint's id has two parts, {' or '.join(SHAPES)}: a run may have several of a name"


async def _ask(pool: Pool, tenant: Tenant, call: Callable[[], EngineFuture[T]]) -> T:
    """Carry out a call of a RestClient, which works on files, off the event loop."""
    return await pool.run(tenant, lambda: call().result())


async def _shown(service: Service, tenant: Tenant, call: Callable[[], EngineFuture[Any]], **more: Any) -> Response:
    """What a call of a RestClient finds, with `more` of its fields. It may be long, so it becomes JSON on a thread too."""

    def found() -> str:
        result: BaseModel = call().result()
        return result.model_copy(update=more).model_dump_json()

    return Response(await service.listing.run(tenant, found), media_type="application/json")


def router() -> APIRouter:
    routes = APIRouter(prefix="/api/v1")
    _add_runs(routes)
    _add_checkpoints(routes)
    _add_sessions(routes)
    return routes


def _add_runs(routes: APIRouter) -> None:
    @routes.get("/training_runs")
    async def list_training_runs(service: ServiceOf, tenant: TenantOf, limit: Limit = 20, offset: Offset = 0) -> Any:
        return await _shown(service, tenant, lambda: RestClient(tenant.home).list_training_runs(limit, offset))

    @routes.get("/training_runs/{run_id}")
    async def get_training_run(run_id: Name, service: ServiceOf, tenant: TenantOf) -> Any:
        return await _shown(service, tenant, lambda: RestClient(tenant.home).get_training_run(run_id))

    @routes.get("/training_runs/{run_id}/checkpoints")
    @routes.get("/models/{run_id}/checkpoints")
    async def list_checkpoints(run_id: Name, service: ServiceOf, tenant: TenantOf) -> Any:
        return await _shown(service, tenant, lambda: RestClient(tenant.home).list_checkpoints(run_id))

    @routes.get("/checkpoints")
    async def list_user_checkpoints(
        service: ServiceOf, tenant: TenantOf, limit: Limit = 100, offset: Offset = 0
    ) -> Any:
        return await _shown(service, tenant, lambda: RestClient(tenant.home).list_user_checkpoints(limit, offset))

    @routes.post("/weights_info")
    async def weights_info(body: TinkerPath, service: ServiceOf, tenant: TenantOf) -> Any:
        return await _shown(
            service, tenant, lambda: RestClient(tenant.home).get_weights_info_by_tinker_path(body.tinker_path)
        )


def _add_checkpoints(routes: APIRouter) -> None:
    once = Once()
    place = "/training_runs/{run_id}/checkpoints/{kind}/{name}"

    @routes.delete(place, status_code=204)
    async def delete_checkpoint(
        run_id: Name, kind: CheckpointKind, name: Name, service: ServiceOf, tenant: TenantOf
    ) -> None:
        await _ask(service.listing, tenant, lambda: RestClient(tenant.home).delete_checkpoint(run_id, f"{kind}/{name}"))

    @routes.delete("/training_runs/{run_id}/checkpoints/{name}")
    async def delete_half_named_checkpoint(run_id: Name, name: Name) -> None:
        raise Refused(400, _BOTH_PARTS)

    @routes.post(f"{place}/publish", status_code=204)
    async def publish(run_id: Name, kind: CheckpointKind, name: Name, service: ServiceOf, tenant: TenantOf) -> None:
        path = f"tinker://{run_id}/{kind}/{name}"
        await _ask(service.listing, tenant, lambda: RestClient(tenant.home).publish_checkpoint_from_tinker_path(path))

    @routes.delete(f"{place}/publish", status_code=204)
    async def unpublish(run_id: Name, kind: CheckpointKind, name: Name, service: ServiceOf, tenant: TenantOf) -> None:
        path = f"tinker://{run_id}/{kind}/{name}"
        await _ask(service.listing, tenant, lambda: RestClient(tenant.home).unpublish_checkpoint_from_tinker_path(path))

    @routes.put(f"{place}/ttl", status_code=204)
    async def set_ttl(
        run_id: Name, kind: CheckpointKind, name: Name, body: Ttl, service: ServiceOf, tenant: TenantOf
    ) -> None:
        path = f"tinker://{run_id}/{kind}/{name}"
        await _ask(
            service.listing,
            tenant,
            lambda: RestClient(tenant.home).set_checkpoint_ttl_from_tinker_path(path, body.ttl_seconds),
        )

    @routes.post("/copy_weights")
    async def copy_weights(body: CopyWeights, service: ServiceOf, tenant: TenantOf, key: IdempotencyKey) -> Any:
        """A copy in a new run. Projects are not kept here; the one that the SDK asks for makes no difference."""
        if body.weights_access_token is not None:
            raise Refused(400, "weights_access_token is only understood by the hosted service; leave it out")

        async def copy() -> str:
            source = CheckpointPath.parse(body.source_path).folder(tenant.home)
            size = await asyncio.to_thread(bytes_below, source)
            with await service.disk.hold(tenant, size + METADATA_BYTES):
                client = RestClient(tenant.home)
                return await _ask(
                    service.copying, tenant, lambda: client.copy_weights(body.source_path, ttl_seconds=body.ttl_seconds)
                )

        return {"tinker_path": await once.run(tenant, key, copy)}


def _add_sessions(routes: APIRouter) -> None:
    @routes.get("/sessions")
    async def list_sessions(service: ServiceOf, tenant: TenantOf, limit: Limit = 20, offset: Offset = 0) -> Any:
        return await _shown(service, tenant, lambda: RestClient(tenant.home).list_sessions(limit, offset))

    @routes.get("/sessions/{session_id}")
    async def get_session(session_id: Name, service: ServiceOf, tenant: TenantOf) -> Any:
        sampler_ids = service.sampler_ids(tenant, session_id)
        return await _shown(
            service, tenant, lambda: RestClient(tenant.home).get_session(session_id), sampler_ids=sampler_ids
        )
