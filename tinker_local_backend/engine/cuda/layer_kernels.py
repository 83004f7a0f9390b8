"""Triton kernels between the projections of a joined decoder layer, forward and backward: residual sums with their RMS norm, and
queries, keys and values with their norms and rotary positions.

Norm weights are frozen and get no gradients.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_HEADS = 8
"""Heads of one token per program of `split_heads`."""


@triton.jit
def _add_norm_kernel(x, delta, weight, total, normed, width, eps, ADD: tl.constexpr, BLOCK: tl.constexpr):
    """One row: the rounded sum and its norm, rounded before the product with the weight; or the norm only."""
    row = tl.program_id(0).to(tl.int64) * width
    at = tl.arange(0, BLOCK)
    inside = at < width
    value = tl.load(x + row + at, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(weight + at, mask=inside, other=0.0)
    if ADD:
        of_delta = tl.load(delta + row + at, mask=inside, other=0.0).to(tl.float32)
        rounded = (value + of_delta).to(total.dtype.element_ty)
        tl.store(total + row + at, rounded, mask=inside)
        value = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 0) / width + eps)
    tl.store(normed + row + at, (value * scale).to(w.dtype) * w, mask=inside)


@triton.jit
def _add_norm_backward_kernel(
    grad_total, grad_normed, total, weight, grad_x, grad_delta, width, eps, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * width
    at = tl.arange(0, BLOCK)
    inside = at < width
    value = tl.load(total + row + at, mask=inside, other=0.0).to(tl.float32)
    of_total = tl.load(grad_total + row + at, mask=inside, other=0.0).to(tl.float32)
    of_normed = tl.load(grad_normed + row + at, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 0) / width + eps)
    unit, through = value * scale, of_normed * w
    result = scale * (through - unit * (tl.sum(through * unit, 0) / width)) + of_total
    tl.store(grad_x + row + at, result.to(grad_x.dtype.element_ty), mask=inside)
    tl.store(grad_delta + row + at, result.to(grad_delta.dtype.element_ty), mask=inside)


def _warps(width: int) -> int:
    return min(16, max(1, width // 512))


def add_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See plain.add_norm."""
    rows, width = x.shape
    x, delta = x.contiguous(), delta.contiguous()
    total, normed = torch.empty_like(x), torch.empty_like(delta)
    block = triton.next_power_of_2(width)
    _add_norm_kernel[(rows,)](
        x, delta, weight, total, normed, width, eps, ADD=True, BLOCK=block, num_warps=_warps(block)
    )
    return total, normed


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See plain.norm."""
    x = x.contiguous()
    rows, width = x.shape
    normed, block = torch.empty(x.shape, dtype=weight.dtype, device=x.device), triton.next_power_of_2(width)
    _add_norm_kernel[(rows,)](x, x, weight, x, normed, width, eps, ADD=False, BLOCK=block, num_warps=_warps(block))
    return normed


def add_norm_backward(
    grad_total: Tensor, grad_normed: Tensor, total: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """See plain.add_norm_backward."""
    rows, width = total.shape
    grad_x, grad_delta = torch.empty_like(grad_total), torch.empty_like(grad_normed)
    block = triton.next_power_of_2(width)
    _add_norm_backward_kernel[(rows,)](
        grad_total, grad_normed, total, weight, grad_x, grad_delta, width, eps, BLOCK=block, num_warps=_warps(block)
    )
    return grad_x, grad_delta


@triton.jit
def _heads_at(qkv, token, heads, i, ALL: tl.constexpr, D: tl.constexpr):
    """Both halves (heads, half) of some heads of a token, in float32."""
    there = (heads < ALL)[:, None] & (i < D // 2)[None, :]
    at = qkv + token * ALL * D + heads[:, None] * D + i[None, :]
    first = tl.load(at, mask=there, other=0.0).to(tl.float32)
    return first, tl.load(at + D // 2, mask=there, other=0.0).to(tl.float32)


@triton.jit
def _rotary_at(table, token, i, D: tl.constexpr):
    """Both halves of a row of cos or sin, each (1, half)."""
    inside = i < D // 2
    first = tl.load(table + token * D + i, mask=inside, other=0.0).to(tl.float32)
    return first[None, :], tl.load(table + token * D + D // 2 + i, mask=inside, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _split_heads_kernel(
    qkv,
    norm,
    cos,
    sin,
    query,
    key,
    value,
    tables,
    positions,
    eps,
    key_page,
    key_head,
    key_token,
    value_page,
    value_head,
    value_token,
    table_row,
    H: tl.constexpr,
    KV: tl.constexpr,
    D: tl.constexpr,
    NORMED: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    PAGE: tl.constexpr,
):
    """Some heads of a token. With pages of PAGE tokens (0: no pages), keys and values are stored in the pages of its table; a
    token with a negative position is idle and stores nothing."""
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    i = tl.arange(0, BLOCK_HALF)
    inside = (i < D // 2)[None, :]
    a, b = _heads_at(qkv, token, heads, i, H + 2 * KV, D)
    is_value = (heads >= H + KV)[:, None]
    raw_a, raw_b = a, b
    if NORMED:
        scale = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / D + eps)[:, None]
        weighted = (~is_value) & inside
        of_norm = norm + heads[:, None] * D + i[None, :]
        w1 = tl.load(of_norm, mask=weighted, other=0.0)
        w2 = tl.load(of_norm + D // 2, mask=weighted, other=0.0)
        a, b = ((a * scale).to(w1.dtype) * w1).to(tl.float32), ((b * scale).to(w2.dtype) * w2).to(tl.float32)
    c1, c2 = _rotary_at(cos, token, i, D)
    s1, s2 = _rotary_at(sin, token, i, D)
    first = tl.where(is_value, raw_a, a * c1 + b * s1).to(query.dtype.element_ty)
    second = tl.where(is_value, raw_b, b * c2 + a * s2).to(query.dtype.element_ty)
    is_query = (heads < H)[:, None]
    is_key = (~is_query) & (~is_value)
    to_query = query + (token * H + heads[:, None]) * D + i[None, :]
    tl.store(to_query, first, mask=is_query & inside)
    tl.store(to_query + D // 2, second, mask=is_query & inside)
    of_value = is_value & (heads < H + 2 * KV)[:, None] & inside
    if PAGE > 0:
        position = tl.load(positions + token)
        safe = tl.maximum(position, 0)  # reading the table of an idle row is harmless
        page = tl.load(tables + token * table_row + safe // PAGE).to(tl.int64)
        at = safe % PAGE
        live = (position + 0 * heads >= 0)[:, None]  # a vector, as Triton's interpreter wants masks
        is_key, of_value = is_key & live, of_value & live
        to_key = key + page * key_page + (heads[:, None] - H) * key_head + at * key_token + i[None, :]
        to_value = value + page * value_page + (heads[:, None] - H - KV) * value_head + at * value_token + i[None, :]
    else:
        to_key = key + (token * KV + heads[:, None] - H) * D + i[None, :]
        to_value = value + (token * KV + heads[:, None] - H - KV) * D + i[None, :]
    tl.store(to_key, first, mask=is_key & inside)
    tl.store(to_key + D // 2, second, mask=is_key & inside)
    tl.store(to_value, first, mask=of_value)
    tl.store(to_value + D // 2, second, mask=of_value)


@triton.jit
def _grads_at(
    grad_query,
    grad_key,
    grad_value,
    token,
    heads,
    i,
    H: tl.constexpr,
    KV: tl.constexpr,
    D: tl.constexpr,
    FIRST: tl.constexpr,
):
    """The gradients of some heads at columns FIRST + i of half a head, in float32."""
    inside = (i < D // 2)[None, :]
    is_query, is_value = (heads < H)[:, None], (heads >= H + KV)[:, None]
    there = (heads < H + 2 * KV)[:, None]
    of_query = tl.load(
        grad_query + (token * H + heads[:, None]) * D + FIRST + i[None, :], mask=is_query & inside, other=0.0
    )
    of_key = tl.load(
        grad_key + (token * KV + heads[:, None] - H) * D + FIRST + i[None, :],
        mask=(~is_query) & (~is_value) & inside,
        other=0.0,
    )
    of_value = tl.load(
        grad_value + (token * KV + heads[:, None] - H - KV) * D + FIRST + i[None, :],
        mask=is_value & there & inside,
        other=0.0,
    )
    return of_query.to(tl.float32) + of_key.to(tl.float32) + of_value.to(tl.float32)


@triton.jit
def _split_heads_backward_kernel(
    grad_query,
    grad_key,
    grad_value,
    qkv,
    norm,
    cos,
    sin,
    out,
    eps,
    H: tl.constexpr,
    KV: tl.constexpr,
    D: tl.constexpr,
    NORMED: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    i = tl.arange(0, BLOCK_HALF)
    inside = (i < D // 2)[None, :]
    g1 = _grads_at(grad_query, grad_key, grad_value, token, heads, i, H, KV, D, 0)
    g2 = _grads_at(grad_query, grad_key, grad_value, token, heads, i, H, KV, D, D // 2)
    is_value = (heads >= H + KV)[:, None]
    c1, c2 = _rotary_at(cos, token, i, D)
    s1, s2 = _rotary_at(sin, token, i, D)
    first, second = g1 * c1 + g2 * s2, g2 * c2 + g1 * s1  # the transposed rotation
    if NORMED:
        a, b = _heads_at(qkv, token, heads, i, H + 2 * KV, D)
        scale = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / D + eps)[:, None]
        weighted = (~is_value) & inside
        of_norm = norm + heads[:, None] * D + i[None, :]
        w1 = tl.load(of_norm, mask=weighted, other=0.0).to(tl.float32)
        w2 = tl.load(of_norm + D // 2, mask=weighted, other=0.0).to(tl.float32)
        n1, n2, t1, t2 = a * scale, b * scale, first * w1, second * w2
        along = ((tl.sum(t1 * n1, 1) + tl.sum(t2 * n2, 1)) / D)[:, None]
        first, second = scale * (t1 - n1 * along), scale * (t2 - n2 * along)
    first, second = tl.where(is_value, g1, first), tl.where(is_value, g2, second)
    there = (heads < H + 2 * KV)[:, None] & inside
    to_out = out + token * (H + 2 * KV) * D + heads[:, None] * D + i[None, :]
    tl.store(to_out, first.to(out.dtype.element_ty), mask=there)
    tl.store(to_out + D // 2, second.to(out.dtype.element_ty), mask=there)


def _shape(qkv: Tensor, norm: Tensor | None, cos: Tensor, kv_heads: int) -> tuple[tuple[int, int], dict[str, int]]:
    """Grid and constants of both kernels."""
    tokens, dim = cos.shape
    heads = qkv.shape[1] // dim
    return (tokens, triton.cdiv(heads, BLOCK_HEADS)), {
        "H": heads - 2 * kv_heads,
        "KV": kv_heads,
        "D": dim,
        "NORMED": norm is not None,
        "BLOCK_HEADS": BLOCK_HEADS,
        "BLOCK_HALF": triton.next_power_of_2(dim // 2),
    }


def split_heads(
    qkv: Tensor, norm: Tensor | None, cos: Tensor, sin: Tensor, kv_heads: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """See plain.split_heads."""
    qkv, cos, sin = qkv.contiguous(), cos.contiguous(), sin.contiguous()
    grid, shape = _shape(qkv, norm, cos, kv_heads)
    tokens, dim = cos.shape
    query = qkv.new_empty(tokens, shape["H"], dim)
    key, value = qkv.new_empty(tokens, kv_heads, dim), qkv.new_empty(tokens, kv_heads, dim)
    weights = qkv if norm is None else norm  # not read without norms; pass any pointer
    nothing = (qkv, qkv), (0,) * 7  # no pages: neither tables nor strides are read
    _split_heads_kernel[grid](qkv, weights, cos, sin, query, key, value, *nothing[0], eps, *nothing[1], PAGE=0, **shape)
    return query, key, value


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
    """See plain.store_heads."""
    qkv, cos, sin = qkv.contiguous(), cos.contiguous(), sin.contiguous()
    grid, shape = _shape(qkv, norm, cos, kv_heads)
    tokens, dim = cos.shape
    query, weights = qkv.new_empty(tokens, shape["H"], dim), qkv if norm is None else norm
    strides = *keys.stride()[:3], *values.stride()[:3], tables.stride(0)
    _split_heads_kernel[grid](
        qkv, weights, cos, sin, query, keys, values, tables, positions, eps, *strides, PAGE=keys.shape[2], **shape
    )
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
    """See plain.split_heads_backward."""
    qkv, cos, sin = qkv.contiguous(), cos.contiguous(), sin.contiguous()
    grid, shape = _shape(qkv, norm, cos, kv_heads)
    out, weights = torch.empty_like(qkv), qkv if norm is None else norm
    _split_heads_backward_kernel[grid](grad_query, grad_key, grad_value, qkv, weights, cos, sin, out, eps, **shape)
    return out
