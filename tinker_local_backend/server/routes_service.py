"""Routes of the service: flags for the client, sessions and heartbeats, served models, refused routes of the hosted service."""

from __future__ import annotations

from functools import partial
from typing import Any

from fastapi import APIRouter, Response

from tinker_local_backend.server.errors import Refused
from tinker_local_backend.server.routes_common import Context, IdempotencyKey, IdempotentCalls
from tinker_local_backend.server.schemas import CreateSession, SessionId

CLIENT_CONFIG = {
    # Unpickled clients of one sampler request a range of sequence numbers instead of guessing one.
    "sample_join_sampling_session": True,
    # Without these, SDK 0.24 sends training data as JSON, to two routes; later versions always behave as with them.
    "proto_write_fwdbwd": True,
    "fwd_via_fwdbwd": True,
}
"""Flags that differ from the SDK's defaults."""

_BILLING = "nothing is billed here; list_user_checkpoints states sizes in bytes"

HOSTED_ONLY = (
    ("POST", "/create_custom_loss", "a custom loss runs in the client here: forward_backward_custom"),
    ("POST", "/auth/token", "there are no accounts here; the API key is all that is needed"),
    ("PUT", "/sessions/{session_id}/project", "there are no projects here"),
    ("GET", "/sessions/{session_id}/trace_export", "no trace of requests is kept here"),
    ("GET", "/audit", "no log of requests is kept here"),
    ("GET", "/billing/usage/events", _BILLING),
    ("GET", "/billing/usage/checkpoints/current", _BILLING),
)
"""Method, route, and the reason for refusing it, with a status that the SDK does not retry."""


def router() -> APIRouter:
    routes = APIRouter()
    _add_service(routes)
    _add_sessions(routes)
    for method, path, why in HOSTED_ONLY:
        routes.add_api_route(f"/api/v1{path}", partial(_refuse, why), methods=[method])
    return routes


async def _refuse(why: str) -> None:
    raise Refused(400, why)


def _add_service(routes: APIRouter) -> None:
    @routes.get("/metrics")
    async def metrics(context: Context) -> Response:
        service = context.service
        _, reply = service.link.call({"op": "stats"})
        service.metrics.engine.update((await reply).fields)
        return Response(service.metrics.text(context.tenant), media_type="text/plain; version=0.0.4")

    @routes.post("/api/v1/client/config")
    async def client_config() -> Any:
        return CLIENT_CONFIG

    @routes.post("/api/v1/client/dynamic_config")
    async def dynamic_config() -> Any:
        return {"refresh_interval_sec": 300, "sample_cancel_enabled": True, "sample_cancel_max_batch_size": 64}

    @routes.post("/api/v1/telemetry")
    async def telemetry() -> Any:
        """Telemetry is for the hosted service and discarded."""
        return {"status": "accepted"}

    @routes.get("/api/v1/get_server_capabilities")
    async def capabilities(context: Context) -> Any:
        can = {"trainable": True, "sampleable": True}
        models = [
            {"model_name": model.name, "max_context_length": model.context_length, **can}
            for model in context.service.link.models
        ]
        return {"supported_models": models}


def _add_sessions(routes: APIRouter) -> None:
    calls = IdempotentCalls()

    @routes.post("/api/v1/create_session")
    async def create_session(body: CreateSession, context: Context, key: IdempotencyKey = None) -> Any:
        async def create() -> str:
            metadata = body.user_metadata or {}
            return (await context.service.create_session(context.tenant, metadata, body.display_name)).session_id

        return {"type": "create_session", "session_id": await calls.run(context.tenant, key, create)}

    @routes.post("/api/v1/session_heartbeat")
    async def heartbeat(body: SessionId, context: Context) -> Any:
        try:
            context.service.sessions.touch(context.tenant, body.session_id)
        except Refused as refusal:
            raise Refused(410, refusal.detail) from None  # the SDK then stops its heartbeats
        return {"type": "session_heartbeat"}

    @routes.post("/api/v1/sessions/{session_id}/finish", status_code=204)
    async def finish(session_id: str, context: Context) -> None:
        context.service.end_session(context.service.sessions.touch(context.tenant, session_id), "it was closed")
