"""Attention of a packed pass in one call for all its sequences, with torch's `varlen_attn` or, in large passes, flash-attn-4.

The segments of the plan become cumulative lengths. A shared prefix is computed once and its keys are copied for each sequence.
The gradients of all copies are summed in float32 in a fixed order (the backward pass of `index_select` adds bfloat16 numbers
atomically). Keys that are already in the KV cache (a cached prefix, or earlier chunks of a prompt) are gathered from its pages.
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
    """Copies of a pass's T rows, followed by keys from the cache, into K gathered keys.

    `gathered` (K,): the row that each key copies. `originals` (T,): each row's index among the gathered keys, in its segment.
    `shared`: for every m > 1, the rows (S,) with m copies, and the indices (S, m) of the copies.
    """

    gathered: torch.Tensor
    originals: torch.Tensor
    shared: list[tuple[torch.Tensor, torch.Tensor]]


@dataclass(eq=False)
class VarlenPlan:
    """A packed plan with one attention call for all segments."""

    plan: PackedPlan
    """computes the layers that varlen_attn does not support"""
    queries: torch.Tensor
    """(N + 1,) int32: cumulative lengths of the segments' queries"""
    keys: torch.Tensor
    """(N + 1,) int32: cumulative lengths of their keys, including prefixes"""
    max_queries: int
    max_keys: int
    copies: Copies | None
    """None if no prefix is shared or cached"""
    cached: tuple[torch.Tensor, torch.Tensor] | None = None
    """(C,) int64: page slot and offset of each key that is read from the cache"""
    flash: bool = False
    """use flash-attn-4: it is available and the pass is large enough"""

    @classmethod
    def of(cls, plan: PackedPlan, device: torch.device, flash: bool = False) -> VarlenPlan:
        segments = plan.segments
        lengths = np.array([segment.end - segment.start for segment in segments])
        before = np.array([_before(segment) for segment in segments])

        def ends(values: np.ndarray) -> torch.Tensor:
            return torch.tensor([0, *np.cumsum(values)], dtype=torch.int32, device=device)

        totals = lengths + before
        copies = _copies(segments, device) if before.any() else None
        most = int(lengths.max()), int(totals.max())
        use_flash = flash and int(lengths @ totals) >= flash_attention.MIN_SCORES
        return cls(plan, ends(lengths), ends(totals), *most, copies, _cached(segments), use_flash)

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
        # The engine's window includes the token itself, varlen_attn's does not.
        window = (-1, 0) if layer.window is None else (layer.window - 1, 0)
        lengths = (self.queries, self.keys, self.max_queries, self.max_keys)
        kernel = flash_attention.attend if self.flash else _varlen
        return kernel(query, key, value, *lengths, scale=layer.scaling, window_size=window).unsqueeze(0)


def suits(layer: LayerAttention, query: torch.Tensor) -> bool:
    """Whether varlen_attn supports this layer: 16 bits on CUDA, no soft cap, no sinks. The CPU stand-in takes any dtype."""
    in_16_bits = query.dtype in (torch.bfloat16, torch.float16) or query.device.type == "cpu"
    plain = layer.softcap is None and layer.sinks is None
    return in_16_bits and plain and query.shape[-1] <= MAX_DIM and query.shape[-1] % 8 == 0


def _before(segment: Segment) -> int:
    """Number of tokens that a segment sees before its own."""
    if segment.prefix is not None:
        return segment.prefix[1] - segment.prefix[0]
    return 0 if segment.table is None else segment.past


def _cached(segments: Sequence[Segment]) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Page slots and offsets of the cached keys before segments, segment after segment; None without any."""
    pages, offsets = [], []
    for segment in segments:
        if segment.table is not None and segment.past:
            used = segment.table[: pages_for(segment.past)]
            pages.append(used.repeat_interleave(PAGE_TOKENS)[: segment.past])
            offsets.append(torch.arange(segment.past, device=used.device) % PAGE_TOKENS)
    return (torch.cat(pages), torch.cat(offsets)) if pages else None


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
def _has_gqa_flag(varlen_attn: Callable[..., Any]) -> bool:
    """Whether varlen_attn has the argument `enable_gqa` (torch 2.12 and later; earlier ones always allow fewer key heads)."""
    return "enable_gqa" in inspect.signature(varlen_attn).parameters


def _varlen(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *lengths: Any, **options: Any) -> torch.Tensor:
    from torch.nn.attention.varlen import varlen_attn

    if _has_gqa_flag(varlen_attn):
        options["enable_gqa"] = query.shape[1] > key.shape[1]
    attend: Any = varlen_attn
    return attend(query, key, value, *lengths, **options)
