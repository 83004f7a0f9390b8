"""Preemption: which running sequences restart later, to free their pages or their rows of the batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from tinker_local_backend.engine.sampling.decode_batch import Running
from tinker_local_backend.engine.sampling.pages import PagePool, pages_for
from tinker_local_backend.engine.sampling.sampler import Ticket
from tinker_local_backend.engine.sampling.shares import tenant_of


def victim_for_pages(running: Sequence[Running], pages: int) -> Running:
    """The sequence to preempt when a pool of `pages` pages is full: the youngest of the tenants that exceed their share."""
    used: Counter[str] = Counter()
    for row in running:
        used[tenant_of(row.ticket)] += len(row.table.pages)
    greedy = {tenant for tenant, count in used.items() if count * len(used) > pages}
    return max(running, key=lambda row: (tenant_of(row.ticket) in greedy, row.age))


def victims_for_fairness(
    first: Ticket, running: Sequence[Running], max_running: int, pool: PagePool
) -> Iterator[Running]:
    """Sequences to preempt so that `first`, the next waiting request, gets its tenant's share of the batch and the pages.

    They belong to tenants that exceed their share; those with the fewest drawn tokens come first. The caller must preempt each
    one before it asks for the next: `running` and `pool` are read again.
    """
    tenant, rows = tenant_of(first), Counter(tenant_of(row.ticket) for row in running)
    present = rows.keys() | {tenant}
    if len(present) < 2:
        return
    row_share, page_share = max(1, max_running // len(present)), pool.limit // len(present)
    requested = min(len(first.todo), row_share - rows[tenant])
    needed = min(page_share, pages_for(len(first.request.prompt)) + max(0, requested))
    while running:
        too_few_rows = requested > max_running - len(running)
        too_few_pages = requested > 0 and needed > pool.available
        others = [name for name in rows if name != tenant and rows[name]]
        if not others or not (too_few_rows or too_few_pages):
            return
        largest = max(others, key=lambda name: rows[name])
        theirs = [row for row in running if tenant_of(row.ticket) == largest]
        has_too_many_rows = too_few_rows and rows[largest] > row_share
        if not has_too_many_rows and sum(len(row.table.pages) for row in theirs) <= page_share:
            return
        rows[largest] -= 1
        yield min(theirs, key=lambda row: (len(row.sequence.tokens), [-part for part in row.age]))
