"""State of the HTTP process: sessions, their models and samplers, requests and their results, and the order of requests.

All of it belongs to one event loop and needs no locks.
"""

from __future__ import annotations

import asyncio
import math
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tinker_local_backend.server.access import Tenant
from tinker_local_backend.server.budget import Reservation
from tinker_local_backend.server.errors import Refused
from tinker_local_backend.storage import registry
from tinker_local_backend.wire.frames import Frame

REMEMBERED_REQUESTS = 4096
"""Number of latest requests, per model and sampler, that are recognised when they are sent again."""


@dataclass(eq=False)
class Request:
    """A request for the engine, kept until some time after its result was fetched."""

    session: Session
    operation: Frame
    """frame for the engine; body dropped once sent or failed"""
    reservations: list[Reservation] = field(default_factory=list)
    """memory and disk space reserved until it ends"""
    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: float = field(default_factory=time.monotonic)
    number: int | None = None
    """number of the engine's operation, once sent"""
    on_reply: Callable[[Frame], Frame] = lambda reply: reply
    """converts the engine's reply into the result"""
    reply: Frame | None = None
    fetched: float | None = None
    done: asyncio.Event = field(default_factory=asyncio.Event)
    fetched_event: asyncio.Event = field(default_factory=asyncio.Event)
    """set when the result was fetched, or can no longer be"""
    sequence_ids: list[str] = field(default_factory=list)
    """names of the requested samples"""

    @property
    def tenant(self) -> Tenant:
        return self.session.tenant

    @property
    def kind(self) -> str:
        return self.operation.fields["op"]

    def attach(self, reservation: Reservation) -> None:
        """Take over a reservation until the request ends."""
        if not self.done.is_set():
            self.reservations.append(reservation.transfer())

    def release(self) -> None:
        """Drop the body and release all reservations."""
        self.operation = Frame({"op": self.kind})
        for reservation in self.reservations:
            reservation.release()

    def resolve(self, reply: Frame) -> None:
        """Set the result; only the first call counts. A request at the engine keeps its reservations until the engine answers."""
        if self.number is None:
            self.release()
        if self.reply is None:
            self.reply = reply
            self.done.set()

    def fetch(self) -> None:
        """Record that the client fetches the result; idempotent."""
        self.fetched = self.fetched or time.monotonic()
        self.fetched_event.set()

    def fail(self, error: str, category: str = "user") -> None:
        self.resolve(Frame({"error": error, "category": category}))


class RecentRequests:
    """The latest requests by sequence number, to recognise one that is sent again."""

    def __init__(self) -> None:
        self._entries: OrderedDict[int, tuple[Request, bytes]] = OrderedDict()

    def find(self, seq_id: int, digest: bytes) -> Request | None:
        """The request with this number. Raises Refused if its digest differs."""
        entry = self._entries.get(seq_id)
        if entry is None:
            return None
        if entry[1] != digest:
            raise Refused(400, f"seq_id {seq_id} was used by another request; the numbers of one client count up")
        return entry[0]

    def add(self, seq_id: int, digest: bytes, request: Request) -> None:
        self._entries[seq_id] = (request, digest)
        if len(self._entries) > REMEMBERED_REQUESTS:
            self._entries.popitem(last=False)


class Sequence:
    """Reorders requests by seq_id: 1, 2, 3, ... (0 created the model).
    The SDK sends the parts of a large call concurrently, and the first part last."""

    def __init__(self) -> None:
        self.recent = RecentRequests()
        self._next = 1
        self._pending: dict[int, Request] = {}
        self.is_open = False
        """whether the model exists"""

    def check(self, seq_id: int) -> None:
        """Raise Refused for a number that was already handled or skipped."""
        if seq_id < self._next:
            raise Refused(400, f"seq_id {seq_id} comes too late: the next request of this model is number {self._next}")

    def add(self, seq_id: int, request: Request) -> None:
        self._pending[seq_id] = request

    def ready(self) -> Iterator[Request]:
        """Remove and yield the requests that are next in order."""
        while self.is_open and self._next in self._pending:
            self._next += 1
            yield self._pending.pop(self._next - 1)

    def give_up(self, before: float) -> tuple[int, list[Request]]:
        """If a pending request is older than `before`, skip the missing number. Returns it, and the removed pending requests."""
        missing = self._next
        if not self.is_open or all(request.created >= before for request in self._pending.values()):
            return missing, []
        self._next = max(missing, *(number + 1 for number in self._pending))
        return missing, self.clear()

    def clear(self) -> list[Request]:
        pending, self._pending = sorted(self._pending.items()), {}
        return [request for _, request in pending]


@dataclass(eq=False)
class Model:
    """An adapter that a session trains."""

    model_id: str
    session: Session
    creation: Request
    digest: bytes
    """digest of the request that created it"""
    bytes: int = 0
    """memory of its adapter, gradients and optimizer state"""
    sequence: Sequence = field(default_factory=Sequence)
    queued: int = 0
    """requests that are pending or at the engine"""
    info: dict[str, Any] | None = None
    """base_model, rank, arch and execution, once it is created"""


@dataclass(eq=False)
class Sampler:
    """A sampling session: a frozen snapshot, a checkpoint or a base model."""

    sampler_id: str
    session: Session
    base_model: str
    model_path: str | None = None
    is_snapshot: bool = False
    bytes: int = 0
    """memory of its adapter"""
    user_metadata: Mapping[str, str] = field(default_factory=dict)
    """metadata of its checkpoint"""
    evicted: bool = False
    used: float = field(default_factory=time.monotonic)
    """time of its latest use"""
    recent: RecentRequests = field(default_factory=RecentRequests)
    clients: int = 1
    """clients that share it, each with its own range of sequence numbers"""


@dataclass(eq=False)
class Session:
    """One ServiceClient of the SDK. It ends when its heartbeats stop."""

    tenant: Tenant
    record: registry.Session
    seen: float = field(default_factory=time.monotonic)
    models: dict[str, Model] = field(default_factory=dict)
    samplers: dict[str, Sampler] = field(default_factory=dict)
    requests: dict[str, Request] = field(default_factory=dict)

    @property
    def session_id(self) -> str:
        return self.record.session_id


class Sessions(dict[str, Session]):
    """The live sessions by id."""

    def __init__(self) -> None:
        super().__init__()
        self._default: dict[str, Session] = {}
        """tenant -> session of requests without one; it never ends"""

    def is_live(self, session: Session) -> bool:
        return session.session_id in self

    def find(self, tenant: Tenant, session_id: str) -> Session | None:
        """A tenant's live session, without recording activity."""
        session = self.get(session_id)
        return session if session is not None and session.tenant == tenant else None

    def touch(self, tenant: Tenant, session_id: str) -> Session:
        """A tenant's live session; records its activity. Raises Refused (404) if there is none."""
        session = self.find(tenant, session_id)
        if session is None:
            raise Refused(404, not_found_message("session", session_id))
        session.seen = time.monotonic()
        return session

    def default_session(self, tenant: Tenant) -> Session:
        """The session of a tenant's requests without one."""
        session = self._default.get(tenant.name)
        if session is None or not self.is_live(session):
            session = self._default[tenant.name] = Session(tenant, registry.Session(uuid.uuid4().hex), math.inf)
            self[session.session_id] = session
        return session

    def of(self, tenant: Tenant) -> list[Session]:
        """The sessions of a tenant's clients, without the default session."""
        default_session = self._default.get(tenant.name)
        return [session for session in self.values() if session.tenant == tenant and session is not default_session]

    def samplers_of(self, tenant: Tenant) -> list[Sampler]:
        """A tenant's samplers in memory, including those of the default session."""
        sessions = [session for session in self.values() if session.tenant == tenant]
        return [s for session in sessions for s in session.samplers.values() if not s.evicted]


def not_found_message(what: str, identifier: str) -> str:
    return (
        f"there is no {what} {identifier!r}: it has ended, or the server was restarted since; make a new ServiceClient and "
        "continue from a saved checkpoint"
    )
