"""The outermost application, there from the first second to the last: what the server says of itself, and its access log."""

from __future__ import annotations

import time
from typing import Literal

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tinker_local_backend.server.access_log import AccessLog
from tinker_local_backend.server.errors import refusal
from tinker_local_backend.server.service import Service
from tinker_local_backend.server.sessions import Refused

Stage = Literal["loading", "ok", "stopping"]

HEALTH_ROUTE = "/health"
"""503 only from a server that is stopping: one that loads is healthy, and whatever supervises it must let it go on."""

READY_ROUTES = frozenset({"/ready", "/api/v1/healthz"})
"""200 only from a server that takes requests. The second is the SDK's."""


class Door:
    """Answers the routes above itself, to anybody. All else goes to the app, once the models are loaded; before, it is a 503,
    after which clients try again."""

    def __init__(self, log: AccessLog):
        self._log = log
        self._app: ASGIApp | None = None
        self._service: Service | None = None

    def open(self, app: ASGIApp, service: Service) -> None:
        """The models are loaded."""
        self._app, self._service = app, service

    @property
    def stage(self) -> Stage:
        if self._service is None:
            return "loading"
        return "stopping" if self._service.closing or self._service.link.died.is_set() else "ok"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        stage, path = self.stage, scope["path"]
        if path == HEALTH_ROUTE or path in READY_ROUTES:
            is_fine = stage == "ok" or (stage == "loading" and path == HEALTH_ROUTE)
            await JSONResponse({"status": stage}, 200 if is_fine else 503)(scope, receive, send)
            return
        begun, status = time.monotonic(), 0

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            if self._app is None:
                refused = Refused(503, "the server is loading its models; send the request again")
                await refusal(path, refused)(scope, receive, noting)
            else:
                await self._app(scope, receive, noting)
        finally:
            self._log.answered(scope, status, time.monotonic() - begun)
