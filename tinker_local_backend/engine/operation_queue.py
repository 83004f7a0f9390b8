"""The queue of operations for the worker, and how long they wait in it.

A client's operations run in their order. The clients of a tenant take turns, and tenants share the worker by tokens.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from concurrent.futures import Future
from typing import Any, NamedTuple

from tinker_local_backend.engine.sampling.shares import Turns
from tinker_local_backend.engine.spans import span
from tinker_local_backend.engine.training.parts import Parts

LEAST_TOKENS = 64
"""The charge for a part without a number of tokens: an optimizer step, a save."""

SAMPLER_STEPS_PER_PART = 8
"""Sampler steps between two parts of the same tenant's operations."""

_ENDED = object()


class Operation(NamedTuple):
    """Its last part resolves the future, through the engine's outbox."""

    future: Future[Any]
    parts: Parts[None]
    kind: str
    tokens: int
    """that have not been charged yet, where the number is known"""


class OperationQueue:
    """Used by the worker alone."""

    def __init__(self) -> None:
        self._tenants: dict[str, dict[Hashable, deque[Operation]]] = {}
        """by client, in the order of their turns"""
        self._turns: Turns[str] = Turns()
        self._worker: Turns[str] = Turns()
        """the account of each tenant on the worker, sampling included"""
        self._present: set[str] = set()
        """tenants that wanted the worker when `samplers_go_on` was last called"""

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
        """Run one part of the next client's operation, and move that client behind the others of its tenant."""
        tenant = self._turns.first(self._tenants)
        clients = self._tenants[tenant]
        client, queue = next(iter(clients.items()))
        operation = queue[0]
        with span(f"trainer/{operation.kind}"):
            had = next(operation.parts, _ENDED)
        if had is _ENDED:
            queue.popleft()
            tokens = max(operation.tokens, LEAST_TOKENS)
        else:
            tokens = had if isinstance(had, int) else LEAST_TOKENS
            queue[0] = operation._replace(tokens=operation.tokens - tokens)
        self._turns.charge(tenant, tokens)
        del clients[client]
        if queue:
            clients[client] = queue
        if not clients:
            del self._tenants[tenant]
        self.charge({tenant: tokens})

    def charge(self, tokens: Mapping[str, int]) -> None:
        """Charge each tenant for so many tokens."""
        for tenant, count in tokens.items():
            self._worker.charge(tenant, count)

    def samplers_go_on(self, steps: int, sampling: Callable[[], Collection[str]]) -> bool:
        """Whether the samplers, which have work for these tenants, take another step after so many since the last part.

        The tenant that has had least goes first; one tenant's own samples and operations take turns. Shares are counted in
        tokens and not in seconds: the contents of a batch must not depend on the clock.
        """
        if not self._tenants:
            self._present = set()  # a tenant that comes later is owed nothing for this time
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
    """What requests of one kind waited."""

    begun: int
    """how many have been begun"""
    waiting: int
    """how many have not"""
    longest_seconds: float
    """the longest wait so far, also of those that still wait"""


class Waits:
    """Waits by kind of request. Clients enter and anyone reads, on any thread; the worker begins."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._waiting: dict[int, tuple[str, float]] = {}
        self._begun: dict[str, tuple[int, float]] = {}

    def enter(self, kind: str, since: float | None = None) -> int:
        """A request has come, now or at this time of the monotonic clock. Returns its number."""
        number = next(self._numbers)
        self._waiting[number] = kind, time.monotonic() if since is None else since
        return number

    def begin(self, number: int) -> None:
        """The request is being worked on. A second call for the same one changes nothing."""
        if (entered := self._waiting.pop(number, None)) is not None:
            kind, since = entered
            count, longest = self._begun.get(kind, (0, 0.0))
            self._begun[kind] = count + 1, max(longest, time.monotonic() - since)

    def leave(self, number: int) -> None:
        """The request was cancelled, or failed before its turn came."""
        self._waiting.pop(number, None)

    def now(self) -> dict[str, Wait]:
        """Of each kind there has been."""
        waits = {kind: Wait(count, 0, longest) for kind, (count, longest) in self._begun.copy().items()}
        for kind, since in self._waiting.copy().values():
            wait = waits.get(kind, Wait(0, 0, 0.0))
            longest = max(wait.longest_seconds, time.monotonic() - since)
            waits[kind] = Wait(wait.begun, wait.waiting + 1, longest)
        return waits
