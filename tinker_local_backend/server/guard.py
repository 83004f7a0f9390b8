"""What stands before every route: the key, the size, pace and type of the body, and the count of answers.

A plain ASGI middleware. It reads the whole body before a route sees any of it, so a slow client holds a connection and what it
has sent, and for no longer than `body_seconds`. What has been read counts until the request is answered (held.py).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tinker_local_backend.server.access import Access, Tenant
from tinker_local_backend.server.config import MIB, is_loopback
from tinker_local_backend.server.direct import DirectRoute, Posted
from tinker_local_backend.server.errors import refusal
from tinker_local_backend.server.held import Holding
from tinker_local_backend.server.service import Service
from tinker_local_backend.server.sessions import Refused

SMALL_BODY = 1 << 18
"""Bytes of a body, after decompression, that FastAPI gets to parse on the event loop; larger ones have routes of their own."""

JSON = "application/json"
PROTOBUF = ("application/x-protobuf", "application/octet-stream")


class Guard:
    """Puts the tenant into `scope["state"]["tenant"]` and hands on the whole body: decompressed to FastAPI, or as it came to a
    route of `direct` (by path), which it answers itself."""

    def __init__(self, app: ASGIApp, service: Service, access: Access, direct: Mapping[str, DirectRoute]):
        self._app = app
        self._service = service
        self._access = access
        self._direct = direct
        self._config = service.config
        self._open: Counter[str] = Counter()
        """requests that have not been answered, by tenant"""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = 500

        async def counting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._answer(scope, receive, counting)
        except Refused as error:
            await refusal(scope["path"], error)(scope, receive, counting)
        self._service.metrics.answered(getattr(scope.get("route"), "path", "none"), status)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises Refused for what no route gets to see."""
        headers = dict(scope["headers"])
        tenant = self._admit(scope, headers)
        most = self._config.max_tenant_requests
        if self._open[tenant.name] >= most:
            raise Refused(429, f"{most} of your requests are open (max_tenant_requests); send this one again")
        holding = self._service.held.hold(tenant)
        self._open[tenant.name] += 1
        try:
            body = await self._read(headers, receive, holding)
            route = self._direct.get(scope["path"])
            if body:
                _check_type(headers, () if route is None or route.body is not None else PROTOBUF)
            posted = Posted(self._service, tenant, body, _is_compressed(headers), receive, holding)
            if route is None:
                plain = await posted.read(SMALL_BODY, "this route has no more to say", lambda plain: plain)
                holding.grow(len(plain) if posted.is_compressed else 0)
                await self._app(scope, _replay(plain, receive), send)
                return
            scope["route"] = route
            response = await _answered(route, scope, posted)
            await response(scope, receive, send)  # a stream works with the body until its end
        finally:
            holding.release()
            self._open[tenant.name] -= 1

    def _admit(self, scope: Scope, headers: Mapping[bytes, bytes]) -> Tenant:
        """Whose request it is. Raises Refused for a stranger."""
        if not self._access.has_keys:
            _check_host(headers.get(b"host", b"").decode("latin-1"))
        tenant = self._access.tenant(_key(headers))
        if tenant is None:
            raise Refused(401, "the API key is missing or not known here; set TINKER_API_KEY to one of this server's")
        scope.setdefault("state", {})["tenant"] = tenant
        return tenant

    async def _read(self, headers: Mapping[bytes, bytes], receive: Receive, holding: Holding) -> bytes:
        limit = self._config.max_body_mib * MIB
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > limit:
            raise Refused(413, f"the body has {int(length)} bytes; at most {limit} are taken (max_body_mib)")
        try:
            async with asyncio.timeout(self._config.body_seconds):
                return await _read(receive, limit, holding)
        except TimeoutError:
            raise Refused(
                400, f"the body did not arrive within {self._config.body_seconds:g} s (body_seconds)"
            ) from None


async def _answered(route: DirectRoute, scope: Scope, posted: Posted) -> Response:
    try:
        if scope["method"] != "POST":
            raise Refused(405, f"{scope['method']} is no method of this route; use POST")
        return await route.answer(posted)
    except Exception as error:
        return refusal(scope["path"], error)


def _check_type(headers: Mapping[bytes, bytes], others: Sequence[str]) -> None:
    """Raise Refused for a body that does not say what it is.

    A web page can have its visitor's browser send other types anywhere, without asking whether that is welcome.
    """
    given = headers.get(b"content-type", b"").decode("latin-1")
    kind = given.partition(";")[0].strip().lower()
    if kind != JSON and kind not in others:
        raise Refused(
            415,
            f"the body comes with {f'content-type {given[:100]!r}' if given else 'no content-type'}; send the header "
            f"'Content-Type: {others[0] if others else JSON}' (curl: -H 'Content-Type: {JSON}')",
        )


def _is_compressed(headers: Mapping[bytes, bytes]) -> bool:
    encoding = headers.get(b"content-encoding", b"identity").decode("latin-1").strip().lower()
    if encoding not in ("", "identity", "zstd"):
        raise Refused(415, f"content-encoding {encoding[:100]!r} is not understood; send zstd or none")
    return encoding == "zstd"


def _check_host(host: str) -> None:
    """Raise Refused for a name that is not this machine's own.

    Without keys whoever reaches the port is let in, and a browser reaches it for any web page whose name its owner points here.
    """
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
    if not is_loopback(name.removeprefix("[").removesuffix("]")):
        raise Refused(
            403,
            f"the host {host[:200]!r} is not this machine: a server without API keys answers to 127.0.0.1, localhost and [::1] "
            "alone",
        )


def _key(headers: Mapping[bytes, bytes]) -> str | None:
    key = headers.get(b"x-api-key")
    if key is None:
        scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
        key = token if scheme.lower() == b"bearer" else None
    return None if key is None else key.decode("latin-1").strip()


async def _read(receive: Receive, limit: int, holding: Holding) -> bytes:
    pieces, size = [], 0
    while True:
        message = await receive()
        if message["type"] != "http.request":
            raise Refused(400, "the client went away before the body was complete")
        piece = message.get("body", b"")
        size += len(piece)
        if size > limit:
            raise Refused(413, f"the body is longer than {limit} bytes (max_body_mib)")
        holding.grow(len(piece))
        pieces.append(piece)
        if not message.get("more_body"):
            return b"".join(pieces)


def _replay(body: bytes, receive: Receive) -> Receive:
    """Gives the body in one piece, and afterwards what the client does next."""
    messages: Iterable[Message] = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def replay() -> Message:
        for message in messages:
            return message
        return await receive()

    return replay
