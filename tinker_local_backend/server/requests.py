"""Requests from submission until their results expire."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from tinker_local_backend.server.access import Tenant
from tinker_local_backend.server.access_log import AccessLog
from tinker_local_backend.server.budget import Reservation
from tinker_local_backend.server.errors import Refused
from tinker_local_backend.server.link import EngineLink
from tinker_local_backend.server.metrics import Metrics
from tinker_local_backend.server.quotas import TokenQuotas
from tinker_local_backend.server.sessions import Request, Session
from tinker_local_backend.wire.frames import Frame

REQUEST_BYTES = 2048
"""Memory of a request without its result."""


class Requests:
    """All requests of a server, and their results. Belongs to one event loop."""

    def __init__(self, link: EngineLink, metrics: Metrics, log: AccessLog):
        self._link = link
        self._metrics = metrics
        self._log = log
        self._requests: dict[str, Request] = {}
        self.quotas = TokenQuotas()
        self.closing = False
        """whether new requests are refused"""

    def check_open(self) -> None:
        """Raise Refused (503) while the server shuts down."""
        if self.closing:
            raise Refused(503, "the server is shutting down and accepts no new requests")

    def new(
        self, session: Session, fields: dict[str, Any], body: bytes = b"", reservation: Reservation | None = None
    ) -> Request:
        """Register a request, which is not sent yet. It owns the reservation until it ends."""
        request = Request(session, Frame(fields, body), [] if reservation is None else [reservation])
        session.requests[request.request_id] = self._requests[request.request_id] = request
        return request

    def send(self, request: Request, on_progress: Callable[[Frame], None] | None = None) -> None:
        """Send a request to the engine, unless it has already failed."""
        if request.done.is_set():
            return
        request.number, reply = self._link.call(request.operation.fields, request.operation.body, on_progress)
        request.operation = Frame({"op": request.kind})

        def resolve(done: asyncio.Future[Frame]) -> None:
            frame = request.on_reply(done.result())
            request.release()
            self.quotas.spend(request.tenant, frame.fields.get("tokens", 0))
            seconds = time.monotonic() - request.created
            self._metrics.ended(request, frame, seconds)
            self._log.ended(request, frame, seconds)
            request.resolve(frame)

        reply.add_done_callback(resolve)

    def drop(self, models: Sequence[str] = (), samplers: Sequence[str] = ()) -> None:
        """Tell the engine to free these models and samplers."""
        if models or samplers:
            self._link.call({"op": "drop", "model_ids": list(models), "sampler_ids": list(samplers)})

    def find(self, tenant: Tenant, request_id: str) -> Request | None:
        """A tenant's request; None if it is unknown, another tenant's, or discarded."""
        request = self._requests.get(request_id)
        return request if request is not None and request.tenant == tenant else None

    def waiting(self) -> list[Request]:
        """Requests without a result."""
        return [request for request in self._requests.values() if request.reply is None]

    def unfetched(self) -> list[Request]:
        """Requests whose result was not fetched yet."""
        return [request for request in self._requests.values() if request.reply is not None and request.fetched is None]

    def cancel(self, request: Request) -> None:
        """Cancel a sampling request. Training requests are never cancelled: later ones depend on them."""
        if request.kind == "sample" and request.reply is None and request.number is not None:
            self._link.cancel(request.number)

    def discard(self, request: Request) -> None:
        """Drop a request and its result."""
        self._requests.pop(request.request_id, None)
        request.session.requests.pop(request.request_id, None)
        request.fetched_event.set()
        request.reply = None  # RecentRequests may still hold the request

    def discard_older_than(self, cutoff: float, is_alive: Callable[[Session], bool]) -> None:
        """Drop results that were fetched before `cutoff`; in dead sessions, results of requests made before it."""
        for request in list(self._requests.values()):
            since = request.fetched if is_alive(request.session) else request.created
            if request.reply is not None and since is not None and since < cutoff:
                self.discard(request)

    def limit_results(self, max_bytes: int) -> None:
        """Drop the oldest results of each tenant whose results, over all sessions, exceed `max_bytes`."""
        left: dict[str, int] = {}
        for request in reversed(list(self._requests.values())):
            if request.reply is not None:
                name = request.tenant.name
                left[name] = left.get(name, max_bytes) - len(request.reply.body) - REQUEST_BYTES
                if left[name] < 0:
                    self.discard(request)


async def all_set(
    events: Sequence[asyncio.Event], or_until: Coroutine[Any, Any, object], seconds: float | None = None
) -> bool:
    """Wait until all events are set, `or_until` has ended, or the time is up. Returns whether all are set."""

    async def wait() -> None:
        for event in events:
            await event.wait()

    # asyncio logs a cancelled gather with a traceback, as an exception that was never retrieved.
    waiting, ending = asyncio.create_task(wait()), asyncio.create_task(or_until)
    try:
        await asyncio.wait([waiting, ending], timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        return waiting.done()
    finally:
        waiting.cancel()
        ending.cancel()
