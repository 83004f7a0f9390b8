"""What stands before every route: the key, the size and the pace of the body, its compression, and the count of answers.

A plain ASGI middleware. It reads the whole body before a route sees any of it, so a slow client holds a connection and nothing
else, and for no longer than `body_seconds`.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import Iterable, Mapping

import zstandard
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tinker_local_backend.server.access import Access
from tinker_local_backend.server.config import MIB, is_loopback
from tinker_local_backend.server.direct import DirectRoute
from tinker_local_backend.server.errors import refusal
from tinker_local_backend.server.service import Service
from tinker_local_backend.server.sessions import Refused

OPEN_ROUTES = frozenset({"/health", "/api/v1/healthz"})
"""They say only that the server is there."""

ON_A_THREAD = 1 << 20
"""Bodies from this size on are decompressed off the event loop."""

_PIECE = 1 << 20


class Guard:
    """Puts the tenant into `scope["state"]["tenant"]` and hands on the whole body, decompressed: to FastAPI, or to a route
    of `direct` (by path), which it answers itself."""

    def __init__(self, app: ASGIApp, service: Service, access: Access, direct: Mapping[str, DirectRoute]):
        self._app = app
        self._service = service
        self._access = access
        self._direct = direct
        self._config = service.config

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
            body = await self._admit(scope, receive)
        except Refused as error:
            await refusal(scope["path"], error)(scope, receive, counting)
        else:
            route = self._direct.get(scope["path"])
            if route is None:
                await self._app(scope, _replay(body, receive), counting)
            else:
                scope["route"] = route
                await (await self._answer(route, scope, body))(scope, receive, counting)
        self._service.metrics.answered(getattr(scope.get("route"), "path", "none"), status)

    async def _answer(self, route: DirectRoute, scope: Scope, body: bytes) -> Response:
        try:
            if scope["method"] != "POST":
                raise Refused(405, f"{scope['method']} is no method of this route; use POST")
            return await route.answer(self._service, scope["state"]["tenant"], body)
        except Exception as error:
            return refusal(scope["path"], error)

    async def _admit(self, scope: Scope, receive: Receive) -> bytes:
        headers = {name: value for name, value in scope["headers"]}
        if not self._access.has_keys:
            _check_host(headers.get(b"host", b"").decode("latin-1"))
        if scope["path"] not in OPEN_ROUTES:
            tenant = self._access.tenant(_key(headers))
            if tenant is None:
                raise Refused(
                    401, "the API key is missing or not known here; set TINKER_API_KEY to one of this server's"
                )
            scope.setdefault("state", {})["tenant"] = tenant
        limit = self._config.max_body_mib * MIB
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > limit:
            raise Refused(413, f"the body has {int(length)} bytes; at most {limit} are taken (max_body_mib)")
        try:
            async with asyncio.timeout(self._config.body_seconds):
                body = await _read(receive, limit)
        except TimeoutError:
            raise Refused(
                400, f"the body did not arrive within {self._config.body_seconds:g} s (body_seconds)"
            ) from None
        encoding = headers.get(b"content-encoding", b"identity").decode("latin-1").strip().lower()
        if encoding in ("", "identity"):
            return body
        if encoding != "zstd":
            raise Refused(415, f"content-encoding {encoding!r} is not understood; send zstd or none")
        most = self._config.max_decompressed_mib * MIB
        if len(body) < ON_A_THREAD:
            return decompress(body, most)
        return await asyncio.to_thread(decompress, body, most)


def decompress(body: bytes, most: int) -> bytes:
    """At most `most` bytes are ever made. Raises Refused for more, and for what is not zstd."""
    pieces, size = [], 0
    try:
        with zstandard.ZstdDecompressor(max_window_size=1 << 27).stream_reader(io.BytesIO(body)) as reader:
            while piece := reader.read(_PIECE):
                pieces.append(piece)
                size += len(piece)
                if size > most:
                    raise Refused(413, f"the body is longer than {most} bytes when decompressed (max_decompressed_mib)")
    except zstandard.ZstdError:
        raise Refused(400, "the body is not in zstd's format, as its content-encoding says") from None
    return b"".join(pieces)


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


def _key(headers: dict[bytes, bytes]) -> str | None:
    key = headers.get(b"x-api-key")
    if key is None:
        scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
        key = token if scheme.lower() == b"bearer" else None
    return None if key is None else key.decode("latin-1").strip()


async def _read(receive: Receive, limit: int) -> bytes:
    pieces, size = [], 0
    while True:
        message = await receive()
        if message["type"] != "http.request":
            raise Refused(400, "the client went away before the body was complete")
        pieces.append(message.get("body", b""))
        size += len(pieces[-1])
        if size > limit:
            raise Refused(413, f"the body is longer than {limit} bytes (max_body_mib)")
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
