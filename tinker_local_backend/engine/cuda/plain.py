"""The operations of the CUDA path in plain torch: slow, short, and correct on any device. ops.py adds their Triton kernels."""

# Not `from __future__ import annotations`: torch reads the annotations.

import torch
from torch import Tensor
from torch.nn import functional as F


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
        lengths: (R,) int32, tokens that the row sees, the new one included; 0: an idle row, whose result is 0.
        window: tokens that a row sees at most, counted from its last; 0: all.
        softcap: scores become softcap * tanh(scores / softcap); 0: no cap.
        sinks: (H,), a score per query head that joins the softmax but has no value; None: no sinks.

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
        """(R, KV, N, D), zero at unseen positions, where the pool may hold anything, even NaN."""
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


def lora_add(y: Tensor, x: Tensor, a: Tensor, b: Tensor, order: Tensor, blocks: Tensor, scales: Tensor) -> None:
    """y[r] += scales[slot] * b[slot] @ (a[slot] @ x[r]) for the rows of each block.

    Args:
        y: (R, out), x: (R, in), rows contiguous.
        a: (slots, rank, in), b: (slots, out, rank), contiguous; rank a power of two, at least 16.
        order: (R,) int32, rows by block.
        blocks: (blocks, 3) int32: slot, first index into `order`, count (at most 16; 0: the block is idle). A row is in at most
            one block; a row in none is unchanged.
        scales: (slots,) float32.
    """
    for slot, first, count in blocks.tolist():
        if count:
            rows = order[first : first + count].long()
            y[rows] += scales[slot] * F.linear(F.linear(x[rows], a[slot]), b[slot])


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, elementwise, of one shape and dtype; rounded after the activation, as in transformers."""
    return F.silu(gate) * up


def swiglu_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients with respect to `gate` and `up`, contiguous."""
    sigmoid = torch.sigmoid(gate)
    return grad * up * sigmoid * (1 + gate * (1 - sigmoid)), grad * gate * sigmoid


def rotate(x: Tensor, cos: Tensor, sin: Tensor, backward: bool) -> Tensor:
    """Rotary positions: x * cos + rotate_half(x) * sin; with `backward` the transposed map.

    x (T, H, D) with any strides, cos and sin (T, D), D even -> (T, H, D) contiguous.
    """
    cos, sin = cos[:, None], sin[:, None]
    half = x.shape[-1] // 2

    def rotate_half(t: Tensor) -> Tensor:
        return torch.cat((-t[..., half:], t[..., :half]), dim=-1)

    if backward:
        return (x * cos - rotate_half(x * sin)).contiguous()
    return (x * cos + rotate_half(x) * sin).contiguous()
