"""Operations that wait for the worker: each client's in their order, the clients of a tenant in turns, tenants by tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator
from concurrent.futures import Future
from typing import Any, NamedTuple

from tinker_local_backend.engine.parts import Parts
from tinker_local_backend.engine.shares import Turns
from tinker_local_backend.engine.spans import span

LEAST_TOKENS = 64
"""What a part counts that says nothing of its tokens: a step of an optimizer, a save."""

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

    def run_part(self) -> int:
        """One part of an operation of the client whose turn it is, who then goes behind the others of his tenant.

        Returns the tokens that it counts.
        """
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
        return tokens

    def clear(self) -> None:
        """Nothing waits."""
        self._tenants.clear()
