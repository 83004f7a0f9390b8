"""What the HTTP process remembers: sessions, their models and samplers, requests and their results, and the order of requests.

Everything here belongs to one event loop, so nothing needs a lock.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from tinker_local_backend.server.access import Tenant
from tinker_local_backend.storage import registry
from tinker_local_backend.wire.frames import Frame

REMEMBERED_REQUESTS = 4096
"""How many of a model's or sampler's latest requests are known again when they are sent twice."""


class Refused(Exception):
    """An answer other than 200: an HTTP status that the SDK takes for final (or 429 and 503, which it repeats), and why.

    `retry_after`: seconds after which it should be repeated.
    """

    def __init__(self, status: int, detail: str, retry_after: int = 1):
        super().__init__(detail)
        self.retry_after = retry_after
        self.status = status
        self.detail = detail


@dataclass(eq=False)
class Request:
    """Something that was asked for, until some time after its result was fetched."""

    tenant: Tenant
    session: Session
    kind: str
    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: float = field(default_factory=time.monotonic)
    number: int | None = None
    """of the engine's operation, once it is there"""
    reply: Frame | None = None
    fetched: float | None = None
    done: asyncio.Event = field(default_factory=asyncio.Event)
    taken: asyncio.Event = field(default_factory=asyncio.Event)
    """set when its result was fetched, or will not be any more"""
    sequence_ids: list[str] = field(default_factory=list)
    """names of the samples that were asked for"""
    release: Callable[[], None] = lambda: None
    """gives back the memory that it holds while it waits"""

    def settle(self, reply: Frame) -> None:
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
        self.settle(Frame({"error": error, "category": category}))


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


@dataclass(frozen=True, eq=False)
class Turn:
    """A request with what the engine needs for it."""

    request: Request
    fields: dict[str, Any]
    body: bytes


class Sequence:
    """The requests of one model, given out in the order of their seq_id: 1, 2, 3, ... (0 made the model).

    The SDK sends the parts of a large call at the same time and the first of them last.
    """

    def __init__(self) -> None:
        self.known = Known()
        self._next = 1
        self._held: dict[int, Turn] = {}
        self.is_open = False
        """whether the model has been made"""

    def __len__(self) -> int:
        return len(self._held)

    def check(self, seq_id: int) -> None:
        """Raise Refused for a number whose turn is over."""
        if seq_id < self._next:
            raise Refused(400, f"seq_id {seq_id} comes too late: the next request of this model is number {self._next}")

    def add(self, seq_id: int, turn: Turn) -> None:
        self._held[seq_id] = turn

    def ready(self) -> Iterator[Turn]:
        """Those whose turn it is."""
        while self.is_open and self._next in self._held:
            self._next += 1
            yield self._held.pop(self._next - 1)

    def give_up(self, before: float) -> list[tuple[int, Turn]]:
        """Take out everything that is held, if some of it came before this time: the number missing is not coming."""
        if not self.is_open or all(turn.request.created >= before for turn in self._held.values()):
            return []
        missing, held = self._next, self.clear()
        self._next = max(self._next, *(number + 1 for number, _ in held))
        return [(missing, turn) for _, turn in held]

    def clear(self) -> list[tuple[int, Turn]]:
        held, self._held = sorted(self._held.items()), {}
        return held


@dataclass(frozen=True)
class Draw:
    """What a sampling request asks for, on its way to the engine."""

    request: bytes
    """the JSON object that wire.codec.sample_arguments takes"""
    samples: int
    prompt_tokens: int
    max_tokens: int | None
    """of a sample; None: what the context has room for"""
    topk: int = 0
    """likeliest tokens that are told with each of a sample's"""
    prompt_topk: int = 0
    """values that are told of each token of the prompt"""
    numbers: int = 0
    """that it lists beside its prompt: targets, stops"""
    cells: int = 0
    """of sparse targets, with those that are empty"""

    def drawn(self, context_length: int) -> int:
        """Tokens that its samples may come to."""
        room = max(0, context_length - self.prompt_tokens)
        return self.samples * (room if self.max_tokens is None else min(self.max_tokens, room))

    def tokens(self, context_length: int) -> int:
        """That it may take in all."""
        return self.prompt_tokens + self.drawn(context_length)


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

    session_id: str
    tenant: Tenant
    record: registry.Session
    seen: float = field(default_factory=time.monotonic)
    models: dict[str, Model] = field(default_factory=dict)
    samplers: dict[str, Sampler] = field(default_factory=dict)
    requests: dict[str, Request] = field(default_factory=dict)


def gone(what: str, identifier: str) -> str:
    return (
        f"there is no {what} {identifier!r}: it has ended, or the server was restarted since; make a new ServiceClient and "
        "go on from a saved checkpoint"
    )
