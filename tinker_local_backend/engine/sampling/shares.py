"""Fair shares: the tenant with the fewest tokens so far is next.

Start-time fair queueing (Goyal, Vin and Cheng, 1996): each tenant has a tag that grows by the tokens it gets, and the smallest
tag is next. A tenant that was idle starts at the current tag: idle time earns no credit.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from tinker_local_backend.engine.sampling.sampler import Ticket

K = TypeVar("K", bound=Hashable)


class Turns(Generic[K]):
    """The tags of the tenants, or of a tenant's kinds of requests."""

    def __init__(self) -> None:
        self._tags: dict[K, int] = {}
        self._now = 0
        """the tag of the last turn"""

    def __len__(self) -> int:
        """Number of tenants (or kinds) seen so far."""
        return len(self._tags)

    def arrive(self, who: K) -> None:
        """Register a tenant (or kind) that was idle until now."""
        self._tags[who] = max(self._tags.get(who, 0), self._now)

    def first(self, waiting: Iterable[K]) -> K:
        """The one with the smallest tag, the first of equal ones."""
        return min(waiting, key=lambda who: self._tags.get(who, 0))

    def charge(self, who: K, tokens: int) -> None:
        tag = self._tags.get(who, 0)
        self._now = max(self._now, tag)
        self._tags[who] = tag + tokens


@dataclass(eq=False)
class _Queues:
    """The queues of one tenant: prompts to score, and samples."""

    by_kind: dict[bool, deque[Ticket]] = field(default_factory=lambda: {False: deque(), True: deque()})
    turns: Turns[bool] = field(default_factory=Turns)

    def __len__(self) -> int:
        return sum(map(len, self.by_kind.values()))


def tenant_of(ticket: Ticket) -> str:
    return ticket.request.origin.tenant


def scores(ticket: Ticket) -> bool:
    """Whether a request is for the scores of its prompt rather than for samples."""
    return ticket.request.scoring.requested and ticket.request.max_tokens <= 1


class Waiting:
    """The queues of waiting requests: for each tenant and kind, in order of arrival."""

    def __init__(self) -> None:
        self._tenants: dict[str, _Queues] = {}
        self._turns: Turns[str] = Turns()
        self._count = 0
        self.spent: Counter[str] = Counter()
        """tokens charged to each tenant since it was last cleared"""

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Ticket]:
        for queues in self._tenants.values():
            for queue in queues.by_kind.values():
                yield from queue

    @property
    def tenants(self) -> Collection[str]:
        return self._tenants.keys()

    @property
    def shared(self) -> bool:
        """Whether there has been more than one tenant."""
        return len(self._turns) > 1

    def append(self, ticket: Ticket) -> None:
        self._queue_of(ticket).append(ticket)

    def appendleft(self, ticket: Ticket) -> None:
        self._queue_of(ticket).appendleft(ticket)

    def _queue_of(self, ticket: Ticket) -> deque[Ticket]:
        tenant, kind = tenant_of(ticket), scores(ticket)
        if tenant not in self._tenants:
            self._turns.arrive(tenant)
        queues = self._tenants.setdefault(tenant, _Queues())
        if not queues.by_kind[kind]:
            queues.turns.arrive(kind)
        self._count += 1
        return queues.by_kind[kind]

    def first(self, scoring: bool = True, blocking: Sequence[Ticket] = ()) -> Ticket | None:
        """The next request, if any.

        Args:
            scoring: whether to consider scoring-only prompts.
            blocking: admitted requests that block the queues of their tenant and kind.
        """
        blocked = {(tenant_of(ticket), scores(ticket)) for ticket in blocking}
        firsts = [
            queue[0]
            for tenant, queues in self._tenants.items()
            for kind, queue in queues.by_kind.items()
            if queue and (scoring or not kind) and (tenant, kind) not in blocked
        ]
        return self.turn_of(firsts) if firsts else None

    def turn(self, tenants: Iterable[str]) -> str:
        """The next of these tenants."""
        return self._turns.first(tenants)

    def turn_of(self, tickets: Sequence[Ticket]) -> Ticket:
        """The next of these requests: that of the tenant, then of the kind, with the fewest tokens so far."""
        tenant = self._turns.first(map(tenant_of, tickets))
        tickets = [ticket for ticket in tickets if tenant_of(ticket) == tenant]
        if len(tickets) == 1 or tenant not in self._tenants:
            return tickets[0]
        kind = self._tenants[tenant].turns.first(map(scores, tickets))
        return next(ticket for ticket in tickets if scores(ticket) == kind)

    def remove_first(self, ticket: Ticket) -> None:
        """Remove the request that `first` returned."""
        tenant = tenant_of(ticket)
        queues = self._tenants[tenant]
        removed = queues.by_kind[scores(ticket)].popleft()
        assert removed is ticket
        self._count -= 1
        if not queues:
            del self._tenants[tenant]

    def charge(self, ticket: Ticket, tokens: int) -> None:
        """Charge the tenant and kind of a request for `tokens` tokens."""
        tenant = tenant_of(ticket)
        self.charge_drawn(tenant, tokens)
        if (queues := self._tenants.get(tenant)) is not None:
            queues.turns.charge(scores(ticket), tokens)

    def charge_drawn(self, tenant: str, tokens: int) -> None:
        """Charge a tenant for sampled tokens. They do not count between the queues of one tenant."""
        self._turns.charge(tenant, tokens)
        self.spent[tenant] += tokens

    def clear(self) -> None:
        self._tenants.clear()
        self._count = 0
