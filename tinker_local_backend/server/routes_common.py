"""What routes get: whose a request is, whom it asks, and the body of one that goes without a framework.

A DirectRoute is one that every training step and every sample ask for several times, or one whose body may be large. FastAPI
matches routes and resolves dependencies anew for each request, which takes longer than all the rest of these, and it parses
whatever comes on the event loop.
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
from tinker_local_backend.server.config import MIB
from tinker_local_backend.server.errors import Refused, refused_body
from tinker_local_backend.server.held import Holding, memory_of
from tinker_local_backend.server.service import Service
from tinker_local_backend.wire.codec import TooLongError, decompress

T = TypeVar("T")

AT_ONCE = 1 << 15
"""Bodies up to this size are decompressed and parsed on the event loop: a thread would take longer to begin."""

MAX_PARTS = 1 << 17
"""Arrays, objects and keys of a JSON body. They are made in one go with the interpreter held, which took 0.1 s for so many
objects and 0.3 s for lists (two million lists: 3.9 s)."""

REMEMBERED_KEYS = 4096


@dataclass(frozen=True)
class Asked:
    """Whom a request asks, and whose it is."""

    service: Service
    tenant: Tenant


async def _asked(request: Request) -> Asked:  # a coroutine, because FastAPI runs plain functions on threads
    return Asked(request.app.state.service, request.state.tenant)


Ask = Annotated[Asked, Depends(_asked)]
IdempotencyKey = Annotated[str | None, Header(alias="x-idempotency-key")]


class Once:
    """Carries out a request once per idempotency key, however often it is sent."""

    def __init__(self) -> None:
        self._tasks: OrderedDict[tuple[str, str], asyncio.Task[Any]] = OrderedDict()

    async def run(self, tenant: Tenant, key: str | None, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The result or error of `make()`, or of the earlier call with this key. A failed call may be tried again."""
        if key is None:
            return await make()
        place = (tenant.name, key[:256])
        task = self._tasks.get(place)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            task = self._tasks[place] = asyncio.create_task(make())
            if len(self._tasks) > REMEMBERED_KEYS:
                self._tasks.popitem(last=False)
        return cast(T, await asyncio.shield(task))


def digest(body: BaseModel, *without: str) -> bytes:
    """Of what a request asks for, so that one that is sent again is known. `without` names fields that a retry changes."""
    return digest_bytes(body.model_dump_json(exclude=set(without)).encode())


def digest_bytes(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


@dataclass(frozen=True)
class Posted(Asked):
    """A request with its body, as it came."""

    data: bytes
    is_compressed: bool
    receive: Receive
    """tells when the client goes away"""
    holding: Holding
    """what the body takes until the request is answered, or until it waits as another one that holds it"""

    async def read(self, most: int, limit: str, work: Callable[[bytes], T]) -> T:
        """What `work` makes of the body, decompressed. Raises Refused for more than `most` bytes, naming the limit, and for what
        is no zstd.

        Both are done in one turn off the loop, unless there is little of it: a body that waits for its turn is as small as it
        came.
        """

        def done() -> T:
            try:
                plain = decompress(self.data, most) if self.is_compressed else self.data
            except TooLongError as error:
                raise Refused(413, f"{error} ({limit})") from None
            except RequestError as error:
                raise Refused(400, str(error)) from None
            if len(plain) > most:
                raise Refused(413, f"the body has {len(plain)} bytes; at most {most} are taken ({limit})")
            return work(plain)

        return await self.aside(_plain_size(self.data) if self.is_compressed else len(self.data), done)

    async def aside(self, size: int, work: Callable[[], T]) -> T:
        """What `work` returns, off the event loop unless there is little of it."""
        return work() if size <= AT_ONCE else await self.service.parsing.run(self.tenant, work)


def _plain_size(data: bytes) -> int:
    """As the compressed data state it; more than is done at once where they do not."""
    try:
        size = zstandard.frame_content_size(data)
    except zstandard.ZstdError:
        return 0
    return size if size >= 0 else AT_ONCE + 1


@dataclass(frozen=True)
class DirectRoute:
    """A POST route. `call` takes the request and the checked body; it raises what FastAPI's routes raise."""

    path: str
    body: type[BaseModel] | None
    """what the JSON must be; None: the route takes protobuf as it comes"""
    call: Callable[[Posted, Any], Awaitable[Response]]

    async def answer(self, posted: Posted) -> Response:
        """Raises Refused or LocalBackendError for what is wrong with the request."""
        if self.body is None:
            return await self.call(posted, None)
        body, kept = await posted.read(posted.service.config.max_json_mib * MIB, "max_json_mib", self._parsed)
        posted.holding.grow(kept)
        return await self.call(posted, body)

    def _parsed(self, data: bytes) -> tuple[BaseModel, int]:
        """The body, and how many bytes it takes."""
        assert self.body is not None
        # Signs within strings count too: to tell them apart would take as long as to parse.
        parts = sum(data.count(sign) for sign in (b"[", b"{", b":"))
        if parts > MAX_PARTS:
            raise Refused(
                413, f"the body has {parts} of the signs [, {{ and :, as JSON has; at most {MAX_PARTS} are taken"
            )
        try:
            found = self.body.model_validate_json(data)
        except ValidationError as error:
            raise refused_body(self.path, error) from None
        return found, memory_of(found)
