"""Requests from when the engine is given them until nobody asks for their results any more."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from tinker_local_backend.server.access import Tenant
from tinker_local_backend.server.access_log import AccessLog
from tinker_local_backend.server.errors import Refused
from tinker_local_backend.server.held import Holding
from tinker_local_backend.server.link import EngineLink
from tinker_local_backend.server.metrics import Metrics
from tinker_local_backend.server.quotas import TokenQuotas
from tinker_local_backend.server.sessions import Request, Session
from tinker_local_backend.wire.frames import Frame

REQUEST_BYTES = 2048
"""What a request takes beside its result."""


class Requests:
    """All requests of a server, and their results. Belongs to one event loop."""

    def __init__(self, link: EngineLink, metrics: Metrics, log: AccessLog):
        self._link = link
        self._metrics = metrics
        self._log = log
        self._requests: dict[str, Request] = {}
        self.quotas = TokenQuotas()
        self.closing = False
        """nothing new is taken"""

    def check_open(self) -> None:
        """Raise Refused (503) when the server is on its way down."""
        if self.closing:
            raise Refused(503, "the server is shutting down and takes no new requests")

    def new(
        self, session: Session, fields: dict[str, Any], body: bytes = b"", holding: Holding | None = None
    ) -> Request:
        """A request of a session, which nobody carries out yet. It holds so much memory until it has ended."""
        request = Request(session, Frame(fields, body), [] if holding is None else [holding])
        session.requests[request.request_id] = self._requests[request.request_id] = request
        return request

    def send(self, request: Request, on_progress: Callable[[Frame], None] | None = None) -> None:
        """Give a request to the engine, unless it has failed while it waited."""
        if request.done.is_set():
            return
        request.number, reply = self._link.call(request.operation.fields, request.operation.body, on_progress)
        request.operation = Frame({"op": request.kind})

        def resolve(done: asyncio.Future[Frame]) -> None:
            frame = request.ended(done.result())
            request.release()
            self.quotas.spend(request.tenant, frame.fields.get("tokens", 0))
            seconds = time.monotonic() - request.created
            self._metrics.ended(request, frame, seconds)
            self._log.ended(request, frame, seconds)
            request.resolve(frame)

        reply.add_done_callback(resolve)

    def drop(self, models: Sequence[str] = (), samplers: Sequence[str] = ()) -> None:
        """Let the engine forget these."""
        if models or samplers:
            self._link.call({"op": "drop", "model_ids": list(models), "sampler_ids": list(samplers)})

    def find(self, tenant: Tenant, request_id: str) -> Request | None:
        """A request whose result may be asked for; None for one that never was, is another tenant's, or is forgotten."""
        request = self._requests.get(request_id)
        return request if request is not None and request.tenant == tenant else None

    def waiting(self) -> list[Request]:
        """Those without a result."""
        return [request for request in self._requests.values() if request.reply is None]

    def unfetched(self) -> list[Request]:
        """Those with a result that nobody has asked for yet."""
        return [request for request in self._requests.values() if request.reply is not None and request.fetched is None]

    def cancel(self, request: Request) -> None:
        """Stop a sampling request. Others are never cancelled: those after them count on them."""
        if request.kind == "sample" and request.reply is None and request.number is not None:
            self._link.cancel(request.number)

    def forget(self, request: Request) -> None:
        """Drop a request whose result nobody will ask for again."""
        self._requests.pop(request.request_id, None)
        request.session.requests.pop(request.request_id, None)
        request.taken.set()
        request.reply = None  # what is sent twice is still known, but not by its result

    def forget_older(self, before: float, is_alive: Callable[[Session], bool]) -> None:
        """Drop results that were fetched before this time, and of sessions that have ended those that were asked for before."""
        for request in list(self._requests.values()):
            since = request.fetched if is_alive(request.session) else request.created
            if request.reply is not None and since is not None and since < before:
                self.forget(request)

    def bound(self, room: int) -> None:
        """Forget the oldest results of tenants that leave more bytes of them than that, in all of their sessions together."""
        left: dict[str, int] = {}
        for request in reversed(list(self._requests.values())):
            if request.reply is not None:
                name = request.tenant.name
                left[name] = left.get(name, room) - len(request.reply.body) - REQUEST_BYTES
                if left[name] < 0:
                    self.forget(request)


async def all_set(
    events: Sequence[asyncio.Event], unless: Coroutine[Any, Any, object], seconds: float | None = None
) -> bool:
    """Wait until all events are set, `unless` has ended, or the time is up. Returns whether all are set."""

    async def wait() -> None:
        for event in events:
            await event.wait()

    # A gather that is cancelled would be logged, with a traceback, as an error that nobody looked at.
    waiting, ending = asyncio.create_task(wait()), asyncio.create_task(unless)
    try:
        await asyncio.wait([waiting, ending], timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        return waiting.done()
    finally:
        waiting.cancel()
        ending.cancel()
