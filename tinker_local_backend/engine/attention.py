"""Attention over packed, unpadded batches, plugged into transformers' modules through its AttentionInterface.

Every forward pass of the engine sees one row of tokens, (1, T): stretches of sequences laid end to end (training, prefill),
or one new token per running sequence (decode). The plan of the pass says which; the model's own code does everything else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface

from tinker_local_backend.engine.kv_cache import KVCache
from tinker_local_backend.errors import RequestError

ATTENTION_NAME = "tinker_local_packed"

SOFTCAP_QUERIES = 256
"""Queries at a time where logits are soft-capped: no fused kernel does that, so the scores exist as a matrix."""


@dataclass(frozen=True)
class Segment:
    """Tokens start:end of the pass: a stretch of one sequence that attends to itself and to what comes before it.

    `before` tokens precede it: at `prefix`, start:end of an earlier segment of the same pass (which several may share), or
    else in `row` of the KV cache. With a row, the segment's own keys are stored there, behind those.
    """

    start: int
    end: int
    before: int = 0
    prefix: tuple[int, int] | None = None
    row: int | None = None


@dataclass
class PackedPlan:
    """Segments that cover the tokens of the pass, in order."""

    segments: Sequence[Segment]
    cache: KVCache | None = None
    windows: dict[int, int | None] = field(default_factory=dict)
    """filled by the pass: each layer's sliding window, as the attention function was told"""
    _masks: dict[tuple[int, int, int | None], torch.Tensor] = field(default_factory=dict)

    def visible(self, before: int, queries: int, window: int | None, device: torch.device) -> torch.Tensor:
        """Bool (queries, before + queries): which keys the queries behind `before` tokens see. Shared by all layers."""
        key = (before, queries, window)
        if key not in self._masks:
            own = torch.arange(before, before + queries, device=device)[:, None]
            keys = torch.arange(before + queries, device=device)[None, :]
            mask = keys <= own
            self._masks[key] = mask if window is None else mask & (keys > own - window)
        return self._masks[key]

    @classmethod
    def whole(cls, lengths: Sequence[int]) -> PackedPlan:
        """Whole sequences of these lengths, end to end."""
        segments, start = [], 0
        for length in lengths:
            segments.append(Segment(start, start + length))
            start += length
        return cls(segments)


@dataclass
class DecodePlan:
    """One new token for each of the cache's first `rows` rows; row i has `lengths[i]` tokens before it."""

    cache: KVCache
    rows: int
    lengths: torch.Tensor
    longest: int
    _masks: dict[int | None, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.index = torch.arange(self.rows, device=self.lengths.device)

    def mask(self, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """What is added to the scores, (rows, 1, 1, longest + 1): 0 where visible, -inf elsewhere. Shared by all layers."""
        if window not in self._masks:
            positions = torch.arange(self.longest + 1, device=self.lengths.device)[None, :]
            visible = positions <= self.lengths[:, None]
            if window is not None:
                visible &= positions > self.lengths[:, None] - window
            mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, -torch.inf)
            self._masks[window] = mask[:, None, None, :]
        return self._masks[window]


def packed_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    plan: PackedPlan | DecodePlan | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """query (1, H, T, D), key and value (1, KV, T, D) -> (1, T, H, D). Signature is transformers'; masks are ours, not its."""
    if plan is None:
        raise RequestError("this model was loaded by the engine and runs only through it (no attention plan given)")
    layer = int(module.layer_idx)  # pyright: ignore[reportArgumentType]
    scale = float(query.shape[-1] ** -0.5 if scaling is None else scaling)
    if isinstance(plan, DecodePlan):
        return _decode(layer, query, key, value, scale, softcap, sliding_window, plan), None
    return _packed(layer, query, key, value, scale, softcap, sliding_window, plan), None


def _packed(
    layer: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float,
    softcap: float | None,
    window: int | None,
    plan: PackedPlan,
) -> torch.Tensor:
    plan.windows[layer] = window
    outputs = []
    # Split, not sliced: the backward pass of a slice fills a whole tensor with zeros, once per segment.
    parts = [tensor.split([s.end - s.start for s in plan.segments], dim=2) for tensor in (query, key, value)]
    index = {segment.start: i for i, segment in enumerate(plan.segments)}
    for segment, q, k, v in zip(plan.segments, *parts, strict=True):
        if plan.cache is not None and segment.row is not None:
            plan.cache.write(layer, segment.row, segment.before, k[0], v[0])
            if segment.before and segment.prefix is None:
                k, v = plan.cache.read(layer, segment.row, segment.before + k.shape[2])
        if segment.prefix is not None:
            before = index[segment.prefix[0]]
            k, v = torch.cat([parts[1][before], k], dim=2), torch.cat([parts[2][before], v], dim=2)
        outputs.append(_attend(q, k, v, scaling, softcap, window, plan))
    return torch.cat(outputs, dim=2).transpose(1, 2)


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scaling: float,
    softcap: float | None,
    window: int | None,
    plan: PackedPlan,
) -> torch.Tensor:
    """Causal attention of the last q.shape[2] positions of a sequence to all of it."""
    queries, total = q.shape[2], k.shape[2]
    if softcap is None and queries == total and (window is None or total <= window):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True)
    visible = plan.visible(total - queries, queries, window, q.device)
    if softcap is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=scaling, enable_gqa=True)
    parts = zip(q.split(SOFTCAP_QUERIES, dim=2), visible.split(SOFTCAP_QUERIES), strict=True)
    outputs = [_soft_capped_chunk(part, k, v, rows, scaling, softcap) for part, rows in parts]
    return torch.cat(outputs, dim=2)


def _soft_capped_chunk(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor, scaling: float, softcap: float
) -> torch.Tensor:
    """In training the scores are computed again in the backward pass: kept, they would grow with the square of the length."""
    if not torch.is_grad_enabled():
        return _soft_capped(q, k, v, visible, scaling, softcap)
    arguments = (q, k, v, visible, scaling, softcap)
    result = checkpoint(_soft_capped, *arguments, use_reentrant=False, preserve_rng_state=False)
    assert isinstance(result, torch.Tensor)
    return result


def _soft_capped(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor, scaling: float, softcap: float
) -> torch.Tensor:
    """softmax(softcap * tanh(scores / softcap)) @ v, as Gemma 2 has it; q (1, H, S, D), k and v (1, KV, T, D)."""
    heads, kv_heads = q.shape[1], k.shape[1]
    grouped = q.unflatten(1, (kv_heads, heads // kv_heads))
    scores = torch.tanh(grouped @ k.unsqueeze(2).transpose(-1, -2) * (scaling / softcap)) * softcap
    weights = scores.masked_fill(~visible, -torch.inf).softmax(dim=-1, dtype=torch.float32).to(q.dtype)
    return (weights @ v.unsqueeze(2)).flatten(1, 2)


def _decode(
    layer: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float,
    softcap: float | None,
    window: int | None,
    plan: DecodePlan,
) -> torch.Tensor:
    heads, rows, dim = query.shape[1:]
    kv_heads = key.shape[1]
    keys, values = plan.cache.append(layer, plan.index, plan.lengths, plan.longest, key[0], value[0])
    # The heads that share a key head become query positions of it, so keys are never repeated in memory.
    grouped = query[0].transpose(0, 1).reshape(rows, kv_heads, heads // kv_heads, dim)
    mask = plan.mask(window, query.dtype)
    if softcap is None:
        out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=scaling)
    else:
        scores = torch.tanh(grouped @ keys.transpose(-1, -2) * (scaling / softcap)) * softcap
        out = (scores + mask).softmax(dim=-1, dtype=torch.float32).to(query.dtype) @ values
    return out.reshape(1, rows, heads, dim)


AttentionInterface.register(ATTENTION_NAME, packed_attention)
