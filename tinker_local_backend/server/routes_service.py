"""Routes of the service: flags for the client, sessions and their heartbeat, what is served."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Response

from tinker_local_backend.server.routes_common import IdempotencyKey, Once, ServiceOf, TenantOf
from tinker_local_backend.server.schemas import CreateSession, SessionId
from tinker_local_backend.server.sessions import Refused

CLIENT_CONFIG = {
    # Unpickled clients of one sampler ask for a range of sequence numbers instead of guessing one.
    "sample_join_sampling_session": True,
    # SDK 0.24 sends training data as JSON, and to two routes, unless it is told not to; later ones know nothing else.
    "proto_write_fwdbwd": True,
    "fwd_via_fwdbwd": True,
}
"""Flags that differ from the SDK's own."""

DYNAMIC_CONFIG = {"refresh_interval_sec": 300, "sample_cancel_enabled": True, "sample_cancel_max_batch_size": 64}


def router() -> APIRouter:
    routes = APIRouter()
    once = Once()

    @routes.get("/metrics")
    async def metrics(service: ServiceOf, tenant: TenantOf) -> Response:
        _, reply = service.link.call({"op": "stats"})
        stats = (await reply).fields
        service.metrics.engine.samplers, service.metrics.engine.waits = (
            stats.get("samplers", {}),
            stats.get("waits", {}),
        )
        return Response(service.metrics.text(tenant), media_type="text/plain; version=0.0.4")

    @routes.post("/api/v1/client/config")
    async def client_config() -> Any:
        return CLIENT_CONFIG

    @routes.post("/api/v1/client/dynamic_config")
    async def dynamic_config() -> Any:
        return DYNAMIC_CONFIG

    @routes.post("/api/v1/telemetry")
    async def telemetry() -> Any:
        """Telemetry is for the hosted service; nothing of it is kept."""
        return {"status": "accepted"}

    @routes.get("/api/v1/get_server_capabilities")
    async def capabilities(service: ServiceOf) -> Any:
        models = [
            {
                "model_name": model.name,
                "max_context_length": model.context_length,
                "trainable": True,
                "sampleable": True,
            }
            for model in service.link.models
        ]
        return {"supported_models": models}

    @routes.post("/api/v1/create_session")
    async def create_session(body: CreateSession, service: ServiceOf, tenant: TenantOf, key: IdempotencyKey) -> Any:
        async def create() -> str:
            return (await service.create_session(tenant, body.user_metadata or {}, body.display_name)).session_id

        return {"type": "create_session", "session_id": await once.run(tenant, key, create)}

    @routes.post("/api/v1/session_heartbeat")
    async def heartbeat(body: SessionId, service: ServiceOf, tenant: TenantOf) -> Any:
        try:
            service.session(tenant, body.session_id)
        except Refused as refusal:
            raise Refused(410, refusal.detail) from None  # what makes the SDK stop asking
        return {"type": "session_heartbeat"}

    @routes.post("/api/v1/sessions/{session_id}/finish", status_code=204)
    async def finish(session_id: str, service: ServiceOf, tenant: TenantOf) -> None:
        service.end_session(service.session(tenant, session_id), "it was closed")

    return routes
