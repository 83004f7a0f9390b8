"""Whose turn it is where several want the same thing: whoever has had the least of it, in tokens.

Start-time fair queueing (Goyal, Vin and Cheng, 1996): each has a tag, which grows by what he gets, and the smallest one is next.
Who comes back after a while begins where the others are: time in which nothing was asked for is not owed.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from tinker_local_backend.engine.sampling.tickets import Ticket

K = TypeVar("K", bound=Hashable)


class Turns(Generic[K]):
    """Tags of those who share."""

    def __init__(self) -> None:
        self._tags: dict[K, int] = {}
        self._now = 0
        """the tag of whose turn it was last"""

    def __len__(self) -> int:
        """How many there have been."""
        return len(self._tags)

    def arrive(self, who: K) -> None:
        """He had nothing to do, and has now."""
        self._tags[who] = max(self._tags.get(who, 0), self._now)

    def first(self, waiting: Iterable[K]) -> K:
        """Whose turn it is; of equal ones the first."""
        return min(waiting, key=lambda who: self._tags.get(who, 0))

    def charge(self, who: K, tokens: int) -> None:
        """He has had so many."""
        tag = self._tags.get(who, 0)
        self._now = max(self._now, tag)
        self._tags[who] = tag + tokens


@dataclass(eq=False)
class _Lines:
    """What one tenant waits for: prompts to be scored, and samples."""

    by_kind: dict[bool, deque[Ticket]] = field(default_factory=lambda: {False: deque(), True: deque()})
    turns: Turns[bool] = field(default_factory=Turns)

    def __len__(self) -> int:
        return sum(map(len, self.by_kind.values()))


def tenant_of(ticket: Ticket) -> str:
    return ticket.request.origin.tenant


def scores(ticket: Ticket) -> bool:
    """Whether a request is there for its prompt, rather than for what comes behind it."""
    return ticket.request.scoring.wanted and ticket.request.max_tokens <= 1


class Waiting:
    """Requests that wait: each tenant's, of each kind in the order of their arrival."""

    def __init__(self) -> None:
        self._tenants: dict[str, _Lines] = {}
        self._turns: Turns[str] = Turns()
        self._count = 0
        self.spent: Counter[str] = Counter()
        """tokens that were charged, by tenant, since somebody cleared it"""

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Ticket]:
        for lines in self._tenants.values():
            for line in lines.by_kind.values():
                yield from line

    @property
    def tenants(self) -> Collection[str]:
        """Those who wait."""
        return self._tenants.keys()

    @property
    def shared(self) -> bool:
        """Whether there has been more than one tenant."""
        return len(self._turns) > 1

    def append(self, ticket: Ticket) -> None:
        """Behind all of its kind."""
        self._line_of(ticket).append(ticket)

    def appendleft(self, ticket: Ticket) -> None:
        """Before all of its kind."""
        self._line_of(ticket).appendleft(ticket)

    def _line_of(self, ticket: Ticket) -> deque[Ticket]:
        tenant, kind = tenant_of(ticket), scores(ticket)
        if tenant not in self._tenants:
            self._turns.arrive(tenant)
        lines = self._tenants.setdefault(tenant, _Lines())
        if not lines.by_kind[kind]:
            lines.turns.arrive(kind)
        self._count += 1
        return lines.by_kind[kind]

    def first(self, scoring: bool = True, behind: Sequence[Ticket] = ()) -> Ticket | None:
        """Whose turn it is; None if nobody waits. `scoring`: it may be one that scores. Nobody behind one of `behind`."""
        left_out = {(tenant_of(ticket), scores(ticket)) for ticket in behind}
        firsts = [
            line[0]
            for tenant, lines in self._tenants.items()
            for kind, line in lines.by_kind.items()
            if line and (scoring or not kind) and (tenant, kind) not in left_out
        ]
        return self.turn_of(firsts) if firsts else None

    def turn(self, tenants: Iterable[str]) -> str:
        """Whose turn it is of these."""
        return self._turns.first(tenants)

    def turn_of(self, tickets: Sequence[Ticket]) -> Ticket:
        """Whose turn it is of these: of his tenant who has had least, and of those whose kind has."""
        tenant = self._turns.first(map(tenant_of, tickets))
        own = [ticket for ticket in tickets if tenant_of(ticket) == tenant]
        if len(own) == 1 or tenant not in self._tenants:
            return own[0]
        kind = self._tenants[tenant].turns.first(map(scores, own))
        return next(ticket for ticket in own if scores(ticket) == kind)

    def remove_first(self, ticket: Ticket) -> None:
        """This one, which `first` has given, waits no more."""
        tenant = tenant_of(ticket)
        lines = self._tenants[tenant]
        taken = lines.by_kind[scores(ticket)].popleft()
        assert taken is ticket
        self._count -= 1
        if not lines:
            del self._tenants[tenant]

    def charge(self, ticket: Ticket, tokens: int) -> None:
        """So many were computed for a request."""
        tenant = tenant_of(ticket)
        self.charge_drawn(tenant, tokens)
        if (lines := self._tenants.get(tenant)) is not None:
            lines.turns.charge(scores(ticket), tokens)

    def charge_drawn(self, tenant: str, tokens: int) -> None:
        """So many were drawn for a tenant. Between his own lines only prompts count."""
        self._turns.charge(tenant, tokens)
        self.spent[tenant] += tokens

    def clear(self) -> None:
        """Nobody waits."""
        self._tenants.clear()
        self._count = 0
