"""The ASGI application in front of all routes: health, API keys, checks of bodies, counters and the access log.

It reads the whole body before a route runs, so a slow client only occupies a connection and the memory of what it has sent, for
at most `body_seconds`. The body counts as memory of its tenant until the request is answered (budget.py).
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import Message, Receive, Scope, Send

from tinker_local_backend.errors import LocalBackendError
from tinker_local_backend.server import (
    routes_messages,
    routes_openai,
    routes_responses,
    routes_rest,
    routes_sampling,
    routes_service,
    routes_tokens,
    routes_training,
)
from tinker_local_backend.server.access import Access, Tenant
from tinker_local_backend.server.access_log import AccessLog
from tinker_local_backend.server.budget import Reservation
from tinker_local_backend.server.config import MIB, is_loopback
from tinker_local_backend.server.errors import Refused, refusal
from tinker_local_backend.server.routes_common import Posted
from tinker_local_backend.server.service import Service

ROUTERS = (routes_service, routes_training, routes_sampling, routes_rest, routes_openai, routes_tokens)
DIRECT = {
    route.path: route
    for routes in (routes_training, routes_sampling, routes_openai, routes_messages, routes_responses, routes_tokens)
    for route in routes.DIRECT
}

HEALTH_ROUTE = "/health"
"""503 only while stopping: a server that is loading models is healthy, and its supervisor must not restart it."""

READY_ROUTES = frozenset({"/ready", "/api/v1/healthz"})
"""200 only from a server that accepts requests. The SDK asks the second."""

SMALL_BODY = 1 << 18
"""Largest decompressed body, in bytes, that FastAPI parses on the event loop; larger ones need a DirectRoute."""

JSON = "application/json"
PROTOBUF = ("application/x-protobuf", "application/octet-stream")


class Gateway:
    """Answers health routes, without a key, and DirectRoutes; 503, on which clients retry, until the models are loaded.
    FastAPI gets all other requests, with the tenant in `scope["state"]` and the whole decompressed body."""

    def __init__(self, log: AccessLog):
        self._log = log
        self._service: Service | None = None
        self._busy: Counter[str] = Counter()
        """unanswered requests by tenant"""

    def open(self, service: Service, access: Access) -> None:
        """Accept requests: the models are loaded."""
        self._service, self._access, self._app = service, access, _framework(service)

    @property
    def stage(self) -> Literal["loading", "ok", "stopping"]:
        if self._service is None:
            return "loading"
        return "stopping" if self._service.requests.closing or self._service.link.died.is_set() else "ok"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        path, service = scope["path"], self._service
        if path == HEALTH_ROUTE or path in READY_ROUTES:
            stage = self.stage
            is_fine = stage == "ok" or (stage == "loading" and path == HEALTH_ROUTE)
            await JSONResponse({"status": stage}, 200 if is_fine else 503)(scope, receive, send)
            return
        begun, status = time.monotonic(), 0

        async def send_and_record(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            if service is None:
                raise Refused(503, "the server is loading its models; send the request again")
            await self._answer(service, scope, receive, send_and_record)
        except Exception as error:
            if status:  # the response has already started
                raise
            await refusal(path, error)(scope, receive, send_and_record)
        finally:
            self._log.answered(scope, status, time.monotonic() - begun)
            if service is not None:
                service.metrics.answered(getattr(scope.get("route"), "path", "none"), status or 500)

    async def _answer(self, service: Service, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises Refused for failed checks, and the errors of DirectRoutes."""
        headers = dict(scope["headers"])
        tenant = self._admit(scope, headers)
        limit = service.config.max_tenant_requests
        if self._busy[tenant.name] >= limit:
            raise Refused(429, f"{limit} of your requests are open (max_tenant_requests); send this one again")
        reservation = service.memory.reserve(tenant)
        self._busy[tenant.name] += 1
        try:
            body = await _read(service, headers, receive, reservation)
            route = DIRECT.get(scope["path"])
            if body:
                _check_type(headers, () if route is None or route.body is not None else PROTOBUF)
            posted = Posted(service, tenant, body, _is_compressed(headers), receive, reservation)
            if route is None:
                plain = await posted.read(SMALL_BODY, "this route takes no more", lambda plain: plain)
                reservation.extend(len(plain) if posted.is_compressed else 0)
                await self._app(scope, _replay(plain, receive), send)
                return
            scope["route"] = route
            if scope["method"] != "POST":
                raise Refused(405, f"this route does not take {scope['method']}; use POST")
            response = await route.answer(posted)
            await response(scope, receive, send)  # a stream uses the body until it ends
        finally:
            reservation.release()
            self._busy[tenant.name] -= 1

    def _admit(self, scope: Scope, headers: Mapping[bytes, bytes]) -> Tenant:
        """The tenant of a request, by its key or by a signed URL. Raises Refused (401) for a missing or unknown key."""
        if not self._access.has_keys:
            _check_host(headers.get(b"host", b"").decode("latin-1"))
        key = headers.get(b"x-api-key")
        if key is None:
            scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
            key = token if scheme.lower() == b"bearer" else None
        query = scope.get("query_string", b"").decode("latin-1")
        signed = None if self._service is None else self._service.signed_urls.tenant(scope["path"], query)
        if signed is not None:
            tenant = self._access.named(signed)
        else:
            tenant = self._access.tenant(None if key is None else key.decode("latin-1").strip())
        if tenant is None:
            raise Refused(401, "the API key is missing or unknown; set TINKER_API_KEY to one of this server's")
        scope.setdefault("state", {})["tenant"] = tenant
        return tenant


def _framework(service: Service) -> FastAPI:
    app = FastAPI(title="tinker_local_backend", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    app.state.service = service
    for routes in ROUTERS:
        app.include_router(routes.router())

    async def refused(request: Request, error: Exception) -> JSONResponse:
        return refusal(request.url.path, error)

    async def unknown(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        what = f"{request.method} {request.url.path[:200]}"
        detail = f"there is no route {what} here; docs/server.md lists the routes"
        return refusal(
            request.url.path, Refused(error.status_code, detail if error.status_code in (404, 405) else error.detail)
        )

    app.add_exception_handler(HTTPException, unknown)
    for kind in (Refused, RequestValidationError, LocalBackendError, Exception):
        app.add_exception_handler(kind, refused)
    return app


def _check_type(headers: Mapping[bytes, bytes], others: Sequence[str]) -> None:
    """Raise Refused unless the content-type is JSON or one of `others`.
    A web page can make a browser send other types to any server without a CORS preflight."""
    given = headers.get(b"content-type", b"").decode("latin-1")
    kind = given.partition(";")[0].strip().lower()
    if kind.startswith("multipart/"):
        raise Refused(
            415, f"the body is {kind[:100]}: no route here takes files; send JSON to a route of docs/server.md"
        )
    if kind != JSON and kind not in others:
        raise Refused(
            415,
            f"the body has {f'content-type {given[:100]!r}' if given else 'no content-type'}; send the header "
            f"'Content-Type: {others[0] if others else JSON}' (curl: -H 'Content-Type: {JSON}')",
        )


def _is_compressed(headers: Mapping[bytes, bytes]) -> bool:
    encoding = headers.get(b"content-encoding", b"identity").decode("latin-1").strip().lower()
    if encoding not in ("", "identity", "zstd"):
        raise Refused(415, f"content-encoding {encoding[:100]!r} is not understood; send zstd or none")
    return encoding == "zstd"


def _check_host(host: str) -> None:
    """Raise Refused unless the host is a loopback name.
    Without keys, a web page could otherwise reach the server by pointing its own name at 127.0.0.1 (DNS rebinding)."""
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
    if not is_loopback(name.removeprefix("[").removesuffix("]")):
        raise Refused(
            403,
            f"the host {host[:200]!r} is not this machine: a server without API keys answers only to 127.0.0.1, localhost and "
            "[::1]",
        )


async def _read(service: Service, headers: Mapping[bytes, bytes], receive: Receive, reservation: Reservation) -> bytes:
    """Read the whole body, and extend the reservation by each chunk."""
    limit, seconds = service.config.max_body_mib * MIB, service.config.body_seconds
    length = headers.get(b"content-length", b"0")
    if length.isdigit() and int(length) > limit:
        raise Refused(413, f"the body has {int(length)} bytes; at most {limit} are allowed (max_body_mib)")
    pieces, size = [], 0
    try:
        async with asyncio.timeout(seconds):
            while True:
                message = await receive()
                if message["type"] != "http.request":
                    raise Refused(400, "the client disconnected before the body was complete")
                piece = message.get("body", b"")
                size += len(piece)
                if size > limit:
                    raise Refused(413, f"the body is longer than {limit} bytes (max_body_mib)")
                reservation.extend(len(piece))
                pieces.append(piece)
                if not message.get("more_body"):
                    return b"".join(pieces)
    except TimeoutError:
        raise Refused(400, f"the body did not arrive within {seconds:g} s (body_seconds)") from None


def _replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that returns the body in one message, then the client's later messages."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return messages.pop() if messages else await receive()

    return replay
