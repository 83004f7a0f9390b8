"""Attention of one new token per running sequence to the pages of its table.

Each pair of a sequence and one of its pages is a separate small product; a softmax over all pages of a sequence merges them,
so keys are never gathered. Pages are classified by their number of readers: a prefix page shared by many sequences is read
once, with the queries of all of them. The pages of a class are the batch of a product. If they are close together in memory,
the batch is a view of the cache; `Tables.moves` compacts them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional as F

from tinker_local_backend.engine.model.kv_cache import PAGE_TOKENS, KVCache, KVSlots
from tinker_local_backend.engine.model.states import StateCache

Ints = npt.NDArray[np.int64]

Heads = tuple[int, int]
"""(KV, G): key heads, and query heads that share one."""

HIDDEN = -1e30
"""Added to the score of a masked key. Finite, so that a page without visible keys gets weight 0 and not NaN."""

PADDING_START = -(1 << 40)
"""Start position of padding pages: before all others, so that the whole page is visible and nothing overflows."""

MAX_SPREAD = 2
"""A class of n pages is read as a view of at most MAX_SPREAD * n slots; otherwise its pages are gathered."""

MAX_WASTE = 32
"""Wasted slots and gathered pages per step up to which pages are not compacted."""

WASTE_SHARE = 4
"""Nor are they while these are at most 1 / WASTE_SHARE of all pages."""

MAX_PADDING = 256
"""Empty reader seats of shared pages above which a class is split: each class costs some microseconds."""


@dataclass(frozen=True)
class LayerAttention:
    """A layer's attention parameters."""

    index: int
    scaling: float
    softcap: float | None
    window: int | None
    sinks: torch.Tensor | None = None
    """(H,): per query head, an extra score in the softmax without a value"""


@dataclass(frozen=True, eq=False)
class Table:
    """The page slots of one sequence. The first page begins with token `start`."""

    slots: Sequence[int]
    start: int = 0


@dataclass(frozen=True, eq=False)
class _Class:
    """n pages with similar numbers of readers, and seats for W readers per page."""

    pages: slice | torch.Tensor
    units: slice
    """range in the layout's units: (n, KV, W), flat"""
    shape: tuple[int, int]
    """(n, W)"""
    pairs: slice
    """range in the layout's pairs: (n, W), flat"""
    full: bool
    """every page is full"""


@dataclass(frozen=True, eq=False)
class _Layout:
    """The products of a layer. A unit is one key head of a page and one of its readers; there are U units.

    G query heads share a key head; results of (unit, g) are merged into those of the R * KV * G heads of rows.
    """

    classes: list[_Class]
    starts: torch.Tensor
    """(pairs,): position of the page's first token"""
    readers: torch.Tensor
    """(pairs,): rows; arbitrary for empty seats"""
    queries: torch.Tensor
    """(U,): row * KV + key head; arbitrary for empty seats"""
    padded: torch.Tensor
    """(R * KV * G * P,): for each head of a row its (unit, g) results by position, padded to P with U * G"""
    in_order: torch.Tensor
    """(N * KV * G,): `padded` without its padding. Sums in this order do not depend on page slots."""
    present: torch.Tensor | None
    """(N * KV * G,): their indices in `padded`; None if there is no padding"""
    offsets: torch.Tensor
    """(R * KV * G,): where each head of a row begins in `in_order`"""


@dataclass(frozen=True, eq=False)
class _Group:
    """A class on the host; arrays over its pairs, sorted by slot."""

    slots: Ints
    """of the pages, ascending"""
    counts: Ints
    """readers of each page"""
    pairs: Ints
    """indices into the pairs of the tables"""

    @property
    def is_dense(self) -> bool:
        return self._span <= MAX_SPREAD * len(self.slots)

    @property
    def _span(self) -> int:
        return int(self.slots[-1] - self.slots[0]) + 1

    @property
    def waste(self) -> int:
        """Wasted slots in the view, or the cost of gathering the pages, in the same unit."""
        return min(self._span, (MAX_SPREAD + 1) * len(self.slots)) - len(self.slots)


class Tables:
    """The tables of R running sequences, and their pages by class.

    Args:
        slots_N: slots of all pages, sequence after sequence.
        counts_R: number of pages of each sequence.
        starts_R: position of the first token in each sequence's first page.
    """

    def __init__(self, slots_N: Ints, counts_R: Ints, starts_R: Ints, device: torch.device):
        self._device = device
        self._slots_N, self._counts_R, self._starts_R = slots_N, counts_R, starts_R
        self._firsts_R = np.cumsum(counts_R) - counts_R
        self._rows_N = np.repeat(np.arange(len(counts_R)), counts_R)
        self._indices_N = np.arange(len(self._slots_N)) - self._firsts_R[self._rows_N]
        self._starts_N = self._starts_R[self._rows_N] + self._indices_N * PAGE_TOKENS
        self._layouts: dict[tuple[int | None, Heads], _Layout] = {}
        self._all = self._groups(np.arange(len(self._slots_N)))

    @classmethod
    def of(cls, tables: Sequence[Table], device: torch.device) -> Tables:
        """Build from one Table per sequence."""
        slots_N = np.array([slot for table in tables for slot in table.slots], dtype=np.int64)
        counts_R = np.array([len(table.slots) for table in tables], dtype=np.int64)
        starts_R = np.array([table.start for table in tables], dtype=np.int64)
        return cls(slots_N, counts_R, starts_R, device)

    @property
    def rows(self) -> int:
        return len(self._counts_R)

    def next_slots(self, lengths_R: Ints) -> KVSlots:
        """Where the next token of each sequence is stored."""
        offsets_R = lengths_R - self._starts_R
        slots = self._slots_N[self._firsts_R + offsets_R // PAGE_TOKENS]
        return KVSlots(self._tensor(slots), self._tensor(offsets_R % PAGE_TOKENS))

    def keys_of(self, rows: Ints, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Page slot and offset in the page of each token of these sequences, which have `length` tokens: (rows, length) each."""
        pages, offsets = np.divmod(np.arange(length) - self._starts_R[rows, None], PAGE_TOKENS)
        slots = self._slots_N[self._firsts_R[rows, None] + pages]
        return self._tensor(slots), self._tensor(offsets)

    def moves(self) -> list[tuple[int, int]]:
        """Pages to move for compaction, as (from, to) slots; empty while little is wasted."""
        groups = self._all
        total = sum(len(group.slots) for group in groups)
        if sum(group.waste for group in groups) <= max(MAX_WASTE, total // WASTE_SHARE):
            return []
        moves: list[tuple[int, int]] = []
        begin, targets = 0, np.zeros(0, dtype=np.int64)
        for group in groups:  # each class gets a range of slots; pages already in it stay
            end = begin + len(group.slots)
            outside = group.slots[(group.slots < begin) | (group.slots >= end)]
            holes = np.setdiff1d(np.arange(begin, end), group.slots, assume_unique=True)
            moves.extend(zip(outside.tolist(), holes.tolist(), strict=True))
            targets = np.concatenate([targets, holes])
            begin = end
        sources = np.array([source for source, _ in moves], dtype=np.int64)
        displaced = np.setdiff1d(targets, sources)
        vacated = np.setdiff1d(sources, targets)
        return [*moves, *zip(displaced.tolist(), vacated.tolist(), strict=True)]

    def _groups(self, pairs: Ints) -> list[_Group]:
        """Split pages into those with one reader and those with several, and these by their number if that saves padding."""
        pairs = pairs[np.argsort(self._slots_N[pairs], kind="stable")]
        sorted_slots = self._slots_N[pairs]
        firsts = np.flatnonzero(np.diff(sorted_slots, prepend=-1))
        slots, counts = sorted_slots[firsts], np.diff(firsts, append=len(pairs))
        groups: list[_Group] = []

        def add(chosen: npt.NDArray[np.bool_]) -> None:
            groups.append(_Group(slots[chosen], counts[chosen], pairs[np.repeat(chosen, counts)]))

        single = counts == 1
        if single.any():
            add(single)
        rest = ~single
        while rest.any():
            most = int(counts[rest].max())
            padding = int(rest.sum()) * most - int(counts[rest].sum())
            chosen = rest & (counts > most // 2) if padding > MAX_PADDING else rest
            add(chosen)
            rest = rest & ~chosen
        return groups

    def _build_layout(self, groups: Sequence[_Group], heads_of_layer: Heads) -> _Layout:
        kv_heads, group = heads_of_layer
        classes: list[_Class] = []
        starts, readers, queries, units, pairs = [], [], [], 0, 0
        # The unit of a pair's first key head, and the distance to those of its other key heads.
        unit_N, width_N = np.full(len(self._slots_N), -1), np.zeros(len(self._slots_N), dtype=np.int64)
        heads = np.arange(kv_heads)[None, :, None]
        for part in groups:
            width = int(part.counts.max())
            low, high = int(part.slots[0]), int(part.slots[-1]) + 1
            in_view = part.is_dense
            pages = high - low if in_view else len(part.slots)
            index = part.slots - low if in_view else np.arange(pages)
            firsts = np.cumsum(part.counts) - part.counts
            page = np.repeat(index, part.counts)
            seat = np.arange(len(part.pairs)) - np.repeat(firsts, part.counts)
            reader, start = np.zeros((pages, width), dtype=np.int64), np.full((pages, width), PADDING_START)
            reader[page, seat] = self._rows_N[part.pairs]
            start[page, seat] = self._starts_N[part.pairs]
            unit_N[part.pairs] = units + page * (kv_heads * width) + seat
            width_N[part.pairs] = width
            readers.append(reader.reshape(-1))
            starts.append(start.reshape(-1))
            queries.append((reader[:, None, :] * kv_heads + heads).reshape(-1))
            end_unit, end_pair = units + pages * kv_heads * width, pairs + pages * width
            selection = slice(low, high) if in_view else self._tensor(part.slots)
            ranges = slice(units, end_unit), (pages, width), slice(pairs, end_pair)
            classes.append(_Class(selection, *ranges, full=width > 1))
            units, pairs = end_unit, end_pair
        seen = unit_N >= 0
        padded = np.full((self.rows, kv_heads, group, int(self._counts_R.max())), units * group)
        by_head = (unit_N[:, None] + np.arange(kv_heads) * width_N[:, None])[:, :, None] * group + np.arange(group)
        padded[self._rows_N[seen], :, :, self._indices_N[seen]] = by_head[seen]
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

    def layout(self, window: int | None, heads: Heads, lengths_R: Ints) -> _Layout:
        """The layout for layers with this window and these heads, without pages outside every query's window."""
        if (window, heads) not in self._layouts:
            groups = self._all
            if window is not None:
                seen = self._starts_N + PAGE_TOKENS + window > lengths_R[self._rows_N]
                groups = groups if seen.all() else self._groups(np.flatnonzero(seen))
            self._layouts[window, heads] = self._build_layout(groups, heads)
        return self._layouts[window, heads]

    def _tensor(self, array: Ints) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)


@dataclass
class DecodePlan:
    """One new token for each sequence of the tables; sequence i has `lengths_R[i]` tokens before it."""

    cache: KVCache
    tables: Tables
    lengths_R: Ints
    states: StateCache | None = None
    state_slots: torch.Tensor | None = None
    """(R,): of the sequences' states, in a model with such layers"""
    kv_slots: KVSlots = field(init=False)
    lengths: torch.Tensor = field(init=False)
    """lengths_R on the device: the positions of the new tokens"""
    _layouts: dict[tuple[int | None, Heads], tuple[_Layout, list[torch.Tensor | None]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.kv_slots = self.tables.next_slots(self.lengths_R)
        self.lengths = torch.from_numpy(self.lengths_R).to(self.kv_slots.slots.device)

    def attend(
        self, layer: LayerAttention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """query (1, H, R, D), key (1, KV, R, D), value (1, KV, R, V) -> (1, R, H, V). Stores keys and values first."""
        self.cache.write(layer.index, self.kv_slots, key[0], value[0])
        heads, rows, dim = query.shape[1:]
        kv_heads, value_dim = key.shape[1], value.shape[3]
        group = heads // kv_heads
        layout, masks = self.layout(layer.window, (kv_heads, group))
        units = len(layout.queries)
        scale = layer.scaling if layer.softcap is None else layer.scaling / layer.softcap
        # The query heads of a key head become query positions, so keys are not repeated in memory.
        by_head = query[0].transpose(0, 1).reshape(rows * kv_heads, group * dim)
        queries = by_head.index_select(0, layout.queries)
        all_keys, all_values = self.cache.layer(layer.index)
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
        # One softmax per page; pages are merged by the logarithms of their sums of exponentials, `masses`.
        largest = scores.amax(dim=-1)
        weights = torch.softmax(scores, dim=-1)
        masses = scores.new_full((units * group + 1,), HIDDEN)  # the last one is the padding
        torch.sub(largest, weights.amax(dim=-1).log_(), out=masses[:-1].view(units, group))
        results = torch.empty(units * group, value_dim, device=query.device)
        weights = weights.to(query.dtype)
        for part in layout.classes:
            n, width = part.shape
            values = all_values[part.pages].view(n * kv_heads, PAGE_TOKENS, value_dim)
            into = results.view(units, group * value_dim)[part.units].view(n * kv_heads, width * group, value_dim)
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
        return out.view(1, rows, heads, value_dim).to(query.dtype)

    def layout(self, window: int | None, heads: Heads) -> tuple[_Layout, list[torch.Tensor | None]]:
        """The layout of layers with this window and these heads, and the additive mask of each class, see `_masks`."""
        if (window, heads) not in self._layouts:
            layout = self.tables.layout(window, heads, self.lengths_R)
            self._layouts[window, heads] = layout, self._masks(layout, window)
        return self._layouts[window, heads]

    def _masks(self, layout: _Layout, window: int | None) -> list[torch.Tensor | None]:
        """(n, 1, W, 1, PAGE_TOKENS) float32 for each class; None: all keys are visible."""
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


def _multiply(
    left: torch.Tensor, right: torch.Tensor, into: torch.Tensor, scale: float = 1.0, add: bool = False
) -> None:
    """Write batched matrix products times `scale` to `into` (float32), or add them to it."""
    if left.dtype == into.dtype:
        torch.baddbmm(into, left, right, beta=int(add), alpha=scale, out=into)
    elif add:
        into.add_(torch.bmm(left, right), alpha=scale)
    else:
        torch.mul(torch.bmm(left, right), scale, out=into)
