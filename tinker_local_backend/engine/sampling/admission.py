"""The line of waiting requests, and which of them join next: of the tenant who has had least, as many as there are pages for.

What a request needs is counted as it is now, its prompt and one page for each sample, not as it may become. A prompt longer
than a pass joins in pieces; of its own tenant nobody overtakes it, and others have passes in between. One that is only scored may
be longer than the pool: it has pages of its own, for as long as its pieces are computed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from tinker_local_backend.engine.sampling.allowance import Allowance
from tinker_local_backend.engine.sampling.page_store import PageStore
from tinker_local_backend.engine.sampling.pages import PAGE_TOKENS, Found, pages_of
from tinker_local_backend.engine.sampling.prefill import Joining
from tinker_local_backend.engine.sampling.requests import SamplingRequest
from tinker_local_backend.engine.sampling.shares import Waiting, scores, tenant_of
from tinker_local_backend.engine.sampling.tickets import Ticket

BESIDE_SHARE = 4
"""While sequences run, a prefill pass has at most this part of the tokens that it may have otherwise."""

RESERVE_SHARE = 2
"""A page is left for each so many running sequences: who joins should not soon send another one back."""


@dataclass(eq=False)
class _Pass:
    """A prefill pass that is being filled."""

    joining: list[Joining]
    budget: int
    """tokens"""
    reserve: int
    """pages that are left for those that run"""
    rows: int
    """sequences that run, or will after this pass"""
    tokens: int = 0
    promised: int = 0
    """pages that its prompts and samples will take"""
    by_prompt: dict[tuple[object, ...], Joining] = field(default_factory=dict)

    def take(self, part: Joining, pages: int) -> None:
        self.joining.append(part)
        self.by_prompt[_what_is_computed(part.request)] = part
        self.tokens += part.end - part.done
        self.rows += part.samples
        self.promised += pages


class Admission:
    """Requests that wait for pages, and the long prompts that are being computed.

    `own_store` makes an empty store of so many pages for a prompt for which the one of all is too small.
    """

    def __init__(
        self,
        store: PageStore,
        own_store: Callable[[int], PageStore],
        allowance: Allowance,
        random_seed: Callable[[], int],
    ):
        self._store, self._pool, self._own_store = store, store.pool, own_store
        self._allowance, self._random_seed = allowance, random_seed
        self.waiting = Waiting()
        self.long: list[Joining] = []
        """prompts of which some passes are done, at most one of each tenant and kind"""
        self._arrivals = 0

    def add(self, ticket: Ticket) -> None:
        """To the end of the line."""
        self._arrivals += 1
        ticket.order, ticket.arrived, ticket.queued = self._arrivals, time.monotonic(), True
        self.waiting.append(ticket)

    def line_up(self, ticket: Ticket) -> None:
        """Back to the front of its line: it is older than all that wait, unless it waits there with other samples."""
        if not ticket.queued:
            ticket.queued = True
            self.waiting.appendleft(ticket)

    @property
    def long_takes_pages(self) -> bool:
        """There is a long prompt whose pages others could have."""
        return any(part.store is self._store for part in self.long)

    def send_back_long(self) -> None:
        """The newest long prompt whose pages others could have begins again later."""
        self._send_back(next(part for part in reversed(self.long) if part.store is self._store))

    def _send_back(self, part: Joining) -> None:
        self.long.remove(part)
        for ticket, indices in reversed(part.entries):
            ticket.give_back(indices)
            self.line_up(ticket)
        part.give_back()

    def others_first(self, running: Iterable[str]) -> bool:
        """Whether no prompt is computed now, because these tenants, whose sequences run, have had less than all who wait."""
        asking = {*self.waiting.tenants, *(tenant_of(_first(part)) for part in self.long)}
        others = set(running) - asking
        return bool(asking and others) and self.waiting.turn([*sorted(asking), *sorted(others)]) in others

    def next_pass(self, joining: list[Joining], running: int, scoring: bool = True) -> None:
        """Put into `joining` whose prompts, or pieces of them, are computed now beside so many running sequences.

        Whole requests from the front of the line, or as many of one's samples as fit. Without `scoring` none that is only scored.
        """
        if self.waiting or self.long:
            self._fill(joining, running, scoring)
            for part in joining:
                self.waiting.charge(_first(part), part.end - part.done)

    def _fill(self, joining: list[Joining], running: int, scoring: bool) -> None:
        budget = self._allowance.prefill_tokens
        pass_ = _Pass(
            joining, max(1, budget // BESIDE_SHARE) if running else budget, running // RESERVE_SHARE, rows=running
        )
        long = self._next_long(scoring)
        if long is not None and not self._go_on(long, pass_):
            return
        while (ticket := self.waiting.first(scoring, behind=[_first(part) for part in self.long])) is not None:
            if not self._take(ticket, pass_):
                break
        if long is None and not joining:  # whose turn it is waits for pages, which a long prompt may hold
            for part in [part for part in self.long if scoring or not scores(_first(part))]:
                if not joining:
                    self._go_on(part, pass_)

    def _next_long(self, scoring: bool) -> Joining | None:
        """The long prompt whose turn it is; None where it is that of others, who wait."""
        parts = {id(_first(part)): part for part in self.long if scoring or not scores(_first(part))}
        if not parts:
            return None
        other = self.waiting.first(scoring, behind=[_first(part) for part in self.long])
        tickets = [*map(_first, parts.values()), *([other] if other is not None else [])]
        return parts.get(id(self.waiting.turn_of(tickets)))

    def _go_on(self, part: Joining, pass_: _Pass) -> bool:
        """The next piece of the long prompt. Returns whether others may join beside it."""
        part.end = min(len(part.request.prompt), part.done + pass_.budget)
        missing = pages_of(part.end) - part.table.end // PAGE_TOKENS
        if part.complete:
            missing += part.samples - _pages_for_samples_of(part)
        if missing > part.store.pool.available:  # those that run have grown
            self._send_back(part)
            return False
        pass_.take(part, missing)
        if part.complete:
            self.long.remove(part)
        return part.complete and part.store is self._store

    def _take(self, ticket: Ticket, pass_: _Pass) -> bool:
        """Let the first of the line join. False: it must wait, or nobody else joins in this pass."""
        if ticket.dropped:
            self._leave_line(ticket)
            return True
        wanted = min(len(ticket.todo), self._allowance.running - pass_.rows)
        if ticket.todo and wanted < 1:
            return False
        part = pass_.by_prompt.get(_what_is_computed(ticket.request))
        if part is not None and (part.stored or not wanted) and not (ticket.wants_scores and part.done):
            joins = self._join(ticket, pass_, part, wanted)
        else:
            part = self._begin(ticket, pass_, wanted)
            joins = part is not None
        if part is None or not joins:
            return False
        if ticket.seed is None:
            ticket.seed = ticket.request.seed if ticket.request.seed is not None else self._random_seed()
        if not ticket.todo:
            self._leave_line(ticket)
        if not part.complete:
            self.long.append(part)
        return part.complete and not ticket.todo

    def _leave_line(self, ticket: Ticket) -> None:
        self.waiting.remove_first(ticket)
        ticket.queued = False

    def _room(self, pass_: _Pass) -> int:
        """Pages that may still be used in this pass."""
        return self._pool.available - pass_.promised - pass_.reserve

    def _join(self, ticket: Ticket, pass_: _Pass, part: Joining, wanted: int) -> bool:
        """Samples of a prompt that this pass computes already."""
        count = min(wanted, self._room(pass_))
        if wanted and count < 1:
            return False
        part.entries.append((ticket, ticket.take_samples(count)))
        pass_.rows += count
        pass_.promised += count
        return True

    def _begin(self, ticket: Ticket, pass_: _Pass, wanted: int) -> Joining | None:
        """A prompt that this pass does not compute yet; None if it does not fit."""
        request, pool = ticket.request, self._pool
        length = len(request.prompt)
        found = Found() if ticket.wants_scores else pool.find(request.adapter, request.prompt, request.origin.prefixes)
        left = length - found.tokens
        if pass_.joining and left > pass_.budget - pass_.tokens:
            return None
        if not wanted and (left <= pass_.budget or pages_of(length) > pool.most):
            in_one = left <= pass_.budget
            store = self._store if in_one else self._own_store(pages_of(length))
            end = length if in_one else pass_.budget
            part = Joining(request, [(ticket, [])], store, found, end=end, stored=not in_one)
            pass_.take(part, 0)
            return part
        tail = () if found.tail is None else (found.tail,)
        pool.share((*found.pages, *tail))
        prompt_pages = pages_of(length) - len(found.pages)
        in_last_page = length % PAGE_TOKENS > 0  # the first sample goes on there; each other one has a page of its own
        spare = self._room(pass_) - prompt_pages
        # Where pages are scarce, one that only this prompt wants is written to without being copied.
        in_place = bool(tail) and tail[0].readers == 1 and spare < wanted - in_last_page
        count = min(wanted, spare + in_place + in_last_page)
        if spare + in_place < 0 or (wanted and count < 1):
            pool.release((*found.pages, *tail))
            return None
        end = found.tokens + min(left, pass_.budget)
        part = Joining(request, [(ticket, ticket.take_samples(count))], self._store, found, end=end, in_place=in_place)
        pass_.take(part, prompt_pages + max(0, count - in_last_page) - in_place)
        return part


def _first(part: Joining) -> Ticket:
    return part.entries[0][0]


def _what_is_computed(request: SamplingRequest) -> tuple[object, ...]:
    """Equal for requests that may use one computation of their prompt."""
    return id(request.adapter), request.origin.prefixes, request.prompt


def _pages_for_samples_of(part: Joining) -> int:
    """How many of its samples need no page beside those of the prompt."""
    return 1 if part.samples and len(part.request.prompt) % PAGE_TOKENS else 0
