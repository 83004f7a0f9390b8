"""The operations of ops.py in plain torch: slow, short, and correct on any device."""

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
    page = keys.shape[2]
    (rows,) = torch.nonzero(positions >= 0, as_tuple=True)
    at = positions[rows].long()
    slots = tables[rows, at // page].long()
    keys[slots, :, at % page] = key[rows]
    values[slots, :, at % page] = value[rows]


def lora_add(y: Tensor, x: Tensor, a: Tensor, b: Tensor, order: Tensor, blocks: Tensor, scales: Tensor) -> None:
    for slot, first, count in blocks.tolist():
        if count:
            rows = order[first : first + count].long()
            y[rows] += scales[slot] * F.linear(F.linear(x[rows], a[slot]), b[slot])


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def swiglu_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    sigmoid = torch.sigmoid(gate)
    return grad * up * sigmoid * (1 + gate * (1 - sigmoid)), grad * gate * sigmoid


def rotate(x: Tensor, cos: Tensor, sin: Tensor, backward: bool) -> Tensor:
    cos, sin = cos[:, None], sin[:, None]
    half = x.shape[-1] // 2

    def rotate_half(t: Tensor) -> Tensor:
        return torch.cat((-t[..., half:], t[..., :half]), dim=-1)

    if backward:
        return (x * cos - rotate_half(x * sin)).contiguous()
    return (x * cos + rotate_half(x) * sin).contiguous()
