"""Attention over packed, unpadded batches, plugged into transformers' modules through its AttentionInterface.

Every forward pass of the engine sees one row of tokens, (1, T): stretches of sequences laid end to end (training, prefill),
or one new token per running sequence (decode). The plan of the pass says which; the model's own code does everything else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

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
        return cls([Segment(end - length, end) for length, end in zip(lengths, accumulate(lengths), strict=True)])


@dataclass
class DecodePlan:
    """One new token for each of the cache's first `rows` rows; row i has `lengths[i]` tokens before it."""

    cache: KVCache
    rows: int
    lengths: torch.Tensor
    longest: int
    _masks: dict[tuple[int | None, torch.dtype], torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.index = torch.arange(self.rows, device=self.lengths.device)

    def mask(self, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """Which keys each new token sees, (rows, 1, 1, longest + 1), shared by all layers.

        True where visible, or (another dtype than bool) what is added to the scores: 0 where visible, -inf elsewhere.
        """
        if (window, dtype) not in self._masks:
            positions = torch.arange(self.longest + 1, device=self.lengths.device)[None, :]
            mask = positions <= self.lengths[:, None]
            if window is not None:
                mask &= positions > self.lengths[:, None] - window
            if dtype != torch.bool:
                mask = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -torch.inf)
            self._masks[window, dtype] = mask[:, None, None, :]
        return self._masks[window, dtype]


@dataclass(frozen=True)
class _Layer:
    """What a layer says of its own attention."""

    index: int
    scaling: float
    softcap: float | None
    window: int | None


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
    scale = float(query.shape[-1] ** -0.5 if scaling is None else scaling)
    layer = _Layer(int(module.layer_idx), scale, softcap, sliding_window)  # pyright: ignore[reportArgumentType]
    attend = _decode if isinstance(plan, DecodePlan) else _packed
    return attend(layer, query, key, value, plan), None  # pyright: ignore[reportArgumentType]


def _packed(
    layer: _Layer, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, plan: PackedPlan
) -> torch.Tensor:
    plan.windows[layer.index] = layer.window
    outputs = []
    # Split, not sliced: the backward pass of a slice fills a whole tensor with zeros, once per segment.
    parts = [tensor.split([s.end - s.start for s in plan.segments], dim=2) for tensor in (query, key, value)]
    index = {segment.start: i for i, segment in enumerate(plan.segments)}
    for segment, q, k, v in zip(plan.segments, *parts, strict=True):
        if plan.cache is not None and segment.row is not None:
            plan.cache.write(layer.index, segment.row, segment.before, k[0], v[0])
            if segment.before and segment.prefix is None:
                k, v = plan.cache.read(layer.index, segment.row, segment.before + k.shape[2])
        if segment.prefix is not None:
            before = index[segment.prefix[0]]
            k, v = torch.cat([parts[1][before], k], dim=2), torch.cat([parts[2][before], v], dim=2)
        outputs.append(_causal(layer, q, k, v, plan))
    return torch.cat(outputs, dim=2).transpose(1, 2)


def _causal(layer: _Layer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: PackedPlan) -> torch.Tensor:
    """Causal attention of the last q.shape[2] positions of a sequence to all of it."""
    queries, total = q.shape[2], k.shape[2]
    if layer.softcap is None and queries == total and (layer.window is None or total <= layer.window):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=layer.scaling, enable_gqa=True)
    visible = plan.visible(total - queries, queries, layer.window, q.device)
    if layer.softcap is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=layer.scaling, enable_gqa=True)
    outputs = []
    # The heads that share a key head become a dimension of their own.
    grouped = q.unflatten(1, (k.shape[1], -1)).split(SOFTCAP_QUERIES, dim=3)
    for part, rows in zip(grouped, visible.split(SOFTCAP_QUERIES), strict=True):
        arguments = (layer, part, k.unsqueeze(2), v.unsqueeze(2), rows)
        if torch.is_grad_enabled():  # scores that were kept for the backward pass would grow with the length's square
            outputs.append(checkpoint(_soft_capped, *arguments, use_reentrant=False, preserve_rng_state=False))
        else:
            outputs.append(_soft_capped(*arguments))
    return torch.cat(outputs, dim=3).flatten(1, 2)


def _soft_capped(
    layer: _Layer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor
) -> torch.Tensor:
    """softmax(softcap * tanh(scores / softcap)) @ v, as Gemma 2 has it; q (..., S, D), k and v (..., T, D)."""
    assert layer.softcap is not None
    scores = torch.tanh(q @ k.transpose(-1, -2) * (layer.scaling / layer.softcap)) * layer.softcap
    return scores.masked_fill(~visible, -torch.inf).softmax(dim=-1, dtype=torch.float32).to(q.dtype) @ v


def _decode(
    layer: _Layer, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, plan: DecodePlan
) -> torch.Tensor:
    heads, rows, dim = query.shape[1:]
    keys, values = plan.cache.append(layer.index, plan.index, plan.lengths, plan.longest, key[0], value[0])
    # The heads that share a key head become query positions of it, so keys are never repeated in memory.
    grouped = query[0].transpose(0, 1).reshape(rows, key.shape[1], -1, dim)
    if layer.softcap is None:
        mask = plan.mask(layer.window, query.dtype)
        out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=layer.scaling)
    else:
        out = _soft_capped(layer, grouped, keys, values, plan.mask(layer.window, torch.bool))
    return out.reshape(1, rows, heads, dim)


AttentionInterface.register(ATTENTION_NAME, packed_attention)
