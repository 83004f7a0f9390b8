"""Operations that wait for the worker: each client's in their order, the clients of a tenant in turns, tenants by tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from concurrent.futures import Future
from typing import Any, NamedTuple

from tinker_local_backend.engine.sampling.shares import Turns
from tinker_local_backend.engine.spans import span
from tinker_local_backend.engine.training.parts import Parts

LEAST_TOKENS = 64
"""What a part counts that says nothing of its tokens: a step of an optimizer, a save."""

SAMPLER_STEPS_PER_PART = 8
"""Tokens that running sequences go forward between two parts of their own tenant's operations while more of those wait."""

_ENDED = object()


class Operation(NamedTuple):
    """Running through all its parts settles the future, by way of the engine's outbox."""

    future: Future[Any]
    parts: Parts[None]
    kind: str
    tokens: int
    """that it has and that have not been counted, where that is known"""


class OperationLines:
    """The worker's alone."""

    def __init__(self) -> None:
        self._tenants: dict[str, dict[Hashable, deque[Operation]]] = {}
        """by client, the one whose turn it is first"""
        self._turns: Turns[str] = Turns()
        self._worker: Turns[str] = Turns()
        """what each tenant has had of the worker, samples too"""
        self._present: set[str] = set()
        """who wanted something of it when that was last asked"""

    def __bool__(self) -> bool:
        return bool(self._tenants)

    def __iter__(self) -> Iterator[Operation]:
        for clients in self._tenants.values():
            for line in clients.values():
                yield from line

    def add(self, tenant: str, client: Hashable, operation: Operation) -> None:
        """To the end of the client's line."""
        if tenant not in self._tenants:
            self._turns.arrive(tenant)
        self._tenants.setdefault(tenant, {}).setdefault(client, deque()).append(operation)

    def run_part(self) -> None:
        """One part of an operation of the client whose turn it is, who then goes behind the others of his tenant."""
        tenant = self._turns.first(self._tenants)
        clients = self._tenants[tenant]
        client, line = next(iter(clients.items()))
        operation = line[0]
        with span(f"trainer/{operation.kind}"):
            had = next(operation.parts, _ENDED)
        if had is _ENDED:
            line.popleft()
            tokens = max(operation.tokens, LEAST_TOKENS)
        else:
            tokens = had if isinstance(had, int) else LEAST_TOKENS
            line[0] = operation._replace(tokens=operation.tokens - tokens)
        self._turns.charge(tenant, tokens)
        del clients[client]
        if line:
            clients[client] = line
        if not clients:
            del self._tenants[tenant]
        self.charge({tenant: tokens})

    def charge(self, tokens: Mapping[str, int]) -> None:
        """So many were computed for each tenant."""
        for tenant, count in tokens.items():
            self._worker.charge(tenant, count)

    def samplers_go_on(self, steps: int, sampling: Callable[[], Collection[str]]) -> bool:
        """Whether samplers, which have something to do for these tenants, make another step, after so many since the last part.

        Between tenants whoever has had least goes on; one tenant's own samples and operations take turns. All of it is counted in
        tokens and not in seconds: what is in a batch must not depend on the clock.
        """
        if not self._tenants:
            self._present = set()  # whoever comes with an operation later is owed nothing of this time
            return steps == 0
        tenant = self._turns.first(self._tenants)
        others = set(sampling()) - {tenant}
        present = others | self._tenants.keys()
        for name in present - self._present:
            self._worker.arrive(name)
        self._present = present
        return self._worker.first([tenant, *sorted(others)]) != tenant if others else steps < SAMPLER_STEPS_PER_PART

    def clear(self) -> None:
        """Nothing waits."""
        self._tenants.clear()
