"""What stands before every route: the key, the size and the pace of the body, its compression, and the count of answers.

A plain ASGI middleware. It reads the whole body before a route sees any of it, so a slow client holds a connection and nothing
else, and for no longer than `body_seconds`.
"""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Iterable

import zstandard
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tinker_local_backend.server.access import Access
from tinker_local_backend.server.config import MIB, ServerConfig
from tinker_local_backend.server.errors import error_body
from tinker_local_backend.server.metrics import Metrics
from tinker_local_backend.server.sessions import Refused

OPEN_ROUTES = frozenset({"/health", "/api/v1/healthz"})
"""They say only that the server is there."""

ON_A_THREAD = 1 << 20
"""Bodies from this size on are decompressed off the event loop."""

_PIECE = 1 << 20


class Guard:
    """Puts the tenant into `scope["state"]["tenant"]` and hands on the whole body, decompressed."""

    def __init__(self, app: ASGIApp, access: Access, config: ServerConfig, metrics: Metrics):
        self._app = app
        self._access = access
        self._config = config
        self._metrics = metrics

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
            await self._app(scope, _replay(body, receive), counting)
        except Refused as refusal:
            await _answer(counting, scope["path"], refusal)
        route = scope.get("route")
        self._metrics.answered(getattr(route, "path", "none"), status)

    async def _admit(self, scope: Scope, receive: Receive) -> bytes:
        headers = {name: value for name, value in scope["headers"]}
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


async def _answer(send: Send, path: str, refusal: Refused) -> None:
    body = json.dumps(error_body(path, refusal.status, refusal.detail)).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
