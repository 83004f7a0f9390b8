"""Attention of a training pass and its gradient: short sequences by products, others by torch's fused kernel for CPUs.

The same numbers as attention.py gives, without a graph: a run costs autograd some ten nodes, which on short sequences take
longer than the attention itself. For layers without soft caps.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

from tinker_local_backend.engine.attention import PackedPlan, Run
from tinker_local_backend.engine.decode_attention import LayerAttention

SHORT = 64
"""Tokens of a sequence up to which the probabilities of attention are kept, as many numbers per token and head: products of
whole heads are then faster than the fused kernel, which works in small blocks and computes them a second time."""

LEAST_HALVED = 32
"""Tokens from which on, up to SHORT, a sequence is taken in two halves: a quarter of the scores is then never computed."""

_softmax_backward = torch._softmax_backward_data  # pyright: ignore[reportAttributeAccessIssue, reportPrivateImportUsage]
_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default

_Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Queries (T, H, D), keys and values (T, KV, D)"""


def attend(layer: LayerAttention, tensors: _Tensors, plan: PackedPlan) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Attended values (T, H, D), and of each run what its gradient needs beside them."""
    attended_THD, kept = tensors[0].new_empty(tensors[0].shape), []
    for run in plan.runs:
        into = _by_sequence(attended_THD, run, tensors[1].shape[1])
        kept += (
            _attend_short(layer, run, tensors, into)
            if _is_short(layer, run)
            else _attend(layer, run, tensors, plan, into)
        )
    return attended_THD, kept


def gradient(
    layer: LayerAttention,
    by_attended_THD: torch.Tensor,
    tensors: _Tensors,
    attended_THD: torch.Tensor,
    kept: Sequence[torch.Tensor],
    plan: PackedPlan,
    into: _Tensors,
) -> None:
    """Puts dL/d query, key and value into `into`, from dL/d attended and what `attend` took and gave."""
    left = iter(kept)
    kv_heads = tensors[1].shape[1]
    for run in plan.runs:
        if _is_short(layer, run):
            own = [next(left) for _ in range(3 + len(_stretches(run)))]
            _gradient_short(layer, run, by_attended_THD, own, [_by_sequence(whole, run, kv_heads) for whole in into])
            continue
        parts = _gradient(layer, run, tensors, by_attended_THD, attended_THD, next(left), plan)
        if run.first.prefix is not None:
            # The prefix is a run of its own, which came earlier; this one is a single sequence.
            before = run.first.before
            for by_seen, whole in zip(parts[1:], into[1:], strict=True):
                whole[slice(*run.first.prefix)] += by_seen[0, :before].flatten(1, 2)
            parts = parts[0], *(by_seen[:, before:] for by_seen in parts[1:])
        for part, whole in zip(parts, into, strict=True):
            _by_sequence(whole, run, kv_heads).copy_(part)


def _attend(
    layer: LayerAttention, run: Run, tensors: _Tensors, plan: PackedPlan, into: torch.Tensor
) -> list[torch.Tensor]:
    query, key, value = _of_kernel(tensors, run)
    bias = _bias(layer, run, plan, query)
    output, log_sums = _forward(query, key, value, 0.0, bias is None, attn_mask=bias, scale=layer.scaling)
    into.copy_(_of_sequences(output, tensors[1].shape[1]))
    return [log_sums]


def _gradient(
    layer: LayerAttention,
    run: Run,
    tensors: _Tensors,
    by_attended_THD: torch.Tensor,
    attended_THD: torch.Tensor,
    log_sums: torch.Tensor,
    plan: PackedPlan,
) -> _Tensors:
    """By the queries of the run, and by the keys and values that they see: (count, S, KV, G, D)."""
    query, key, value = _of_kernel(tensors, run)
    attended, by_attended = (_by_head(_own(tensor, run), run) for tensor in (attended_THD, by_attended_THD))
    bias = _bias(layer, run, plan, query)
    parts = _backward(
        by_attended, query, key, value, attended, log_sums, 0.0, bias is None, attn_mask=bias, scale=layer.scaling
    )
    by_query, by_key, by_value = (_of_sequences(part, tensors[1].shape[1]) for part in parts)
    if by_query.shape[3] > 1:
        by_key, by_value = (part.sum(dim=3, keepdim=True) for part in (by_key, by_value))
    return by_query, by_key, by_value


def _is_short(layer: LayerAttention, run: Run) -> bool:
    """Whether a run's probabilities are kept."""
    return run.length <= SHORT and _is_plain(layer, run)


def _stretches(run: Run) -> list[slice]:
    """The tokens of a sequence in two halves, of which the first sees no key of the second."""
    half = run.length // 2
    return [slice(0, run.length)] if run.length < LEAST_HALVED else [slice(0, half), slice(half, run.length)]


def _attend_short(layer: LayerAttention, run: Run, tensors: _Tensors, into: torch.Tensor) -> list[torch.Tensor]:
    """Keeps query, key, value, and the probabilities of each stretch."""
    query, key, value = (_grouped(tensor, run, tensors[1].shape[1]) for tensor in tensors)
    repeat = query.shape[1] // run.length
    bias, kept = _short_bias(repeat, query.dtype), [query, key, value]
    for own in _stretches(run):
        rows, seen = slice(own.start * repeat, own.stop * repeat), slice(0, own.stop)
        scores = torch.baddbmm(bias[rows, seen], query[:, rows], key[:, seen].transpose(1, 2), alpha=layer.scaling)
        probabilities = scores.softmax(dim=-1)
        kept.append(probabilities)
        into[:, own].copy_(_ungrouped(torch.bmm(probabilities, value[:, seen]), run, repeat))
    return kept


def _gradient_short(
    layer: LayerAttention,
    run: Run,
    by_attended_THD: torch.Tensor,
    kept: Sequence[torch.Tensor],
    into: Sequence[torch.Tensor],
) -> None:
    """Into (count, S, KV, G, D) of query, key and value, from what `_attend_short` kept."""
    query, key, value, *of_stretches = kept
    repeat, scale = query.shape[1] // run.length, layer.scaling
    by_attended = _grouped(by_attended_THD, run, into[1].shape[2])
    by_key = by_value = None
    # From behind: the last stretch sees all keys.
    for own, probabilities in zip(reversed(_stretches(run)), reversed(of_stretches), strict=True):
        rows, seen = slice(own.start * repeat, own.stop * repeat), slice(0, own.stop)
        by_own = by_attended[:, rows]
        by_probabilities = torch.bmm(by_own, value[:, seen].transpose(1, 2))
        by_scores = _softmax_backward(by_probabilities, probabilities, -1, probabilities.dtype)
        by_query = torch.baddbmm(query[:, rows], by_scores, key[:, seen], beta=0, alpha=scale)
        into[0][:, own].copy_(_ungrouped(by_query, run, repeat))
        if by_key is None or by_value is None:
            by_value = torch.bmm(probabilities.transpose(1, 2), by_own)
            by_key = torch.baddbmm(key, by_scores.transpose(1, 2), query[:, rows], beta=0, alpha=scale)
        else:
            by_value[:, seen].baddbmm_(probabilities.transpose(1, 2), by_own)
            by_key[:, seen].baddbmm_(by_scores.transpose(1, 2), query[:, rows], alpha=scale)
    for part, whole in zip((by_key, by_value), into[1:], strict=True):
        assert part is not None
        whole.copy_(_ungrouped(part, run, 1))


@lru_cache(maxsize=8)
def _short_bias(repeat: int, dtype: torch.dtype) -> torch.Tensor:
    """Of causal attention, (SHORT * repeat, SHORT): each query as often as there are heads that share a key head.

    That of a shorter sequence is its corner.
    """
    return PackedPlan([]).bias(0, SHORT, None, torch.empty(0, dtype=dtype, device="cpu"), repeat)


def _grouped(tensor_THD: torch.Tensor, run: Run, kv_heads: int) -> torch.Tensor:
    """(count * S, KV * G, D) -> (count * KV, S * G, D): the query heads that share a key head are more queries of it."""
    grouped = _by_sequence(tensor_THD, run, kv_heads).transpose(1, 2)
    return grouped.reshape(run.count * kv_heads, -1, tensor_THD.shape[2])


def _ungrouped(tensor: torch.Tensor, run: Run, repeat: int) -> torch.Tensor:
    """(count * KV, S * repeat, D) -> (count, S, KV, repeat, D)"""
    return tensor.view(run.count, -1, tensor.shape[1] // repeat, repeat, tensor.shape[2]).transpose(1, 2)


def _own(tensor_THD: torch.Tensor, run: Run) -> torch.Tensor:
    """The rows of a run."""
    return tensor_THD[run.first.start : run.first.start + run.tokens]


def _by_sequence(tensor_THD: torch.Tensor, run: Run, kv_heads: int) -> torch.Tensor:
    """The rows of a run, as (count, S, KV, G, D)."""
    _, heads, size = tensor_THD.shape
    return _own(tensor_THD, run).view(run.count, run.length, kv_heads, heads // kv_heads, size)


def _seen(tensor_TKD: torch.Tensor, run: Run, heads: int) -> torch.Tensor:
    """Keys or values of a run and of the prefix before it, those of a key head for each of the query heads that share it."""
    tensor = _own(tensor_TKD, run)
    if run.first.prefix is not None:
        tensor = torch.cat((tensor_TKD[slice(*run.first.prefix)], tensor))
    kv_heads = tensor.shape[1]
    if kv_heads == heads:
        return tensor
    return tensor.unsqueeze(2).expand(-1, -1, heads // kv_heads, -1).flatten(1, 2)


def _of_kernel(tensors: _Tensors, run: Run) -> _Tensors:
    """Queries of a run, keys and values that they see, as the kernel takes them: (count, H, S, D)."""
    query, heads = _own(tensors[0], run), tensors[0].shape[1]
    return (
        _by_head(query, run),
        _by_head(_seen(tensors[1], run, heads), run),
        _by_head(_seen(tensors[2], run, heads), run),
    )


def _by_head(tensor: torch.Tensor, run: Run) -> torch.Tensor:
    """(count * S, H, D) -> (count, H, S, D)"""
    return tensor.view(run.count, -1, *tensor.shape[1:]).transpose(1, 2)


def _of_sequences(tensor: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """(count, H, S, D) -> (count, S, KV, G, D)"""
    count, heads, length, size = tensor.shape
    return tensor.transpose(1, 2).view(count, length, kv_heads, heads // kv_heads, size)


def _is_plain(layer: LayerAttention, run: Run) -> bool:
    """Whether the run's tokens see all of their sequence that is not behind them, and nothing else."""
    return run.first.before == 0 and (layer.window is None or run.length <= layer.window)


def _bias(layer: LayerAttention, run: Run, plan: PackedPlan, query: torch.Tensor) -> torch.Tensor | None:
    """What is added to the scores of a run; None where it is that of causal attention to itself."""
    return None if _is_plain(layer, run) else plan.bias(run.first.before, run.length, layer.window, query)
