"""The running sequences in batches: the arrays that a decode step needs, updated as sequences come, grow and go.

A few rows in one batch with hundreds of another tenant's decode at the pace of hundreds. Where many run, tenants take turns:
each of n tenants then takes about n times as long as alone, whatever the others ask for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tinker_local_backend.engine.model.lora import Spans, group_rows, one_for_all
from tinker_local_backend.engine.model.paged_attention import Tables
from tinker_local_backend.engine.sampling.pages import PageStore, PageTable
from tinker_local_backend.engine.sampling.sampler import SampledSequence, Ticket
from tinker_local_backend.engine.sampling.shares import Waiting, tenant_of
from tinker_local_backend.engine.sampling.token_choice import RowParams


@dataclass(eq=False)
class Running:
    """A sequence that has pages of the KV cache."""

    ticket: Ticket
    index: int
    """of the sample"""
    sequence: SampledSequence
    seed: int
    table: PageTable
    broken: bool = False
    """the model gave NaN: what its pages hold must not be used again"""

    @property
    def length(self) -> int:
        """Tokens whose keys are in the cache: all but the newest, which the next step feeds."""
        return len(self.ticket.request.prompt) + len(self.sequence.tokens) - 1

    @property
    def age(self) -> tuple[int, int]:
        """Larger for younger ones."""
        return self.ticket.order, self.index

    @property
    def held(self) -> tuple[int, ...]:
        """The tokens whose keys are in the cache."""
        return (*self.ticket.request.prompt, *self.sequence.tokens[:-1])


_ROW = np.dtype(
    [
        ("length", np.int64),
        ("end", np.int64),  # tokens that have a place
        ("start", np.int64),  # of the first page
        ("pages", np.int64),
        ("drawn", np.uint64),
        ("newest", np.int64),
        ("seed", np.uint64),
        ("temperature", np.float64),
        ("top_k", np.int64),
        ("top_p", np.float64),
        ("min_p", np.float64),
        ("topk_logprobs", np.int64),
    ]
)


class DecodeBatch:
    """Sequences that get their next token together, row by row."""

    def __init__(self, rows: Sequence[Running], heads: tuple[int, int], device: torch.device):
        self.rows = list(rows)
        self._heads, self._device = heads, device
        self._columns = np.array([_values(row) for row in self.rows], _ROW)
        self._slots_N = _slots(self.rows)
        self._spans: Spans | None = None
        self._params: RowParams | None = None
        self._tables: Tables | None = None
        self._moves: int | None = None
        """of pages that its slots know of"""

    @property
    def lengths_R(self) -> npt.NDArray[np.int64]:
        """Tokens whose keys are in the cache."""
        return self._columns["length"].copy()

    @property
    def drawn_R(self) -> npt.NDArray[np.uint64]:
        """Tokens drawn so far, which is the position of the next one in its completion."""
        return self._columns["drawn"].copy()

    @property
    def newest_R(self) -> torch.Tensor:
        """The tokens that the next step feeds, int64."""
        return torch.from_numpy(self._columns["newest"].copy()).to(self._device)

    @property
    def asks_topk(self) -> bool:
        return bool(self._columns["topk_logprobs"].any())

    @property
    def spans(self) -> Spans:
        """Which rows go through which adapter."""
        if self._spans is None:
            adapters = [row.ticket.request.adapter for row in self.rows]
            same = adapters.count(adapters[0]) == len(adapters)
            self._spans = one_for_all(adapters[0]) if same else group_rows(adapters, self._device)
        return self._spans

    @property
    def params(self) -> RowParams:
        if self._params is None:
            names = ("temperature", "top_k", "top_p", "min_p", "seed")
            temperature, top_k, top_p, min_p, seed = map(self._column, names)
            self._params = RowParams(temperature, top_k, top_p, min_p, seed, self._device)
        return self._params

    def tables(self, store: PageStore) -> Tables:
        """As they are, after bringing together pages that lie too far apart in the store."""
        if self._moves != store.pool.moves:  # another batch's
            self._slots_N, self._tables, self._moves = _slots(self.rows), None, store.pool.moves
        if self._tables is None:
            self._tables = self._new_tables()
            if moves := self._tables.moves():
                store.move(moves)
                now = np.arange(store.pool.capacity)
                sources, targets = np.array(moves, dtype=np.int64).T
                now[sources] = targets
                self._slots_N = now[self._slots_N]
                self._tables, self._moves = self._new_tables(), store.pool.moves
        return self._tables

    def _new_tables(self) -> Tables:
        return Tables(self._slots_N, self._column("pages"), self._column("start"), self._heads, self._device)

    def _column(self, name: str) -> npt.NDArray[Any]:
        return self._columns[name].copy()

    def advance(self, tokens_R: torch.Tensor) -> None:
        """Each row has one more token."""
        self._columns["newest"] = tokens_R.cpu().numpy()
        self._columns["drawn"] += np.uint64(1)
        self._columns["length"] += 1

    def near_end(self, tokens: int) -> list[int]:
        """Rows whose last page has place for at most so many tokens."""
        return np.flatnonzero(self._columns["length"] + tokens >= self._columns["end"]).tolist()

    def grow(self, rows: Sequence[Running]) -> None:
        """The tables of these rows have a new last page each, and may have lost pages at their beginning."""
        grown = {id(row) for row in rows}
        places = [place for place, row in enumerate(self.rows) if id(row) in grown]
        tables = [self.rows[place].table for place in places]
        columns = self._columns
        if (columns["start"][places] == [table.start for table in tables]).all():
            ends_R = np.cumsum(columns["pages"])
            self._slots_N = np.insert(self._slots_N, ends_R[places], [table.pages[-1].slot for table in tables])
        else:
            self._slots_N = _slots(self.rows)
        columns["start"][places] = [table.start for table in tables]
        columns["pages"][places] = [len(table.pages) for table in tables]
        columns["end"][places] = [table.end for table in tables]
        self._tables = None

    def remove(self, gone: Sequence[Running]) -> None:
        """Without these rows, as far as they are here."""
        ids = {id(row) for row in gone}
        kept_R = np.fromiter((id(row) not in ids for row in self.rows), np.bool_, len(self.rows))
        if kept_R.all():
            return
        self._slots_N = self._slots_N[np.repeat(kept_R, self._columns["pages"])]
        self._columns = self._columns[kept_R]
        self.rows = [row for row in self.rows if id(row) not in ids]
        self._spans = self._params = self._tables = None

    def extend(self, other: DecodeBatch) -> None:
        """With the rows of another one behind."""
        self._slots_N = np.concatenate([self._slots_N, other._slots_N])
        self._columns = np.concatenate([self._columns, other._columns])
        self.rows = [*self.rows, *other.rows]
        self._spans = self._params = self._tables = None


def record_topk(rows: Sequence[Running], tempered_RV: torch.Tensor) -> None:
    """The likeliest tokens at this step, for those that ask."""
    asking = [i for i, row in enumerate(rows) if row.ticket.request.topk_logprobs]
    if not asking:
        return
    logprobs = torch.log_softmax(tempered_RV[torch.tensor(asking, device=tempered_RV.device)], dim=-1)
    values, ids = logprobs.topk(max(rows[i].ticket.request.topk_logprobs for i in asking), dim=-1)
    for i, own_ids, own_values in zip(asking, ids.cpu().numpy(), values.cpu().numpy(), strict=True):
        k = rows[i].ticket.request.topk_logprobs
        rows[i].sequence.topk.append((own_ids[:k], own_values[:k]))


def _slots(rows: Sequence[Running]) -> npt.NDArray[np.int64]:
    """Of all their pages, row after row."""
    return np.array([page.slot for row in rows for page in row.table.pages], dtype=np.int64)


def _values(row: Running) -> tuple[float, ...]:
    """Of the columns, in their order."""
    request, table = row.ticket.request, row.table
    return (
        row.length,
        table.end,
        table.start,
        len(table.pages),
        len(row.sequence.tokens),
        row.sequence.tokens[-1] if row.sequence.tokens else -1,
        row.seed,
        request.temperature,
        request.top_k,
        request.top_p,
        request.min_p,
        request.topk_logprobs,
    )


class DecodeBatches:
    """The running sequences in batches, which are updated as rows come, grow and go.

    Args:
        waiting: keeps count of what each tenant has had.
        overhead: the fixed cost of a step, in rows.
    """

    def __init__(self, waiting: Waiting, overhead: int, heads: tuple[int, int], device: torch.device):
        self._waiting, self._overhead = waiting, overhead
        self._heads, self._device = heads, device
        self.batches: dict[frozenset[str], DecodeBatch] = {}
        """by tenants: all their running sequences, in order"""

    def next_batch(self, running: Sequence[Running]) -> DecodeBatch:
        """The batch of the tenants whose turn it is."""
        crowds = self._crowds(Counter(tenant_of(row.ticket) for row in running))
        first = self._waiting.turn(tenant for crowd in crowds for tenant in crowd)
        self.batches = {crowd: batch for crowd, batch in self.batches.items() if crowd in crowds}
        crowd = next(crowd for crowd in crowds if first in crowd)
        if crowd not in self.batches:
            rows = [row for row in running if tenant_of(row.ticket) in crowd]
            self.batches[crowd] = DecodeBatch(rows, self._heads, self._device)
        return self.batches[crowd]

    def _crowds(self, rows: Counter[str]) -> list[frozenset[str]]:
        """Tenants that decode in one batch: those with few rows, as long as they hardly slow each other down."""
        crowds: list[frozenset[str]] = []
        together: set[str] = set()
        for tenant, _ in sorted(rows.items(), key=lambda item: (item[1], item[0])):
            if together and sum(rows[other] for other in together) + rows[tenant] > 2 * self._overhead:
                crowds.append(frozenset(together))
                together = set()
            together.add(tenant)
        return [*crowds, frozenset(together)]

    def charge(self, rows: Sequence[Running], tokens: int = 1) -> None:
        """Charge the tenants of these rows for so many tokens each, and for their part of the fixed cost of a step."""
        counts = Counter(tenant_of(row.ticket) for row in rows)
        for tenant, count in counts.items():
            self._waiting.charge_drawn(tenant, tokens * (count + self._overhead * count // len(rows)))

    def extend(self, batch: DecodeBatch) -> None:
        """Append the rows of this batch to those of their tenants."""
        for crowd, other in list(self.batches.items()):
            joining = [row for row in batch.rows if tenant_of(row.ticket) in crowd]
            if len(joining) == len(batch.rows):
                other.extend(batch)
            elif joining:
                other.extend(DecodeBatch(joining, self._heads, self._device))

    def remove(self, gone: Sequence[Running]) -> None:
        """Remove rows that have ended."""
        if gone:
            for batch in self.batches.values():
                batch.remove(gone)

    def clear(self) -> None:
        """Drop all batches; the next ones are made from the rows."""
        self.batches.clear()
