"""Routes that list and manage what was saved, over a RestClient of the tenant's home. They need no engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Depends, Query, Response
from fastapi import Path as PathParameter
from pydantic import BaseModel

from tinker_local_backend.futures import EngineFuture
from tinker_local_backend.rest_client import RestClient
from tinker_local_backend.server.errors import Refused
from tinker_local_backend.server.pool import Pool
from tinker_local_backend.server.quotas import bytes_below
from tinker_local_backend.server.routes_common import Ask, Asked, IdempotencyKey, Once
from tinker_local_backend.server.schemas import METADATA_BYTES, CopyWeights, TinkerPath, Ttl
from tinker_local_backend.storage.paths import SHAPES, CheckpointKind, CheckpointPath

T = TypeVar("T")

Limit = Annotated[int, Query(ge=0, le=10000)]
Offset = Annotated[int, Query(ge=0, lt=2**31)]
Name = Annotated[str, PathParameter(max_length=512)]

_BOTH_PARTS = f"a checkpoint's id has two parts, {' or '.join(SHAPES)}: a run may have several of a name"


async def _path(run_id: Name, kind: CheckpointKind, name: Name) -> str:
    return f"tinker://{run_id}/{kind}/{name}"


Checkpoint = Annotated[str, Depends(_path)]


async def _ask(asked: Asked, call: Callable[[RestClient], EngineFuture[T]], pool: Pool | None = None) -> T:
    """Carry out a call of a RestClient, which works on files, off the event loop."""
    pool = pool or asked.service.listing
    return await pool.run(asked.tenant, lambda: call(RestClient(asked.tenant.home)).result())


async def _shown(asked: Asked, call: Callable[[RestClient], EngineFuture[Any]], **more: Any) -> Response:
    """What a call of a RestClient finds, with `more` of its fields. It may be long, so it becomes JSON on a thread too."""

    def found() -> str:
        result: BaseModel = call(RestClient(asked.tenant.home)).result()
        return result.model_copy(update=more).model_dump_json()

    return Response(await asked.service.listing.run(asked.tenant, found), media_type="application/json")


def router() -> APIRouter:
    routes = APIRouter(prefix="/api/v1")
    _add_lists(routes)
    _add_checkpoints(routes)
    return routes


def _add_lists(routes: APIRouter) -> None:
    @routes.get("/training_runs")
    async def list_training_runs(asked: Ask, limit: Limit = 20, offset: Offset = 0) -> Any:
        return await _shown(asked, lambda rest: rest.list_training_runs(limit, offset))

    @routes.get("/training_runs/{run_id}")
    async def get_training_run(run_id: Name, asked: Ask) -> Any:
        return await _shown(asked, lambda rest: rest.get_training_run(run_id))

    @routes.get("/training_runs/{run_id}/checkpoints")
    @routes.get("/models/{run_id}/checkpoints")
    async def list_checkpoints(run_id: Name, asked: Ask) -> Any:
        return await _shown(asked, lambda rest: rest.list_checkpoints(run_id))

    @routes.get("/checkpoints")
    async def list_user_checkpoints(asked: Ask, limit: Limit = 100, offset: Offset = 0) -> Any:
        return await _shown(asked, lambda rest: rest.list_user_checkpoints(limit, offset))

    @routes.post("/weights_info")
    async def weights_info(body: TinkerPath, asked: Ask) -> Any:
        return await _shown(asked, lambda rest: rest.get_weights_info_by_tinker_path(body.tinker_path))

    @routes.get("/sessions")
    async def list_sessions(asked: Ask, limit: Limit = 20, offset: Offset = 0) -> Any:
        return await _shown(asked, lambda rest: rest.list_sessions(limit, offset))

    @routes.get("/sessions/{session_id}")
    async def get_session(session_id: Name, asked: Ask) -> Any:
        live = asked.service.sessions.find(asked.tenant, session_id)
        sampler_ids = [] if live is None else list(live.samplers)
        return await _shown(asked, lambda rest: rest.get_session(session_id), sampler_ids=sampler_ids)


def _add_checkpoints(routes: APIRouter) -> None:
    once = Once()
    place = "/training_runs/{run_id}/checkpoints/{kind}/{name}"

    @routes.delete(place, status_code=204)
    async def delete_checkpoint(path: Checkpoint, asked: Ask) -> None:
        await _ask(asked, lambda rest: rest.delete_checkpoint_from_tinker_path(path))

    @routes.delete("/training_runs/{run_id}/checkpoints/{name}")
    async def delete_half_named_checkpoint(run_id: Name, name: Name) -> None:
        raise Refused(400, _BOTH_PARTS)

    @routes.post(f"{place}/publish", status_code=204)
    async def publish(path: Checkpoint, asked: Ask) -> None:
        await _ask(asked, lambda rest: rest.publish_checkpoint_from_tinker_path(path))

    @routes.delete(f"{place}/publish", status_code=204)
    async def unpublish(path: Checkpoint, asked: Ask) -> None:
        await _ask(asked, lambda rest: rest.unpublish_checkpoint_from_tinker_path(path))

    @routes.put(f"{place}/ttl", status_code=204)
    async def set_ttl(path: Checkpoint, body: Ttl, asked: Ask) -> None:
        await _ask(asked, lambda rest: rest.set_checkpoint_ttl_from_tinker_path(path, body.ttl_seconds))

    @routes.post("/copy_weights")
    async def copy_weights(body: CopyWeights, asked: Ask, key: IdempotencyKey = None) -> Any:
        """A copy in a new run. Projects are not kept here; the one that the SDK asks for makes no difference."""
        if body.weights_access_token is not None:
            raise Refused(400, "weights_access_token is only understood by the hosted service; leave it out")

        async def copy() -> str:
            source = CheckpointPath.parse(body.source_path).folder(asked.tenant.home)
            size = await asyncio.to_thread(bytes_below, source)
            with await asked.service.disk.room(asked.tenant, size + METADATA_BYTES):
                return await _ask(
                    asked,
                    lambda rest: rest.copy_weights(body.source_path, ttl_seconds=body.ttl_seconds),
                    asked.service.copying,
                )

        return {"tinker_path": await once.run(asked.tenant, key, copy)}
