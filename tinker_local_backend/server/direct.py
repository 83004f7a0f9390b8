"""Routes that every training step and every sample ask for several times, and those whose bodies may be large.

They go without a framework between request and service: FastAPI matches routes and resolves dependencies anew for each request,
which takes longer than all the rest of these, and it parses whatever comes on the event loop.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import zstandard
from pydantic import BaseModel, ValidationError
from starlette.responses import Response
from starlette.types import Receive

from tinker_local_backend.errors import RequestError
from tinker_local_backend.server.access import Tenant
from tinker_local_backend.server.config import MIB
from tinker_local_backend.server.errors import refused_body
from tinker_local_backend.server.held import Holding, memory_of
from tinker_local_backend.server.service import Service
from tinker_local_backend.server.sessions import Refused
from tinker_local_backend.wire.compression import TooLongError, decompress

T = TypeVar("T")

AT_ONCE = 1 << 15
"""Bodies up to this size are decompressed and parsed on the event loop: a thread would take longer to begin."""


MOST_PARTS = 1 << 17
"""Arrays, objects and keys of a JSON body. They are made in one go with the interpreter held, which took 0.1 s for so many
objects and 0.3 s for lists (two million lists: 3.9 s)."""


@dataclass(frozen=True)
class Posted:
    """A request with its body, as it came."""

    service: Service
    tenant: Tenant
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
            plain = _decompress(self.data, most, limit) if self.is_compressed else self.data
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


def _decompress(data: bytes, most: int, limit: str) -> bytes:
    try:
        return decompress(data, most)
    except TooLongError as error:
        raise Refused(413, f"{error} ({limit})") from None
    except RequestError as error:
        raise Refused(400, str(error)) from None


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
        most = posted.service.config.max_json_mib * MIB
        body, kept = await posted.read(most, "max_json_mib", self._parsed)
        posted.holding.grow(kept)
        return await self.call(posted, body)

    def _parsed(self, data: bytes) -> tuple[BaseModel, int]:
        """The body, and how many bytes it takes."""
        assert self.body is not None
        # Signs within strings count too: to tell them apart would take as long as to parse.
        parts = sum(data.count(sign) for sign in (b"[", b"{", b":"))
        if parts > MOST_PARTS:
            raise Refused(
                413, f"the body has {parts} of the signs [, {{ and :, as JSON has; at most {MOST_PARTS} are taken"
            )
        try:
            found = self.body.model_validate_json(data)
        except ValidationError as error:
            raise refused_body(self.path, error) from None
        return found, memory_of(found)
