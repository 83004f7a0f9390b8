"""The operations of the CUDA path in plain torch: slow, short, and correct on any device. ops.py adds their Triton kernels."""

# Not `from __future__ import annotations`: torch reads the annotations.

import torch
from torch import Tensor
from torch.nn import functional as F

from tinker_local_backend.engine.sampling.truncation import sorted_truncated

BLOCK_ROWS = 16
"""Rows of a block of `lora_add`."""


def paged_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    lengths: Tensor,
    scale: float,
    window: int,
    softcap: float,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of one token per row to the pages of its table.

    Args:
        query: (R, H, D), the last dimension contiguous.
        keys, values: (pages, KV, PAGE, D) with H a multiple of KV, the last dimension contiguous.
        tables: (R, P) int32; token t of a row is in page `tables[row, t // PAGE]`.
        lengths: (R,) int32, tokens that the row sees, including the new one; 0: an idle row, whose result is 0.
        window: most tokens that a row sees, counted from its last; 0: all.
        softcap: scores become softcap * tanh(scores / softcap); 0: no cap.
        sinks: (H,), an extra score per query head in the softmax, without a value; None: no sinks.

    Returns:
        (R, H, D) contiguous, in the dtype of `query`; sums are float32.
    """
    rows, heads, dim = query.shape
    kv_heads, page = keys.shape[1], keys.shape[2]
    positions_N = torch.arange(tables.shape[1] * page, device=query.device)
    seen_RN = positions_N < lengths[:, None]
    if window:
        seen_RN &= positions_N >= lengths[:, None] - window
    exact = torch.float64 if query.dtype == torch.float64 else torch.float32

    def gathered(pool: Tensor) -> Tensor:
        """(R, KV, N, D), zero at unseen positions, where the pool may hold NaN."""
        entries = pool[tables.clamp(min=0)].transpose(1, 2).flatten(2, 3).to(exact)
        return torch.where(seen_RN[:, None, :, None], entries, 0.0)

    grouped = query.to(exact).reshape(rows, kv_heads, heads // kv_heads, dim)
    scores = grouped @ gathered(keys).transpose(-1, -2) * scale
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~seen_RN[:, None, None], -torch.inf)
    if sinks is not None:
        sink_scores = sinks.to(exact).view(1, kv_heads, -1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, sink_scores), dim=-1)
    weights = scores.softmax(-1)[..., : len(positions_N)]
    weights = torch.where((lengths > 0)[:, None, None, None], weights, 0.0)
    return (weights @ gathered(values)).reshape(rows, heads, dim).to(query.dtype)


def store_keys(key: Tensor, value: Tensor, keys: Tensor, values: Tensor, tables: Tensor, positions: Tensor) -> None:
    """Store the key and value (R, KV, D) of each row at its position (R,) int32; a negative position marks an idle row.

    keys, values, tables: as in `paged_attention`.
    """
    page = keys.shape[2]
    (rows,) = torch.nonzero(positions >= 0, as_tuple=True)
    at = positions[rows].long()
    slots = tables[rows, at // page].long()
    keys[slots, :, at % page] = key[rows]
    values[slots, :, at % page] = value[rows]


def lora_add(
    y: Tensor, x: Tensor, a: Tensor, b: Tensor, order: Tensor, blocks: Tensor, scales: Tensor, ends: list[int]
) -> None:
    """Add the LoRA deltas of rows with different adapters to the output of a linear, or of P fused linears (parts).

    For part p: y[r] += scales[slot] * b[slot] @ (a_p[slot] @ x[r]) for the rows of each block.

    Args:
        y: (R, out), x: (R, in), rows contiguous.
        a: (slots, P * rank, in), b: (slots, out, rank), contiguous; rank a power of two, at least 16. Part p has the rows
            p * rank to (p + 1) * rank of A.
        order: (R,) int32, rows by block.
        blocks: (blocks, 3) int32: slot, first index into `order`, count (at most 16; 0: the block is idle). A row is in at most
            one block; a row in none is unchanged.
        scales: (slots,) float32.
        ends: columns of y at which each part ends, in order; the last is `out`. At most three.
    """
    rank = b.shape[2]
    for slot, first, count in blocks.tolist():
        if count:
            rows = order[first : first + count].long()
            # Pad to a fixed number of rows, as in the kernel: a library's result for a row may depend on their number.
            inner = F.linear(F.pad(x[rows], (0, 0, 0, BLOCK_ROWS - count)), a[slot]).split(rank, dim=1)
            deltas = [
                F.linear(of_part, b[slot, start:end])
                for of_part, start, end in zip(inner, [0, *ends], ends, strict=False)
            ]
            y[rows] += scales[slot] * torch.cat(deltas, dim=1)[:count]


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, elementwise, for equal shapes and dtypes; rounded after the activation, as in transformers."""
    return F.silu(gate) * up


def swiglu_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients with respect to `gate` and `up`, contiguous."""
    sigmoid = torch.sigmoid(gate)
    return grad * up * sigmoid * (1 + gate * (1 - sigmoid)), grad * gate * sigmoid


def joined_swiglu(gate_up: Tensor) -> Tensor:
    """`swiglu` of the two halves of each row: (T, 2 F) contiguous -> (T, F)."""
    return swiglu(*gate_up.chunk(2, dim=1))


def joined_swiglu_backward(grad: Tensor, gate_up: Tensor) -> Tensor:
    """Gradient (T, 2 F) with respect to `gate_up`."""
    return torch.cat(swiglu_backward(grad, *gate_up.chunk(2, dim=1)), dim=1)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The normalised x times the weight, rounded before the product as in transformers; and the reciprocal of its RMS."""
    exact = x.to(_wide(x))
    scale = torch.rsqrt(exact.square().mean(-1, keepdim=True) + eps)
    return (exact * scale).to(weight.dtype) * weight, scale


def _rms_norm_backward(grad: Tensor, x: Tensor, scale: Tensor, weight: Tensor) -> Tensor:
    """Gradient with respect to x, in float32 or float64."""
    normed = x.to(_wide(x)) * scale
    of_normed = grad.to(_wide(x)) * weight
    return scale * (of_normed - normed * (of_normed * normed).mean(-1, keepdim=True))


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def add_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x + delta, and the RMS norm of that sum times `weight`.

    x: (T, H) contiguous, float32 or the dtype of `weight` (H,); delta: (T, H) contiguous, in the dtype of `weight`. Returns two
    (T, H): the sum in the dtype of x, and its norm in the dtype of `weight`.
    """
    total = x + delta
    return total, _rms_norm(total, weight, eps)[0]


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Only the norm of `add_norm`, without a delta."""
    return _rms_norm(x, weight, eps)[0]


def add_norm_backward(
    grad_total: Tensor, grad_normed: Tensor, total: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Gradients (T, H) with respect to x and delta: the same numbers, in the dtype of each."""
    _, scale = _rms_norm(total, weight, eps)
    grad = (_rms_norm_backward(grad_normed, total, scale, weight) + grad_total).to(total.dtype)
    return grad, grad.to(weight.dtype, copy=True)


def split_heads(
    qkv: Tensor, norm: Tensor | None, cos: Tensor, sin: Tensor, kv_heads: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values from the fused projection; queries and keys normalised and rotated.

    Args:
        qkv: (T, (H + 2 KV) D) contiguous.
        norm: (H + KV, D) weights of the RMS norm of each query and key head; None: no norm.
        cos, sin: (T, D): a head x becomes x * cos + (x rolled by D / 2) * sin.

    Returns:
        (T, H, D), (T, KV, D) and (T, KV, D), contiguous.
    """
    heads = qkv.unflatten(1, (-1, cos.shape[-1]))
    qk, value = heads.split([heads.shape[1] - kv_heads, kv_heads], dim=1)
    if norm is not None:
        qk, _ = _rms_norm(qk, norm, eps)
    exact = qk.to(_wide(qk))
    turned = exact * cos[:, None] + exact.roll(exact.shape[-1] // 2, -1) * sin[:, None]
    query, key = turned.to(qkv.dtype).split([qk.shape[1] - kv_heads, kv_heads], dim=1)
    return query.clone(), key.clone(), value.clone()


def store_heads(
    qkv: Tensor,
    norm: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    kv_heads: int,
    eps: float,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    positions: Tensor,
) -> Tensor:
    """`split_heads`, with keys and values stored as by `store_keys`. Returns the queries (T, H, D)."""
    query, key, value = split_heads(qkv, norm, cos, sin, kv_heads, eps)
    store_keys(key, value, keys, values, tables, positions)
    return query


def split_heads_backward(
    grad_query: Tensor,
    grad_key: Tensor,
    grad_value: Tensor,
    qkv: Tensor,
    norm: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    kv_heads: int,
    eps: float,
) -> Tensor:
    """Gradient (T, (H + 2 KV) D) with respect to `qkv`."""
    turned = torch.cat((grad_query, grad_key), dim=1).to(_wide(qkv))
    grad = turned * cos[:, None] + (turned * sin[:, None]).roll(turned.shape[-1] // 2, -1)
    if norm is not None:
        qk = qkv.unflatten(1, (-1, cos.shape[-1]))[:, : grad.shape[1]]
        grad = _rms_norm_backward(grad, qk, _rms_norm(qk, norm, eps)[1], norm)
    return torch.cat((grad.to(qkv.dtype), grad_value), dim=1).flatten(1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, backward: bool) -> Tensor:
    """Rotary positions: x * cos + rotate_half(x) * sin; with `backward` the transposed rotation.

    x (T, H, D) with any strides, cos and sin (T, D), D even -> (T, H, D) contiguous.
    """
    cos, sin = cos[:, None], sin[:, None]
    half = x.shape[-1] // 2

    def rotate_half(t: Tensor) -> Tensor:
        return torch.cat((-t[..., half:], t[..., :half]), dim=-1)

    if backward:
        return (x * cos - rotate_half(x * sin)).contiguous()
    return (x * cos + rotate_half(x) * sin).contiguous()


def truncate(probs: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """truncation.truncated without synchronisation. Rows of `probs` (R, V) float32 contiguous; the limits (R,) contiguous."""
    return sorted_truncated(probs, top_k, top_p, min_p)
