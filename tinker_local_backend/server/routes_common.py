"""Shared by routes: the request's context, idempotency keys, and DirectRoutes, which bypass FastAPI.

Routes that every training step or sample calls, or that have large bodies, are DirectRoutes: FastAPI's route matching and
dependencies take longer than the rest of such a call, and it parses bodies on the event loop.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar, cast

import zstandard
from fastapi import Depends, Header, Request
from pydantic import BaseModel, ValidationError
from starlette.responses import Response
from starlette.types import Receive

from tinker_local_backend.errors import RequestError
from tinker_local_backend.server.access import Tenant
from tinker_local_backend.server.budget import Reservation, memory_of
from tinker_local_backend.server.config import MIB
from tinker_local_backend.server.errors import Refused, refused_body
from tinker_local_backend.server.service import Service
from tinker_local_backend.wire.codec import TooLongError, decompress

T = TypeVar("T")

INLINE_BYTES = 1 << 15
"""Bodies up to this size are decompressed and parsed on the event loop: starting a thread would take longer."""

MAX_PARTS = 1 << 17
"""Limit on arrays, objects and keys of a JSON body. Parsing holds the GIL: 0.1 s for this many objects, 0.3 s for this many
lists, 3.9 s for two million lists."""

REMEMBERED_KEYS = 4096


@dataclass(frozen=True)
class RequestContext:
    """The service and the tenant of a request."""

    service: Service
    tenant: Tenant


async def _context(request: Request) -> RequestContext:  # async, because FastAPI runs plain functions on threads
    return RequestContext(request.app.state.service, request.state.tenant)


Context = Annotated[RequestContext, Depends(_context)]
IdempotencyKey = Annotated[str | None, Header(alias="x-idempotency-key")]


class IdempotentCalls:
    """Runs a call once per idempotency key, however often the request is sent."""

    def __init__(self) -> None:
        self._tasks: OrderedDict[tuple[str, str], asyncio.Task[Any]] = OrderedDict()

    async def run(self, tenant: Tenant, key: str | None, call: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The result or error of `call()`, or of the earlier call with this key. A failed call is not remembered."""
        if key is None:
            return await call()
        cache_key = (tenant.name, key[:256])
        task = self._tasks.get(cache_key)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            task = self._tasks[cache_key] = asyncio.create_task(call())
            if len(self._tasks) > REMEMBERED_KEYS:
                self._tasks.popitem(last=False)
        return cast(T, await asyncio.shield(task))


def digest(body: BaseModel, *without: str) -> bytes:
    """Identifies a request, so that a retry is recognised. `without`: fields that a retry changes."""
    return digest_bytes(body.model_dump_json(exclude=set(without)).encode())


def digest_bytes(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


@dataclass(frozen=True)
class Posted(RequestContext):
    """A POST request with its body as received."""

    data: bytes
    is_compressed: bool
    receive: Receive
    """reports that the client disconnects"""
    reservation: Reservation
    """memory of the body, until the response is sent or the queued request makes its own reservation"""

    async def read(self, limit: int, key: str, work: Callable[[bytes], T]) -> T:
        """Apply `work` to the decompressed body. Raises Refused if it exceeds `limit` bytes (config key `key`) or is not zstd.
        Large bodies are decompressed and processed in one job off the event loop, so they stay compressed in the queue."""

        def convert() -> T:
            try:
                plain = decompress(self.data, limit) if self.is_compressed else self.data
            except TooLongError as error:
                raise Refused(413, f"{error} ({key})") from None
            except RequestError as error:
                raise Refused(400, str(error)) from None
            if len(plain) > limit:
                raise Refused(413, f"the body has {len(plain)} bytes; at most {limit} are allowed ({key})")
            return work(plain)

        return await self.off_loop(_plain_size(self.data) if self.is_compressed else len(self.data), convert)

    async def off_loop(self, size: int, work: Callable[[], T]) -> T:
        """Run `work` on data of `size` bytes, off the event loop unless it is small."""
        return work() if size <= INLINE_BYTES else await self.service.parsing.run(self.tenant, work)


def _plain_size(data: bytes) -> int:
    """The size that the zstd header states; above INLINE_BYTES if it states none."""
    try:
        size = zstandard.frame_content_size(data)
    except zstandard.ZstdError:
        return 0
    return size if size >= 0 else INLINE_BYTES + 1


@dataclass(frozen=True)
class DirectRoute:
    """A POST route. `call` gets the request and the validated body, and raises the same errors as a FastAPI route."""

    path: str
    body: type[BaseModel] | None
    """schema of the JSON; None: the route reads protobuf itself"""
    call: Callable[[Posted, Any], Awaitable[Response]]

    async def answer(self, posted: Posted) -> Response:
        """Raises Refused or LocalBackendError for an invalid request."""
        if self.body is None:
            return await self.call(posted, None)
        body, kept = await posted.read(posted.service.config.max_json_mib * MIB, "max_json_mib", self._parsed)
        posted.reservation.extend(kept)
        return await self.call(posted, body)

    def _parsed(self, data: bytes) -> tuple[BaseModel, int]:
        """The validated body and its bytes in memory."""
        assert self.body is not None
        # Characters within strings count too: excluding them would take as long as parsing.
        parts = sum(data.count(character) for character in (b"[", b"{", b":"))
        if parts > MAX_PARTS:
            raise Refused(413, f"the body has {parts} characters [, {{ and :; at most {MAX_PARTS} are allowed")
        try:
            body = self.body.model_validate_json(data)
        except ValidationError as error:
            raise refused_body(self.path, error) from None
        return body, memory_of(body)
