"""Attention of a packed pass in one call for all its sequences, by torch's `varlen_attn` or, where they are long, flash-attn-4.

The segments of the plan become cumulative lengths. A prefix that several sequences share is computed once, as everywhere in the
engine; its keys are then copied for each of them. The gradients of all copies are summed in float32 in a fixed order (the
backward pass of `index_select` adds bfloat16 numbers atomically). Keys of tokens that are in the KV cache already (a prompt
that begins there, or the later pieces of a long one) are gathered from its pages.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch

from tinker_local_backend.engine.cuda import flash_attention
from tinker_local_backend.engine.model.attention import PackedPlan, Segment
from tinker_local_backend.engine.model.paged_attention import LayerAttention
from tinker_local_backend.engine.sampling.pages import PAGE_TOKENS, pages_for

MAX_DIM = 256
"""Largest head dimension of varlen_attn's kernel; it must also be a multiple of 8."""


@dataclass(frozen=True, eq=False)
class Copies:
    """The T rows of a pass, with the keys read from the cache behind them, and the K gathered keys that copy them.

    `gathered` (K,): the row that each key copies. `originals` (T,): each row's index among the gathered keys, in its segment.
    `shared`: for every m > 1, the rows (S,) with m copies, and the indices (S, m) of these.
    """

    gathered: torch.Tensor
    originals: torch.Tensor
    shared: list[tuple[torch.Tensor, torch.Tensor]]


@dataclass(eq=False)
class VarlenPlan:
    """A packed plan whose segments are all attended to in one call."""

    plan: PackedPlan
    """attends in the layers that varlen_attn does not support"""
    queries: torch.Tensor
    """(N + 1,) int32: cumulative lengths of the segments' queries"""
    keys: torch.Tensor
    """(N + 1,) int32: cumulative lengths of their keys, prefixes included"""
    max_queries: int
    max_keys: int
    copies: Copies | None
    """None: no prefix is shared, none is in the cache, and no key is copied"""
    cached: tuple[torch.Tensor, torch.Tensor] | None = None
    """(C,) int64: page of the cache, and place in it, of each key that is read from there"""
    flash: bool = False
    """long sequences go to flash-attn-4"""

    @classmethod
    def of(cls, plan: PackedPlan, device: torch.device, flash: bool = False) -> VarlenPlan:
        segments = plan.segments
        lengths = np.array([segment.end - segment.start for segment in segments])
        before = np.array([_before(segment) for segment in segments])

        def ends(values: np.ndarray) -> torch.Tensor:
            return torch.tensor([0, *np.cumsum(values)], dtype=torch.int32, device=device)

        totals = lengths + before
        copies = _copies(segments, device) if before.any() else None
        longest = int(totals.max())
        cached = _cached(segments)
        use_flash = flash and longest >= flash_attention.MIN_KEYS
        return cls(plan, ends(lengths), ends(totals), int(lengths.max()), longest, copies, cached, use_flash)

    def attend(
        self, layer: LayerAttention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """query (1, H, T, D), key and value (1, KV, T, D) -> (1, T, H, D)."""
        if not suits(layer, query):
            return self.plan.attend(layer, query, key, value)
        if self.plan.cache is not None and self.plan.kv_slots is not None:
            self.plan.cache.write(layer.index, self.plan.kv_slots, key.squeeze(0), value.squeeze(0))
        query, key, value = (tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value))
        if self.cached is not None:
            assert self.plan.cache is not None
            pages, at = self.cached
            stored_keys, stored_values = self.plan.cache.layer(layer.index)
            key, value = torch.cat((key, stored_keys[pages, :, at])), torch.cat((value, stored_values[pages, :, at]))
        if self.copies is not None:
            key, value = gather_rows(key, self.copies), gather_rows(value, self.copies)
        # The engine's window counts the token itself, varlen_attn's only earlier tokens.
        window = (-1, 0) if layer.window is None else (layer.window - 1, 0)
        lengths = (self.queries, self.keys, self.max_queries, self.max_keys)
        kernel = flash_attention.attend if self.flash else _varlen
        return kernel(query, key, value, *lengths, scale=layer.scaling, window_size=window).unsqueeze(0)


def suits(layer: LayerAttention, query: torch.Tensor) -> bool:
    """Whether varlen_attn supports this layer: on CUDA in 16 bits, no soft cap, no sinks. The CPU stand-in takes any dtype."""
    in_16_bits = query.dtype in (torch.bfloat16, torch.float16) or query.device.type == "cpu"
    plain = layer.softcap is None and layer.sinks is None
    return in_16_bits and plain and query.shape[-1] <= MAX_DIM and query.shape[-1] % 8 == 0


def _before(segment: Segment) -> int:
    """Tokens that a segment sees before its own."""
    if segment.prefix is not None:
        return segment.prefix[1] - segment.prefix[0]
    return 0 if segment.table is None else segment.past


def _cached(segments: Sequence[Segment]) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Where the cache has the keys before the segments that begin there, segment after segment."""
    pages, places = [], []
    for segment in segments:
        if segment.table is not None and segment.past:
            used = segment.table[: pages_for(segment.past)]
            pages.append(used.repeat_interleave(PAGE_TOKENS)[: segment.past])
            places.append(torch.arange(segment.past, device=used.device) % PAGE_TOKENS)
    return (torch.cat(pages), torch.cat(places)) if pages else None


def _copies(segments: Sequence[Segment], device: torch.device) -> Copies:
    gathered, originals, end = [], [], 0
    read = segments[-1].end  # keys from the cache follow the rows of the pass
    for segment in segments:
        if segment.prefix is not None:
            gathered.append(np.arange(*segment.prefix))
            end += len(gathered[-1])
        elif segment.table is not None:
            gathered.append(np.arange(read, read + segment.past))
            read, end = read + segment.past, end + segment.past
        gathered.append(np.arange(segment.start, segment.end))
        originals.append(end + np.arange(segment.end - segment.start))
        end += len(gathered[-1])

    def tensor(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(device)

    rows = np.concatenate(gathered)
    by_row = np.argsort(rows, kind="stable")
    counts = np.bincount(rows)
    first = np.cumsum(counts) - counts
    shared = []
    for count in np.unique(counts[counts > 1]).tolist():
        copied = np.flatnonzero(counts == count)
        shared.append((tensor(copied), tensor(by_row[first[copied][:, None] + np.arange(count)])))
    return Copies(tensor(rows), tensor(np.concatenate(originals)), shared)


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, copies: Copies) -> torch.Tensor:
        ctx.copies = copies
        return rows.index_select(0, copies.gathered)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        (gradient,) = gradients
        result = gradient.index_select(0, ctx.copies.originals)
        wide = torch.float64 if gradient.dtype == torch.float64 else torch.float32
        for rows, indices in ctx.copies.shared:
            of_copies = gradient.index_select(0, indices.flatten()).unflatten(0, indices.shape)
            result.index_copy_(0, rows, of_copies.sum(dim=1, dtype=wide).to(gradient.dtype))
        return result, None


def gather_rows(rows_TX: torch.Tensor, copies: Copies) -> torch.Tensor:
    """(T, ...) -> (K, ...). The backward pass sums the gradients of a row's copies in float32, in a fixed order."""
    result: Any = _GatherRows.apply(rows_TX, copies)
    return result


@cache
def _asks_for_gqa(varlen_attn: Callable[..., Any]) -> bool:
    """Whether this torch's function asks to be told of fewer key heads than query heads (from 2.12 on; before, it takes them)."""
    return "enable_gqa" in inspect.signature(varlen_attn).parameters


def _varlen(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *lengths: Any, **options: Any) -> torch.Tensor:
    from torch.nn.attention.varlen import varlen_attn

    if _asks_for_gqa(varlen_attn):
        options["enable_gqa"] = query.shape[1] > key.shape[1]
    attend: Any = varlen_attn
    return attend(query, key, value, *lengths, **options)
