"""Attention of one new token per running sequence to the pages of its table.

Each pair of a sequence and one of its pages is a small product of its own; a softmax over all pages of a sequence joins them,
so keys are never copied together. Pages are worked through in classes by the number of their readers: one that many sequences
begin with is read once, with the queries of all of them. The pages of a class are the batch of the product. Where they lie
close together the batch is a view of the cache, and `Tables.moves` says how to bring them there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional as F

from tinker_local_backend.engine.model.kv_cache import PAGE_TOKENS, KVCache, Places

Ints = npt.NDArray[np.int64]

HIDDEN = -1e30
"""Added to the score of a key that is not seen. Finite, so that a page without any visible key has no NaN, only no weight."""

NOWHERE = -(1 << 40)
"""Position of a page in a view that is of no concern: before everything, so all of it is visible and nothing overflows."""

MOST_SPREAD = 2
"""A class of n pages is worked through as a view of so many times n places at most; others are copied together."""

MOST_WASTE = 32
"""Places worked through in vain, and pages copied, in each step, before it is worth moving pages;"""

WASTE_SHARE = 4
"""or one for so many pages."""

MOST_PADDING = 256
"""Places for readers of shared pages that may stay empty, before a class is divided: each class costs some microseconds."""


@dataclass(frozen=True)
class LayerAttention:
    """What a layer says of its own attention."""

    index: int
    scaling: float
    softcap: float | None
    window: int | None
    sinks: torch.Tensor | None = None
    """(H,): of each query head, a score that takes part in the softmax and has no value"""


@dataclass(frozen=True, eq=False)
class Table:
    """The pages of one sequence: their slots, the first of them for the tokens from `start` on."""

    slots: Sequence[int]
    start: int = 0


@dataclass(frozen=True, eq=False)
class _Class:
    """Pages that about equally many sequences read: n of them with room for W readers each."""

    pages: slice | torch.Tensor
    units: slice
    """of the layout: n * KV * W in this order"""
    shape: tuple[int, int]
    """(n, W)"""
    pairs: slice
    """of the layout: n * W in this order"""
    full: bool
    """every page is full"""


@dataclass(frozen=True, eq=False)
class _Layout:
    """What a layer works through. A unit is one key head of a page and one of its readers; U of them in all.

    G query heads share a key head; results of (unit, g) are joined to those of R * KV * G heads of rows.
    """

    classes: list[_Class]
    starts: torch.Tensor
    """(pairs,): position of the page's first token"""
    readers: torch.Tensor
    """(pairs,): rows; any, where there is no reader"""
    queries: torch.Tensor
    """(U,): row * KV + key head; any, where there is no reader"""
    padded: torch.Tensor
    """(R * KV * G * P,): for each head of a row its (unit, g) by position, filled up to P with U * G"""
    in_order: torch.Tensor
    """(N * KV * G,): the same without what it is filled up with. Sums in this order do not depend on where pages lie."""
    present: torch.Tensor | None
    """(N * KV * G,): their places in `padded`; None: all"""
    offsets: torch.Tensor
    """(R * KV * G,): where each head of a row begins in `in_order`"""


@dataclass(frozen=True, eq=False)
class _Group:
    """A class before its tensors are made; arrays over its pairs, sorted by slot."""

    slots: Ints
    """of the pages, ascending"""
    counts: Ints
    """readers of each page"""
    pairs: Ints
    """indices into the pairs of the tables"""

    @property
    def lie_together(self) -> bool:
        return self._places <= MOST_SPREAD * len(self.slots)

    @property
    def _places(self) -> int:
        return int(self.slots[-1] - self.slots[0]) + 1

    @property
    def waste(self) -> int:
        """Places that do not count, or what copying the pages costs, in the same unit."""
        return min(self._places, (MOST_SPREAD + 1) * len(self.slots)) - len(self.slots)


class Tables:
    """The tables of R running sequences, and the classes of pages that follow from them.

    Args:
        slots_N: of all their pages, sequence after sequence.
        counts_R: how many of them each sequence has.
        starts_R: position of the first token in each one's first page.
        heads: (KV, G): key heads, and query heads that share one.
    """

    def __init__(self, slots_N: Ints, counts_R: Ints, starts_R: Ints, heads: tuple[int, int], device: torch.device):
        self._heads, self._device = heads, device
        self._slots_N, self._counts_R, self._starts_R = slots_N, counts_R, starts_R
        self._firsts_R = np.cumsum(counts_R) - counts_R
        self._rows_N = np.repeat(np.arange(len(counts_R)), counts_R)
        self._places_N = np.arange(len(self._slots_N)) - self._firsts_R[self._rows_N]
        self._starts_N = self._starts_R[self._rows_N] + self._places_N * PAGE_TOKENS
        self._layouts: dict[int | None, _Layout] = {}
        self._all = self._groups(np.arange(len(self._slots_N)))

    @classmethod
    def of(cls, tables: Sequence[Table], heads: tuple[int, int], device: torch.device) -> Tables:
        """Of tables one by one."""
        slots_N = np.array([slot for table in tables for slot in table.slots], dtype=np.int64)
        counts_R = np.array([len(table.slots) for table in tables], dtype=np.int64)
        starts_R = np.array([table.start for table in tables], dtype=np.int64)
        return cls(slots_N, counts_R, starts_R, heads, device)

    @property
    def rows(self) -> int:
        return len(self._counts_R)

    def places(self, lengths_R: Ints) -> Places:
        """Where the next token of each sequence is stored."""
        behind_R = lengths_R - self._starts_R
        slots = self._slots_N[self._firsts_R + behind_R // PAGE_TOKENS]
        return Places(self._tensor(slots), self._tensor(behind_R % PAGE_TOKENS))

    def moves(self) -> list[tuple[int, int]]:
        """Which pages should change places, (from, to) each; nothing while few of them lie apart."""
        groups = self._all
        total = sum(len(group.slots) for group in groups)
        if sum(group.waste for group in groups) <= max(MOST_WASTE, total // WASTE_SHARE):
            return []
        moves: list[tuple[int, int]] = []
        begin, wanted = 0, np.zeros(0, dtype=np.int64)
        for group in groups:  # each class gets a stretch of its own; what is in it already stays
            end = begin + len(group.slots)
            away = group.slots[(group.slots < begin) | (group.slots >= end)]
            holes = np.setdiff1d(np.arange(begin, end), group.slots, assume_unique=True)
            moves.extend(zip(away.tolist(), holes.tolist(), strict=True))
            wanted = np.concatenate([wanted, holes])
            begin = end
        leaving = np.array([source for source, _ in moves], dtype=np.int64)
        pushed_out = np.setdiff1d(wanted, leaving)
        vacated = np.setdiff1d(leaving, wanted)
        return [*moves, *zip(pushed_out.tolist(), vacated.tolist(), strict=True)]

    def _groups(self, pairs: Ints) -> list[_Group]:
        """Pages with one reader, and those with several; these divided by their number where that saves much."""
        pairs = pairs[np.argsort(self._slots_N[pairs], kind="stable")]
        sorted_slots = self._slots_N[pairs]
        firsts = np.flatnonzero(np.diff(sorted_slots, prepend=-1))
        slots, counts = sorted_slots[firsts], np.diff(firsts, append=len(pairs))
        groups: list[_Group] = []

        def add(chosen: npt.NDArray[np.bool_]) -> None:
            groups.append(_Group(slots[chosen], counts[chosen], pairs[np.repeat(chosen, counts)]))

        alone = counts == 1
        if alone.any():
            add(alone)
        rest = ~alone
        while rest.any():
            most = int(counts[rest].max())
            padding = int(rest.sum()) * most - int(counts[rest].sum())
            chosen = rest & (counts > most // 2) if padding > MOST_PADDING else rest
            add(chosen)
            rest = rest & ~chosen
        return groups

    def _lay_out(self, groups: Sequence[_Group]) -> _Layout:
        kv_heads, group = self._heads
        classes: list[_Class] = []
        starts, readers, queries, units, pairs = [], [], [], 0, 0
        # The unit of a pair's first key head, and how far the others lie apart.
        unit_N, width_N = np.full(len(self._slots_N), -1), np.zeros(len(self._slots_N), dtype=np.int64)
        heads = np.arange(kv_heads)[None, :, None]
        for part in groups:
            width = int(part.counts.max())
            low, high = int(part.slots[0]), int(part.slots[-1]) + 1
            in_view = part.lie_together
            pages = high - low if in_view else len(part.slots)
            index = part.slots - low if in_view else np.arange(pages)
            begins = np.cumsum(part.counts) - part.counts
            of_page = np.repeat(index, part.counts)
            place = np.arange(len(part.pairs)) - np.repeat(begins, part.counts)
            read_by, begin = np.zeros((pages, width), dtype=np.int64), np.full((pages, width), NOWHERE)
            read_by[of_page, place] = self._rows_N[part.pairs]
            begin[of_page, place] = self._starts_N[part.pairs]
            unit_N[part.pairs] = units + of_page * (kv_heads * width) + place
            width_N[part.pairs] = width
            readers.append(read_by.reshape(-1))
            starts.append(begin.reshape(-1))
            queries.append((read_by[:, None, :] * kv_heads + heads).reshape(-1))
            size, room = pages * kv_heads * width, pages * width
            where = slice(low, high) if in_view else self._tensor(part.slots)
            own = slice(units, units + size), (pages, width), slice(pairs, pairs + room)
            classes.append(_Class(where, *own, full=width > 1))
            units, pairs = units + size, pairs + room
        seen = unit_N >= 0
        padded = np.full((self.rows, kv_heads, group, int(self._counts_R.max())), units * group)
        by_head = (unit_N[:, None] + np.arange(kv_heads) * width_N[:, None])[:, :, None] * group + np.arange(group)
        padded[self._rows_N[seen], :, :, self._places_N[seen]] = by_head[seen]
        padded = padded.reshape(-1)
        present = np.flatnonzero(padded < units * group)
        counts_R = np.bincount(self._rows_N[seen], minlength=self.rows)
        counts = np.repeat(counts_R, kv_heads * group)
        return _Layout(
            classes,
            starts=self._tensor(np.concatenate(starts)),
            readers=self._tensor(np.concatenate(readers)),
            queries=self._tensor(np.concatenate(queries)),
            padded=self._tensor(padded),
            in_order=self._tensor(padded[present]),
            present=None if len(present) == len(padded) else self._tensor(present),
            offsets=self._tensor(np.cumsum(counts) - counts),
        )

    def layout(self, window: int | None, lengths_R: Ints) -> _Layout:
        """For layers with this window. Pages that no query sees any more are left out."""
        if window not in self._layouts:
            groups = self._all
            if window is not None:
                seen = self._starts_N + PAGE_TOKENS + window > lengths_R[self._rows_N]
                groups = groups if seen.all() else self._groups(np.flatnonzero(seen))
            self._layouts[window] = self._lay_out(groups)
        return self._layouts[window]

    def _tensor(self, array: Ints) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)


@dataclass
class DecodePlan:
    """One new token for each sequence of the tables; sequence i has `lengths_R[i]` tokens before it."""

    cache: KVCache
    tables: Tables
    lengths_R: Ints
    places: Places = field(init=False)
    lengths: torch.Tensor = field(init=False)
    """lengths_R on the device, which are also the positions of the new tokens"""
    _layouts: dict[int | None, tuple[_Layout, list[torch.Tensor | None]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.places = self.tables.places(self.lengths_R)
        self.lengths = torch.from_numpy(self.lengths_R).to(self.places.slots.device)

    def attend(
        self, layer: LayerAttention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """See decode_attention."""
        return decode_attention(layer, query, key, value, self)

    def layout(self, window: int | None) -> tuple[_Layout, list[torch.Tensor | None]]:
        """What a layer with this window works through, and for each class what is added to its scores, see `_masks`."""
        if window not in self._layouts:
            layout = self.tables.layout(window, self.lengths_R)
            self._layouts[window] = layout, self._masks(layout, window)
        return self._layouts[window]

    def _masks(self, layout: _Layout, window: int | None) -> list[torch.Tensor | None]:
        """(n, 1, W, 1, PAGE_TOKENS) in float32 for each class; None: all keys are seen."""
        offsets = torch.arange(PAGE_TOKENS, device=self.lengths.device)
        left = (self.lengths.index_select(0, layout.readers) - layout.starts)[:, None]
        hidden = offsets > left
        if window is not None:
            hidden |= offsets <= left - window
        mask = hidden.float().mul_(HIDDEN)
        return [
            None
            if part.full and window is None
            else mask[part.pairs].view(part.shape[0], 1, part.shape[1], 1, PAGE_TOKENS)
            for part in layout.classes
        ]


def decode_attention(
    layer: LayerAttention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, plan: DecodePlan
) -> torch.Tensor:
    """query (1, H, R, D), key and value (1, KV, R, D) -> (1, R, H, D). Stores keys and values first."""
    plan.cache.write(layer.index, plan.places, key[0], value[0])
    layout, masks = plan.layout(layer.window)
    heads, rows, dim = query.shape[1:]
    kv_heads = key.shape[1]
    group, units = heads // kv_heads, len(layout.queries)
    scale = layer.scaling if layer.softcap is None else layer.scaling / layer.softcap
    # The heads that share a key head become query positions of it, so keys are never repeated in memory.
    by_head = query[0].transpose(0, 1).reshape(rows * kv_heads, group * dim)
    queries = by_head.index_select(0, layout.queries)
    all_keys, all_values = plan.cache.layer(layer.index)
    scores = torch.empty(units, group, PAGE_TOKENS, device=query.device)
    for part, mask in zip(layout.classes, masks, strict=True):
        n, width = part.shape
        keys = all_keys[part.pages].view(n * kv_heads, PAGE_TOKENS, dim).transpose(1, 2)
        into = scores[part.units].view(n * kv_heads, width * group, PAGE_TOKENS)
        of = queries[part.units].view(n * kv_heads, width * group, dim)
        by_pair = into.view(n, kv_heads, width, group, PAGE_TOKENS)
        if mask is None or layer.softcap is not None:
            _multiply(of, keys, into, scale)
        else:
            _multiply(of, keys, by_pair.copy_(mask).view(into.shape), scale, add=True)
        if layer.softcap is not None:
            into.tanh_().mul_(layer.softcap)
            if mask is not None:
                by_pair.add_(mask)
    # A softmax of each page for itself; pages are joined by the sums of their exponentials (as logarithms, `masses`).
    largest = scores.amax(dim=-1)
    weights = torch.softmax(scores, dim=-1)
    masses = scores.new_full((units * group + 1,), HIDDEN)  # the last one is for what is not there
    torch.sub(largest, weights.amax(dim=-1).log_(), out=masses[:-1].view(units, group))
    results = torch.empty(units * group, dim, device=query.device)
    weights = weights.to(query.dtype)
    for part in layout.classes:
        n, width = part.shape
        values = all_values[part.pages].view(n * kv_heads, PAGE_TOKENS, dim)
        into = results.view(units, group * dim)[part.units].view(n * kv_heads, width * group, dim)
        _multiply(weights[part.units].view(n * kv_heads, width * group, PAGE_TOKENS), values, into)
    by_row = masses.index_select(0, layout.padded).view(rows * heads, -1)
    if layer.sinks is None:
        shares = by_row.softmax(dim=-1).view(-1)
    else:
        sinks = layer.sinks.to(by_row.dtype).repeat(rows)[:, None]
        shares = torch.cat((by_row, sinks), dim=1).softmax(dim=-1)[:, :-1].reshape(-1)
    if layout.present is not None:
        shares = shares.index_select(0, layout.present)
    out = F.embedding_bag(layout.in_order, results, layout.offsets, mode="sum", per_sample_weights=shares)
    return out.view(1, rows, heads, dim).to(query.dtype)


def _multiply(
    left: torch.Tensor, right: torch.Tensor, into: torch.Tensor, scale: float = 1.0, add: bool = False
) -> None:
    """Matrix products of a batch times `scale`, into float32 or (add) in addition to what is there."""
    if left.dtype == into.dtype:
        torch.baddbmm(into, left, right, beta=int(add), alpha=scale, out=into)
    elif add:
        into.add_(torch.bmm(left, right), alpha=scale)
    else:
        torch.mul(torch.bmm(left, right), scale, out=into)
