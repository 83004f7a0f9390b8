"""Routes that list and manage saved runs and checkpoints, with a RestClient of the tenant's home. They need no engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi import Path as PathParameter
from pydantic import BaseModel
from starlette.responses import FileResponse
from tinker.types import SessionSearchRequest

from tinker_local_backend.futures import EngineFuture
from tinker_local_backend.rest_client import RestClient
from tinker_local_backend.server.archives import ArchiveResponse
from tinker_local_backend.server.errors import Refused
from tinker_local_backend.server.pool import Pool
from tinker_local_backend.server.quotas import bytes_below
from tinker_local_backend.server.routes_common import Context, IdempotencyKey, IdempotentCalls, RequestContext
from tinker_local_backend.server.schemas import METADATA_BYTES, CopyWeights, TinkerPath, Ttl
from tinker_local_backend.server.signed_urls import PREFIX, SECONDS
from tinker_local_backend.storage.paths import SHAPES, CheckpointKind, CheckpointPath
from tinker_local_backend.storage.tar_stream import TarStream

CHECKPOINT = "/training_runs/{run_id}/checkpoints/{kind}/{name}"
ARCHIVE_NAME = "adapter.tar"

T = TypeVar("T")

Limit = Annotated[int, Query(ge=0, le=10000)]
Offset = Annotated[int, Query(ge=0, lt=2**31)]
Name = Annotated[str, PathParameter(max_length=512)]


async def _path(run_id: Name, kind: CheckpointKind, name: Name) -> str:
    return f"tinker://{run_id}/{kind}/{name}"


Checkpoint = Annotated[str, Depends(_path)]


async def _ask(context: RequestContext, call: Callable[[RestClient], EngineFuture[T]], pool: Pool | None = None) -> T:
    """Call a RestClient, which reads and writes files, off the event loop."""
    pool = pool or context.service.listing
    return await pool.run(context.tenant, lambda: call(RestClient(context.tenant.home)).result())


async def _opened(context: RequestContext, path: str) -> TarStream:
    return await context.service.listing.run(
        context.tenant, lambda: TarStream(context.tenant.home, CheckpointPath.parse(path))
    )


def _signed(request: Request, context: RequestContext, path: str) -> str:
    """The URL of a path on this server that works for an hour without a key."""
    query = context.service.signed_urls.query(path, context.tenant.name)
    return f"{str(request.base_url).rstrip('/')}{path}?{query}"


async def _json_of(context: RequestContext, call: Callable[[RestClient], EngineFuture[Any]], **more: Any) -> Response:
    """The result of a RestClient's call, updated with `more`, as JSON. It may be long, so the thread also encodes it."""

    def to_json() -> str:
        result: BaseModel = call(RestClient(context.tenant.home)).result()
        return result.model_copy(update=more).model_dump_json()

    return Response(await context.service.listing.run(context.tenant, to_json), media_type="application/json")


def router() -> APIRouter:
    routes = APIRouter(prefix="/api/v1")
    _add_lists(routes)
    _add_checkpoints(routes)
    _add_files(routes)
    return routes


def _add_lists(routes: APIRouter) -> None:
    @routes.get("/training_runs")
    async def list_training_runs(context: Context, limit: Limit = 20, offset: Offset = 0) -> Any:
        return await _json_of(context, lambda rest: rest.list_training_runs(limit, offset))

    @routes.get("/training_runs/{run_id}")
    async def get_training_run(run_id: Name, context: Context) -> Any:
        return await _json_of(context, lambda rest: rest.get_training_run(run_id))

    @routes.get("/training_runs/{run_id}/checkpoints")
    @routes.get("/models/{run_id}/checkpoints")
    async def list_checkpoints(run_id: Name, context: Context) -> Any:
        return await _json_of(context, lambda rest: rest.list_checkpoints(run_id))

    @routes.get("/checkpoints")
    async def list_user_checkpoints(context: Context, limit: Limit = 100, offset: Offset = 0) -> Any:
        return await _json_of(context, lambda rest: rest.list_user_checkpoints(limit, offset))

    @routes.post("/weights_info")
    async def weights_info(body: TinkerPath, context: Context) -> Any:
        return await _json_of(context, lambda rest: rest.get_weights_info_by_tinker_path(body.tinker_path))

    @routes.post("/sessions/search")
    async def search_sessions(body: SessionSearchRequest, context: Context) -> Any:
        return await _json_of(context, lambda rest: rest.search_sessions(body))

    @routes.get("/sessions")
    async def list_sessions(context: Context, limit: Limit = 20, offset: Offset = 0) -> Any:
        return await _json_of(context, lambda rest: rest.list_sessions(limit, offset))

    @routes.get("/sessions/{session_id}")
    async def get_session(session_id: Name, context: Context) -> Any:
        live = context.service.sessions.find(context.tenant, session_id)
        sampler_ids = [] if live is None else list(live.samplers)
        return await _json_of(context, lambda rest: rest.get_session(session_id), sampler_ids=sampler_ids)


def _add_checkpoints(routes: APIRouter) -> None:
    calls = IdempotentCalls()

    @routes.delete(CHECKPOINT, status_code=204)
    async def delete_checkpoint(path: Checkpoint, context: Context) -> None:
        await _ask(context, lambda rest: rest.delete_checkpoint_from_tinker_path(path))

    @routes.delete("/training_runs/{run_id}/checkpoints/{name}")
    async def delete_half_named_checkpoint(run_id: Name, name: Name) -> None:
        raise Refused(
            400,
            f"a checkpoint's id has two parts, {' or '.join(SHAPES)}: a run may have several checkpoints of one name",
        )

    @routes.post(f"{CHECKPOINT}/publish", status_code=204)
    async def publish(path: Checkpoint, context: Context) -> None:
        await _ask(context, lambda rest: rest.publish_checkpoint_from_tinker_path(path))

    @routes.delete(f"{CHECKPOINT}/publish", status_code=204)
    async def unpublish(path: Checkpoint, context: Context) -> None:
        await _ask(context, lambda rest: rest.unpublish_checkpoint_from_tinker_path(path))

    @routes.put(f"{CHECKPOINT}/ttl", status_code=204)
    async def set_ttl(path: Checkpoint, body: Ttl, context: Context) -> None:
        await _ask(context, lambda rest: rest.set_checkpoint_ttl_from_tinker_path(path, body.ttl_seconds))

    @routes.post("/copy_weights")
    async def copy_weights(body: CopyWeights, context: Context, key: IdempotencyKey = None) -> Any:
        """Copy into a new run. There are no projects here, so destination_project_id has no effect."""
        if body.weights_access_token is not None:
            raise Refused(400, "weights_access_token is only understood by the hosted service; leave it out")

        async def copy() -> str:
            source = CheckpointPath.parse(body.source_path).folder(context.tenant.home)
            size = await asyncio.to_thread(bytes_below, source)
            with await context.service.disk.room(context.tenant, size + METADATA_BYTES):
                return await _ask(
                    context,
                    lambda rest: rest.copy_weights(body.source_path, ttl_seconds=body.ttl_seconds),
                    context.service.copying,
                )

        return {"tinker_path": await calls.run(context.tenant, key, copy)}


def _add_files(routes: APIRouter) -> None:
    @routes.get(f"{CHECKPOINT}/external_weights_urls")
    async def external_weights_urls(path: Checkpoint, request: Request, context: Context) -> Any:
        """URLs on this server, which work for an hour without a key."""
        exported = await _ask(context, lambda rest: rest.get_external_weights_urls(path))
        parsed = CheckpointPath.parse(path)
        paths = {name: f"{PREFIX}{parsed.run_id}/{parsed.name}/{name}" for name in exported.urls}
        urls = {name: _signed(request, context, url_path) for name, url_path in paths.items()}
        expires = min(exported.expires, datetime.now(UTC) + timedelta(seconds=SECONDS))
        return {"urls": urls, "expires": expires}

    @routes.get(f"{CHECKPOINT}/archive")
    async def archive(path: Checkpoint, request: Request, context: Context) -> Response:
        """Redirect to a URL of the adapter's tar that works for an hour without a key, as SDKs before 0.38 expect."""
        expires = datetime.now(UTC) + timedelta(seconds=SECONDS)
        with await _opened(context, path) as opened:
            if opened.expires_at is not None:
                expires = min(expires, datetime.fromtimestamp(opened.expires_at, UTC))
        parsed = CheckpointPath.parse(path)
        url_path = f"{PREFIX}{parsed.run_id}/{parsed.kind}/{parsed.name}/{ARCHIVE_NAME}"
        headers = {"Location": _signed(request, context, url_path), "Expires": format_datetime(expires, usegmt=True)}
        return Response(status_code=302, headers=headers)

    @routes.get(f"/files/{{run_id}}/{{kind}}/{{name}}/{ARCHIVE_NAME}")
    async def archive_file(path: Checkpoint, context: Context) -> Response:
        """The adapter's tar, by a signed URL or with a key."""
        parsed = CheckpointPath.parse(path)
        return ArchiveResponse(await _opened(context, path), f"{parsed.name}.tar")

    @routes.get("/files/{run_id}/{name}/{file}")
    async def file(run_id: Name, name: Name, file: Name, context: Context) -> FileResponse:
        """A file of an export, by a signed URL or with a key."""
        path = f"tinker://{run_id}/external_weights/{name}"
        exported = await _ask(context, lambda rest: rest.get_external_weights_urls(path))
        if file not in exported.urls:
            raise Refused(404, f"{path} has no file {file!r}; it has {', '.join(exported.urls)}")
        return FileResponse(CheckpointPath.parse(path).folder(context.tenant.home) / file)
