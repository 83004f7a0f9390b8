"""Attention of a training pass and its gradient: each run of a PackedPlan by torch's fused kernel for CPUs.

The same numbers as attention.py gives, without a graph: a run costs autograd some ten nodes, which on short sequences take
longer than the attention itself. For layers without soft caps.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tinker_local_backend.engine.attention import PackedPlan, Run
from tinker_local_backend.engine.decode_attention import LayerAttention

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def attend(
    layer: LayerAttention, query_THD: torch.Tensor, key_TKD: torch.Tensor, value_TKD: torch.Tensor, plan: PackedPlan
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Attended values (T, H, D), and of each run what its gradient needs beside them."""
    outputs, sums = [], []
    heads = query_THD.shape[1]
    for run in plan.runs:
        query = _by_head(_own(query_THD, run), run)
        key, value = (_by_head(_seen(tensor, run, heads), run) for tensor in (key_TKD, value_TKD))
        bias = _bias(layer, run, plan, query)
        output, log_sum = _forward(query, key, value, 0.0, bias is None, attn_mask=bias, scale=layer.scaling)
        outputs.append(_by_token(output))
        sums.append(log_sum)
    return _joined(outputs), sums


def gradient(
    layer: LayerAttention,
    by_attended_THD: torch.Tensor,
    query_THD: torch.Tensor,
    key_TKD: torch.Tensor,
    value_TKD: torch.Tensor,
    attended_THD: torch.Tensor,
    sums: Sequence[torch.Tensor],
    plan: PackedPlan,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dL/d query, key and value, from dL/d attended and what `attend` took and gave."""
    heads, kv_heads = query_THD.shape[1], key_TKD.shape[1]
    by_query, by_key, by_value = [], [], []
    places = {run.first.start: i for i, run in enumerate(plan.runs)}
    for run, log_sum in zip(plan.runs, sums, strict=True):
        query, attended, by_attended = (
            _by_head(_own(tensor, run), run) for tensor in (query_THD, attended_THD, by_attended_THD)
        )
        key, value = (_by_head(_seen(tensor, run, heads), run) for tensor in (key_TKD, value_TKD))
        bias = _bias(layer, run, plan, query)
        parts = _backward(
            by_attended, query, key, value, attended, log_sum, 0.0, bias is None, attn_mask=bias, scale=layer.scaling
        )
        by_query.append(_by_token(parts[0]))
        for found, gathered in zip(parts[1:], (by_key, by_value), strict=True):
            by_seen = _by_token(found)
            if heads != kv_heads:
                by_seen = by_seen.unflatten(1, (kv_heads, -1)).sum(dim=2)
            if run.first.prefix is not None:
                # The prefix is a run of its own, which came earlier.
                gathered[places[run.first.prefix[0]]] += by_seen[: run.first.before]
                by_seen = by_seen[run.first.before :]
            gathered.append(by_seen)
    return _joined(by_query), _joined(by_key), _joined(by_value)


def _own(tensor_THD: torch.Tensor, run: Run) -> torch.Tensor:
    """The rows of a run."""
    return tensor_THD[run.first.start : run.first.start + run.tokens]


def _seen(tensor_TKD: torch.Tensor, run: Run, heads: int) -> torch.Tensor:
    """Keys or values of a run and of the prefix before it, those of a key head for each of the query heads that share it."""
    tensor = _own(tensor_TKD, run)
    if run.first.prefix is not None:
        tensor = torch.cat((tensor_TKD[slice(*run.first.prefix)], tensor))
    kv_heads = tensor.shape[1]
    if kv_heads == heads:
        return tensor
    return tensor.unsqueeze(2).expand(-1, -1, heads // kv_heads, -1).flatten(1, 2)


def _by_head(tensor: torch.Tensor, run: Run) -> torch.Tensor:
    """(count * S, H, D) -> (count, H, S, D)"""
    return tensor.unflatten(0, (run.count, -1)).transpose(1, 2)


def _by_token(tensor: torch.Tensor) -> torch.Tensor:
    """The reverse."""
    return tensor.transpose(1, 2).flatten(0, 1)


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _bias(layer: LayerAttention, run: Run, plan: PackedPlan, query: torch.Tensor) -> torch.Tensor | None:
    """What is added to the scores of a run; None where it is that of causal attention to itself."""
    before, length = run.first.before, run.length
    if before == 0 and (layer.window is None or length <= layer.window):
        return None
    return plan.bias(before, length, layer.window, query)
