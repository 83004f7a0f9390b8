"""The queue of operations for the worker, and their waiting times.

A client's operations run in order. The clients of a tenant take turns, and tenants share the worker by tokens. A profiler can
trace spans of the worker's time (`listen`).
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

from tinker_local_backend.engine.sampling.shares import Turns
from tinker_local_backend.engine.training.trainer import Parts

MIN_TOKENS = 64
"""Tokens charged for a part without tokens, such as an optimizer step or a save."""

SAMPLER_STEPS_PER_PART = 8
"""Sampler steps between two parts of the same tenant's operations."""

_ENDED = object()


class Operation(NamedTuple):
    """An operation in the queue. Its last part resolves the future, through the engine's outbox."""

    future: Future[Any]
    parts: Parts[None]
    kind: str
    tokens: int
    """not yet charged, if known"""


class OperationQueue:
    """The operations of all clients. Used only by the worker."""

    def __init__(self) -> None:
        self._tenants: dict[str, dict[Hashable, deque[Operation]]] = {}
        """tenant -> client -> its operations; clients in the order of their turns"""
        self._turns: Turns[str] = Turns()
        self._worker: Turns[str] = Turns()
        """shares of the worker, including sampling"""
        self._present: set[str] = set()
        """tenants with work at the last call of `sampler_is_next`"""

    def __bool__(self) -> bool:
        return bool(self._tenants)

    def __iter__(self) -> Iterator[Operation]:
        for clients in self._tenants.values():
            for queue in clients.values():
                yield from queue

    def add(self, tenant: str, client: Hashable, operation: Operation) -> None:
        """Append to the client's queue."""
        if tenant not in self._tenants:
            self._turns.arrive(tenant)
        self._tenants.setdefault(tenant, {}).setdefault(client, deque()).append(operation)

    def run_part(self) -> None:
        """Run one part of the next client's operation, then move the client to the end of its tenant's queue."""
        tenant = self._turns.first(self._tenants)
        clients = self._tenants[tenant]
        client, queue = next(iter(clients.items()))
        operation = queue[0]
        with span(f"trainer/{operation.kind}"):
            spent = next(operation.parts, _ENDED)
        if spent is _ENDED:
            queue.popleft()
            tokens = max(operation.tokens, MIN_TOKENS)
        else:
            tokens = spent if isinstance(spent, int) else MIN_TOKENS
            queue[0] = operation._replace(tokens=operation.tokens - tokens)
        self._turns.charge(tenant, tokens)
        del clients[client]
        if queue:
            clients[client] = queue
        if not clients:
            del self._tenants[tenant]
        self.charge({tenant: tokens})

    def charge(self, tokens: Mapping[str, int]) -> None:
        """Charge each tenant for its tokens."""
        for tenant, count in tokens.items():
            self._worker.charge(tenant, count)

    def sampler_is_next(self, steps: int, sampling: Callable[[], Collection[str]]) -> bool:
        """Whether the samplers run another step before the next part.

        The tenant with the fewest tokens so far goes first; samples and operations of one tenant take turns. Shares are in
        tokens, not seconds, because the contents of a batch must not depend on the clock.

        Args:
            steps: sampler steps since the last part.
            sampling: returns the tenants with work in the samplers.
        """
        if not self._tenants:
            self._present = set()  # a tenant that arrives later earns no credit for this time
            return steps == 0
        tenant = self._turns.first(self._tenants)
        others = set(sampling()) - {tenant}
        present = others | self._tenants.keys()
        for name in present - self._present:
            self._worker.arrive(name)
        self._present = present
        return self._worker.first([tenant, *sorted(others)]) != tenant if others else steps < SAMPLER_STEPS_PER_PART

    def clear(self) -> None:
        """Drop all operations."""
        self._tenants.clear()


class Wait(NamedTuple):
    """Waiting times of the requests of one kind."""

    begun: int
    """requests that have started"""
    waiting: int
    """requests that have not"""
    longest_seconds: float
    """the longest wait so far, including waiting requests"""


class Waits:
    """Waiting times by kind of request. `enter` and `now` may run on any thread, `begin` on the worker."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._waiting: dict[int, tuple[str, float]] = {}
        self._begun: dict[str, tuple[int, float]] = {}

    def enter(self, kind: str, since: float | None = None) -> int:
        """Record that a request arrived, now or at `since` (monotonic clock). Returns its number."""
        number = next(self._numbers)
        self._waiting[number] = kind, time.monotonic() if since is None else since
        return number

    def begin(self, number: int) -> None:
        """Record that a request starts. A second call for it does nothing."""
        if (entered := self._waiting.pop(number, None)) is not None:
            kind, since = entered
            count, longest = self._begun.get(kind, (0, 0.0))
            self._begun[kind] = count + 1, max(longest, time.monotonic() - since)

    def leave(self, number: int) -> None:
        """Record that a request was cancelled or failed before its turn."""
        self._waiting.pop(number, None)

    def now(self) -> dict[str, Wait]:
        """The waits so far, by kind of request."""
        waits = {kind: Wait(count, 0, longest) for kind, (count, longest) in self._begun.copy().items()}
        for kind, since in self._waiting.copy().values():
            wait = waits.get(kind, Wait(0, 0, 0.0))
            longest = max(wait.longest_seconds, time.monotonic() - since)
            waits[kind] = Wait(wait.begun, wait.waiting + 1, longest)
        return waits


Opener = Callable[[str], AbstractContextManager[Any]]

_opener: Opener | None = None


def listen(opener: Opener | None) -> None:
    """Enter `opener(name)` around every span of this process's engines, on their threads. None stops it.

    Names are `scheduler/take_in`, `scheduler/deliver`, `sampler/step` and `trainer/<kind>`, once per part of an operation.
    """
    global _opener
    _opener = opener


def span(name: str) -> AbstractContextManager[Any]:
    """A context manager around a span of this name."""
    return nullcontext() if _opener is None else _opener(name)
