"""Whose sequences get their next token: those of all where they are few, else those of the tenant who has had least.

In one step with all others a few rows go at the pace of hundreds. In turns, each of n tenants takes about n times as long as
alone, whatever the others ask for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from tinker_local_backend.engine.sampling.running import DecodeBatch, Running
from tinker_local_backend.engine.sampling.shares import Waiting, tenant_of


class DecodeTurns:
    """The running sequences in batches, each of which follows while its rows come, grow and go.

    Args:
        waiting: has the account of what each tenant has had.
        overhead: a step takes as long before its first row as for so many rows.
    """

    def __init__(self, waiting: Waiting, overhead: int, heads: tuple[int, int], device: torch.device):
        self._waiting, self._overhead = waiting, overhead
        self._heads, self._device = heads, device
        self.batches: dict[frozenset[str], DecodeBatch] = {}
        """by tenants: all that run of theirs, in the order in which they run"""

    def next_batch(self, running: Sequence[Running]) -> DecodeBatch:
        """Of the tenants whose turn it is."""
        crowds = self._crowds(Counter(tenant_of(row.ticket) for row in running))
        first = self._waiting.turn(tenant for crowd in crowds for tenant in crowd)
        self.batches = {crowd: batch for crowd, batch in self.batches.items() if crowd in crowds}
        crowd = next(crowd for crowd in crowds if first in crowd)
        if crowd not in self.batches:
            rows = [row for row in running if tenant_of(row.ticket) in crowd]
            self.batches[crowd] = DecodeBatch(rows, self._heads, self._device)
        return self.batches[crowd]

    def _crowds(self, rows: Counter[str]) -> list[frozenset[str]]:
        """Tenants whose sequences go together: those who have few, as long as they hardly hold each other up."""
        crowds: list[frozenset[str]] = []
        together: set[str] = set()
        for tenant, _ in sorted(rows.items(), key=lambda item: (item[1], item[0])):
            if together and sum(rows[other] for other in together) + rows[tenant] > 2 * self._overhead:
                crowds.append(frozenset(together))
                together = set()
            together.add(tenant)
        return [*crowds, frozenset(together)]

    def charge(self, rows: Sequence[Running], tokens: int = 1) -> None:
        """These rows get so many tokens each: their tenants have had that much, and their parts of what a step costs besides."""
        counts = Counter(tenant_of(row.ticket) for row in rows)
        for tenant, count in counts.items():
            self._waiting.charge_drawn(tenant, tokens * (count + self._overhead * count // len(rows)))

    def extend(self, batch: DecodeBatch) -> None:
        """The rows of this batch run as well, behind all others."""
        for crowd, other in list(self.batches.items()):
            joining = [row for row in batch.rows if tenant_of(row.ticket) in crowd]
            if len(joining) == len(batch.rows):
                other.extend(batch)
            elif joining:
                other.extend(DecodeBatch(joining, self._heads, self._device))

    def remove(self, gone: Sequence[Running]) -> None:
        """These run no more."""
        if gone:
            for batch in self.batches.values():
                batch.remove(gone)

    def clear(self) -> None:
        """Whatever follows is made anew."""
        self.batches.clear()


def youngest_of(running: Sequence[Running], pages: int) -> Running:
    """Which one makes way when there are no more pages than these: the youngest of tenants who have more than their share."""
    held: Counter[str] = Counter()
    for row in running:
        held[tenant_of(row.ticket)] += len(row.table.pages)
    greedy = {tenant for tenant, count in held.items() if count * len(held) > pages}
    return max(running, key=lambda row: (tenant_of(row.ticket) in greedy, row.age))
