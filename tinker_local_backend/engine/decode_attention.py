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

from tinker_local_backend.engine.kv_cache import KVCache, Places
from tinker_local_backend.engine.pages import PAGE_TOKENS

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
    starts: torch.Tensor
    """(n,): position of a page's first token"""
    readers: torch.Tensor
    """(n, W): rows; 0 where there is no reader"""
    full: bool
    """every page is full"""


@dataclass(frozen=True, eq=False)
class _Layout:
    """What a layer works through. A unit is one key head of a page and one of its readers; U of them in all."""

    classes: list[_Class]
    queries: torch.Tensor
    """(U,): row * KV + key head; any, where there is no reader"""
    results: torch.Tensor
    """(U,): the same; those of row R, which nobody looks at, where there is no reader"""
    in_order: torch.Tensor
    """(N,): the units with a reader, by result and then by position. Sums in this order do not depend on where pages lie."""
    sums: torch.Tensor
    """(N,): their results"""


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
    """The tables of R running sequences, and the classes of pages that follow from them."""

    def __init__(self, tables: Sequence[Table], kv_heads: int, device: torch.device):
        self._kv_heads, self._device = kv_heads, device
        self._counts_R = np.array([len(table.slots) for table in tables], dtype=np.int64)
        self._slots_N = np.fromiter((slot for table in tables for slot in table.slots), np.int64)
        self._rows_N = np.repeat(np.arange(len(tables)), self._counts_R)
        first_N = np.repeat(np.cumsum(self._counts_R) - self._counts_R, self._counts_R)
        starts_R = np.array([table.start for table in tables], dtype=np.int64)
        self._starts_N = starts_R[self._rows_N] + (np.arange(len(self._slots_N)) - first_N) * PAGE_TOKENS
        self._layouts: dict[int | None, _Layout] = {}
        self._all = self._groups(np.arange(len(self._slots_N)))

    @property
    def rows(self) -> int:
        return len(self._counts_R)

    def places(self, lengths_R: Ints) -> Places:
        """Where the next token of each sequence is stored, which is in its last page."""
        last_R = np.cumsum(self._counts_R) - 1
        slots, offsets = self._slots_N[last_R], lengths_R - self._starts_N[last_R]
        return Places(torch.from_numpy(slots).to(self._device), torch.from_numpy(offsets).to(self._device))

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

    def layout(self, window: int | None, lengths_R: Ints) -> _Layout:
        """For layers with this window. Pages that no query sees any more are left out."""
        if window not in self._layouts:
            groups = self._all
            if window is not None:
                seen = self._starts_N + PAGE_TOKENS + window > lengths_R[self._rows_N]
                groups = groups if seen.all() else self._groups(np.flatnonzero(seen))
            self._layouts[window] = self._lay_out(groups)
        return self._layouts[window]

    def _groups(self, pairs: Ints) -> list[_Group]:
        """Pages with one reader, and those with several; these divided by their number where that saves much."""
        pairs = pairs[np.argsort(self._slots_N[pairs], kind="stable")]
        slots, counts = np.unique(self._slots_N[pairs], return_counts=True)
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
        classes: list[_Class] = []
        queries, results, positions, units = [], [], [], 0
        heads = np.arange(self._kv_heads)[None, :, None]
        for group in groups:
            width = int(group.counts.max())
            low, high = int(group.slots[0]), int(group.slots[-1]) + 1
            in_view = group.lie_together
            pages = high - low if in_view else len(group.slots)
            index = group.slots - low if in_view else np.arange(pages)
            starts = np.full(pages, NOWHERE)
            readers, own = np.zeros((pages, width), dtype=np.int64), np.full((pages, width), self.rows)
            if width == 1:
                rows = self._rows_N[group.pairs]
                readers[index, 0] = own[index, 0] = rows
                starts[index] = self._starts_N[group.pairs]
            else:
                last = np.cumsum(group.counts)
                place = np.arange(len(group.pairs)) - np.repeat(last - group.counts, group.counts)
                of_page = np.repeat(index, group.counts)
                readers[of_page, place] = own[of_page, place] = self._rows_N[group.pairs]
                starts[index] = self._starts_N[group.pairs[last - 1]]
            queries.append((readers[:, None, :] * self._kv_heads + heads).reshape(-1))
            results.append((own[:, None, :] * self._kv_heads + heads).reshape(-1))
            positions.append(np.repeat(starts, width * self._kv_heads))
            size = pages * width * self._kv_heads
            classes.append(
                _Class(
                    slice(low, high) if in_view else self._tensor(group.slots),
                    slice(units, units + size),
                    (pages, width),
                    self._tensor(starts),
                    self._tensor(readers),
                    full=width > 1,
                )
            )
            units += size
        result = np.concatenate(results)
        in_order = np.lexsort((np.concatenate(positions), result))
        in_order = in_order[: np.count_nonzero(result < self.rows * self._kv_heads)]
        arrays = (np.concatenate(queries), result, in_order, result[in_order])
        return _Layout(classes, *map(self._tensor, arrays))

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

    def layout(self, window: int | None) -> tuple[_Layout, list[torch.Tensor | None]]:
        """What a layer with this window works through, and for each class what is added to its scores, see `_mask`."""
        if window not in self._layouts:
            layout = self.tables.layout(window, self.lengths_R)
            self._layouts[window] = layout, [self._mask(pages, window) for pages in layout.classes]
        return self._layouts[window]

    def _mask(self, pages: _Class, window: int | None) -> torch.Tensor | None:
        """(n, 1, W, 1, PAGE_TOKENS) in float32; None: all keys are seen."""
        if pages.full and window is None:
            return None
        offsets = torch.arange(PAGE_TOKENS, device=self.lengths.device)
        left = (self.lengths[pages.readers] - pages.starts[:, None])[:, :, None]
        hidden = offsets > left
        if window is not None:
            hidden |= offsets <= left - window
        return hidden.float().mul_(HIDDEN)[:, None, :, None, :]


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
    by_head = (query[0].transpose(0, 1) * scale).reshape(rows * kv_heads, group, dim)
    queries = by_head.index_select(0, layout.queries)
    all_keys, all_values = plan.cache.layer(layer.index)
    scores = torch.empty(units, group, PAGE_TOKENS, device=query.device)
    for pages in layout.classes:
        n, width = pages.shape
        keys = all_keys[pages.pages].view(n * kv_heads, PAGE_TOKENS, dim)
        into = scores[pages.units].view(n * kv_heads, width * group, PAGE_TOKENS)
        _multiply(queries[pages.units].view(n * kv_heads, width * group, dim), keys.transpose(1, 2), into)
    if layer.softcap is not None:
        scores.tanh_().mul_(layer.softcap)
    for pages, mask in zip(layout.classes, masks, strict=True):
        if mask is not None:
            n, width = pages.shape
            scores[pages.units].view(n, kv_heads, width, group, PAGE_TOKENS).add_(mask)
    results = layout.results
    largest = scores.new_full(((rows + 1) * kv_heads, group), HIDDEN)
    largest.scatter_reduce_(0, results[:, None].expand(units, group), scores.amax(dim=-1), "amax")
    scores.sub_(largest.index_select(0, results)[:, :, None]).exp_()
    by_page = scores.sum(dim=-1).index_select(0, layout.in_order)
    total = scores.new_zeros(rows * kv_heads, group).index_add_(0, layout.sums, by_page)
    weighted = torch.empty(units, group, dim, device=query.device)
    weights = scores.to(query.dtype)
    for pages in layout.classes:
        n, width = pages.shape
        values = all_values[pages.pages].view(n * kv_heads, PAGE_TOKENS, dim)
        into = weighted[pages.units].view(n * kv_heads, width * group, dim)
        _multiply(weights[pages.units].view(n * kv_heads, width * group, PAGE_TOKENS), values, into)
    by_page = weighted.flatten(1).index_select(0, layout.in_order)
    out = scores.new_zeros(rows * kv_heads, group * dim).index_add_(0, layout.sums, by_page)
    return (out.view(rows, heads, dim) / total.view(rows, heads, 1)).to(query.dtype)[None]


def _multiply(left: torch.Tensor, right: torch.Tensor, into: torch.Tensor) -> None:
    """Matrix products of a batch, into float32."""
    if left.dtype == into.dtype:
        torch.bmm(left, right, out=into)
    else:
        into.copy_(torch.bmm(left, right))
