"""What the HTTP process remembers: sessions, their models and samplers, requests and their results, and the order of requests.

Everything here belongs to one event loop, so nothing needs a lock.
"""

from __future__ import annotations

import asyncio
import math
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from tinker_local_backend.server.access import Tenant
from tinker_local_backend.server.errors import Refused
from tinker_local_backend.server.held import Holding
from tinker_local_backend.storage import registry
from tinker_local_backend.wire.frames import Frame

REMEMBERED_REQUESTS = 4096
"""How many of a model's or sampler's latest requests are known again when they are sent twice."""


@dataclass(eq=False)
class Request:
    """Something that was asked for, until some time after its result was fetched."""

    session: Session
    operation: Frame
    """what the engine is asked; without its body once it was, or will not be any more"""
    holdings: list[Holding] = field(default_factory=list)
    """the memory that it holds while it waits, and its room on the disk"""
    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: float = field(default_factory=time.monotonic)
    number: int | None = None
    """of the engine's operation, once it is there"""
    ended: Callable[[Frame], Frame] = lambda reply: reply
    """sees the engine's reply first, and says what becomes the result"""
    reply: Frame | None = None
    fetched: float | None = None
    done: asyncio.Event = field(default_factory=asyncio.Event)
    taken: asyncio.Event = field(default_factory=asyncio.Event)
    """set when its result was fetched, or will not be any more"""
    sequence_ids: list[str] = field(default_factory=list)
    """names of the samples that were asked for"""

    @property
    def tenant(self) -> Tenant:
        return self.session.tenant

    @property
    def kind(self) -> str:
        return self.operation.fields["op"]

    def keep(self, holding: Holding) -> None:
        """Hold this too, until it has ended."""
        if not self.done.is_set():
            self.holdings.append(holding.moved())

    def release(self) -> None:
        """Hold nothing any more."""
        self.operation = Frame({"op": self.kind})
        for holding in self.holdings:
            holding.release()

    def resolve(self, reply: Frame) -> None:
        """Only the first reply counts. What the engine was given stays there until the engine has answered."""
        if self.number is None:
            self.release()
        if self.reply is None:
            self.reply = reply
            self.done.set()

    def fetch(self) -> None:
        """Its result is given to the client, not always for the first time."""
        self.fetched = self.fetched or time.monotonic()
        self.taken.set()

    def fail(self, error: str, category: str = "user") -> None:
        self.resolve(Frame({"error": error, "category": category}))


class Known:
    """The latest requests under their sequence numbers, so that one that is sent again is recognised."""

    def __init__(self) -> None:
        self._entries: OrderedDict[int, tuple[Request, bytes]] = OrderedDict()

    def find(self, seq_id: int, digest: bytes) -> Request | None:
        """The request of this number. Raises Refused when it was about something else."""
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
    """The requests of one model, given out in the order of their seq_id: 1, 2, 3, ... (0 made the model).

    The SDK sends the parts of a large call at the same time and the first of them last.
    """

    def __init__(self) -> None:
        self.known = Known()
        self._next = 1
        self._held: dict[int, Request] = {}
        self.is_open = False
        """whether the model has been made"""

    def check(self, seq_id: int) -> None:
        """Raise Refused for a number whose turn is over."""
        if seq_id < self._next:
            raise Refused(400, f"seq_id {seq_id} comes too late: the next request of this model is number {self._next}")

    def add(self, seq_id: int, request: Request) -> None:
        self._held[seq_id] = request

    def ready(self) -> Iterator[Request]:
        """Those whose turn it is."""
        while self.is_open and self._next in self._held:
            self._next += 1
            yield self._held.pop(self._next - 1)

    def give_up(self, before: float) -> tuple[int, list[Request]]:
        """Take out everything that is held, if some of it came before this time: the number missing is not coming."""
        missing = self._next
        if not self.is_open or all(request.created >= before for request in self._held.values()):
            return missing, []
        self._next = max(missing, *(number + 1 for number in self._held))
        return missing, self.clear()

    def clear(self) -> list[Request]:
        held, self._held = sorted(self._held.items()), {}
        return [request for _, request in held]


@dataclass(eq=False)
class Model:
    """An adapter that a session trains."""

    model_id: str
    session: Session
    creation: Request
    digest: bytes
    """of the request that made it"""
    bytes: int = 0
    """of its adapter, with what training needs beside it"""
    sequence: Sequence = field(default_factory=Sequence)
    queued: int = 0
    """requests that are held or with the engine"""
    info: dict[str, Any] | None = None
    """base_model, rank, arch and execution, once it is made"""


@dataclass(eq=False)
class Sampler:
    """A sampling session: a frozen snapshot, a checkpoint or a base model."""

    sampler_id: str
    session: Session
    base_model: str
    model_path: str | None = None
    is_snapshot: bool = False
    bytes: int = 0
    """of its adapter"""
    evicted: bool = False
    used: float = field(default_factory=time.monotonic)
    """when it was last asked for"""
    known: Known = field(default_factory=Known)
    clients: int = 1
    """how many clients share it; each has its own range of sequence numbers"""


@dataclass(eq=False)
class Session:
    """One ServiceClient of the SDK. It lives as long as its heartbeat."""

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
    """The live ones, by their ids."""

    def __init__(self) -> None:
        super().__init__()
        self._standing: dict[str, Session] = {}
        """tenant -> the session of requests that come without one; it never ends"""

    def is_live(self, session: Session) -> bool:
        return session.session_id in self

    def find(self, tenant: Tenant, session_id: str) -> Session | None:
        """A live session of a tenant's, which is not heard from by this."""
        session = self.get(session_id)
        return session if session is not None and session.tenant == tenant else None

    def hear(self, tenant: Tenant, session_id: str) -> Session:
        """A live session, which asks. Raises Refused (404) for one that has ended, never was, or is another tenant's."""
        session = self.find(tenant, session_id)
        if session is None:
            raise Refused(404, gone("session", session_id))
        session.seen = time.monotonic()
        return session

    def standing(self, tenant: Tenant) -> Session:
        """The one of requests that come without one."""
        session = self._standing.get(tenant.name)
        if session is None or not self.is_live(session):
            session = self._standing[tenant.name] = Session(tenant, registry.Session(uuid.uuid4().hex), math.inf)
            self[session.session_id] = session
        return session

    def of(self, tenant: Tenant) -> list[Session]:
        """Those of a tenant's clients."""
        standing = self._standing.get(tenant.name)
        return [session for session in self.values() if session.tenant == tenant and session is not standing]

    def samplers_of(self, tenant: Tenant) -> list[Sampler]:
        """All of a tenant's that there are in memory, also those of requests that come without a session."""
        sessions = [session for session in self.values() if session.tenant == tenant]
        return [s for session in sessions for s in session.samplers.values() if not s.evicted]


def gone(what: str, identifier: str) -> str:
    return (
        f"there is no {what} {identifier!r}: it has ended, or the server was restarted since; make a new ServiceClient and "
        "go on from a saved checkpoint"
    )
