"""Attention over packed, unpadded batches, plugged into transformers' modules through its AttentionInterface.

Every forward pass of the engine sees one row of tokens, (1, T): whole sequences laid end to end (training, prefill), or
one new token per running sequence (decode). The plan of the pass says which; the model's own code does everything else.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional as F
from transformers import AttentionInterface

from tinker_local_backend.engine.kv_cache import KVCache
from tinker_local_backend.errors import RequestError

ATTENTION_NAME = "tinker_local_packed"


@dataclass
class PackedPlan:
    """Sequences end to end: sequence i owns tokens bounds[i]:bounds[i + 1]; its keys go to rows[i] of the cache, if any."""

    bounds: list[int]
    cache: KVCache | None = None
    rows: list[int | None] | None = None


@dataclass
class DecodePlan:
    """One new token for each of the cache's first `rows` rows; row i has `lengths[i]` tokens before it.

    `visible` is (rows, 1, 1, longest + 1) bool, computed once per pass and shared by all layers.
    """

    cache: KVCache
    rows: int
    lengths: torch.Tensor
    longest: int
    visible: torch.Tensor


def packed_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    plan: PackedPlan | DecodePlan | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """query (1, H, T, D), key and value (1, KV, T, D) -> (1, T, H, D). Signature is transformers'; masks are ours, not its."""
    if plan is None:
        raise RequestError("this model was loaded by the engine and runs only through it (no attention plan given)")
    if softcap is not None:
        raise RequestError("attention with logit soft-capping is not supported by the engine yet")
    layer = int(module.layer_idx)  # pyright: ignore[reportArgumentType]
    if isinstance(plan, DecodePlan):
        return _decode(layer, query, key, value, scaling, plan), None
    return _packed(layer, query, key, value, scaling, plan), None


def _packed(
    layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None, plan: PackedPlan
) -> torch.Tensor:
    outputs = []
    for i, (start, end) in enumerate(pairwise(plan.bounds)):
        q, k, v = query[:, :, start:end], key[:, :, start:end], value[:, :, start:end]
        row = plan.rows[i] if plan.rows is not None else None
        if plan.cache is not None and row is not None:
            plan.cache.write_prompt(layer, row, k[0], v[0])
        outputs.append(F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True))
    return torch.cat(outputs, dim=2).transpose(1, 2)


def _decode(
    layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None, plan: DecodePlan
) -> torch.Tensor:
    heads, rows, dim = query.shape[1:]
    kv_heads = key.shape[1]
    keys, values = plan.cache.append(layer, plan.rows, plan.lengths, plan.longest, key[0], value[0])
    # The heads that share a key head become query positions of it, so keys are never repeated in memory.
    grouped = query[0].transpose(0, 1).reshape(rows, kv_heads, heads // kv_heads, dim)
    out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=plan.visible, scale=scaling)
    return out.reshape(1, rows, heads, dim)


AttentionInterface.register(ATTENTION_NAME, packed_attention)
