"""Routes that only the hosted service can serve: each is refused with a reason, in one attempt."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import APIRouter

from tinker_local_backend.server.sessions import Refused

_BILLING = "nothing is billed here; list_user_checkpoints states sizes in bytes"

HOSTED_ONLY = (
    ("POST", "/create_custom_loss", "a custom loss runs in the client here: forward_backward_custom"),
    ("POST", "/auth/token", "there are no accounts here; the API key is all that is needed"),
    ("PUT", "/sessions/{session_id}/project", "there are no projects here"),
    ("GET", "/sessions/{session_id}/trace_export", "no trace of requests is kept here"),
    ("POST", "/sessions/search", "sessions cannot be searched here; list_sessions lists them all"),
    ("GET", "/audit", "no log of requests is kept here"),
    ("GET", "/billing/usage/events", _BILLING),
    ("GET", "/billing/usage/checkpoints/current", _BILLING),
    (
        "GET",
        "/training_runs/{run_id}/checkpoints/{kind}/{name}/external_weights_urls",
        "there are no external weights here; checkpoints are PEFT files under the server's home",
    ),
)
"""Method, route, and why there is no such thing."""


def router() -> APIRouter:
    routes = APIRouter(prefix="/api/v1")
    for method, path, why in HOSTED_ONLY:
        routes.add_api_route(path, _refuser(why), methods=[method])
    return routes


def _refuser(why: str) -> Callable[[], Coroutine[Any, Any, Any]]:
    async def refuse() -> Any:
        raise Refused(400, why)

    return refuse
