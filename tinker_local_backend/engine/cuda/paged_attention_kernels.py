"""Triton kernels for decoding: attention of one new token per row to the pages of its table, and storing keys and values.

Programs process splits of the keys in parallel (flash decoding); a second kernel combines their results in a fixed order. A row's
splits depend only on its length and there are no atomics, so a row gets the same bits whatever else is in the batch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

SPLITS = 16
"""Splits of the keys of a long row; a power of two. 16 fill a large GPU at batch 1 with 8 key heads."""

MIN_TOKENS = 256
"""Minimum tokens of a split: for shorter rows the second kernel costs more than splitting saves."""

BLOCK_TOKENS, BLOCK_BYTES = 64, 256
"""Keys that a program loads at a time if a key takes at most BLOCK_BYTES; fewer larger ones, to fit into shared memory."""

STAGES, WARPS = 3, 4
"""Pipeline stages and warps of a program; twice as many warps in float32, whose products otherwise spill registers
(Triton 3.6)."""

MIN_ROWS = 16
"""Smallest side of a matrix that `tl.dot` takes."""


@triton.jit
def _split_bounds(length, WINDOW: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr, MIN_SPLIT: tl.constexpr):
    """First visible token, start of its block, and tokens per split."""
    first = length * 0
    if WINDOW > 0:
        first = tl.maximum(length - WINDOW, 0)
    base = first // BLOCK * BLOCK
    per = tl.maximum(tl.cdiv(tl.cdiv(length - base, SPLITS), BLOCK) * BLOCK, MIN_SPLIT)
    return first, base, per


@triton.jit
def _partial_kernel(
    query,
    keys,
    values,
    tables,
    lengths,
    partial,
    stats,
    scale,
    query_row,
    query_head,
    key_page,
    key_head,
    key_token,
    value_page,
    value_head,
    value_token,
    table_row,
    GROUP: tl.constexpr,
    KV: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE: tl.constexpr,
    SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
):
    """Unnormalised sum of the values of one split, with the largest score and the sum of weights of each query head."""
    row, kv, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + row)
    first, base, per = _split_bounds(length, WINDOW, SPLITS, BLOCK, MIN_SPLIT)
    begin = base + split * per
    end = tl.minimum(begin + per, length)
    if begin < end:
        heads, dims = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
        inside = dims < D
        q = tl.load(
            query + row * query_row + (kv * GROUP + heads)[:, None] * query_head + dims[None, :],
            mask=(heads < GROUP)[:, None] & inside[None, :],
            other=0.0,
        )
        largest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK_M,), tl.float32)
        summed = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
        for start in range(begin, end, BLOCK):
            tokens = start + tl.arange(0, BLOCK)
            seen = (tokens < end) & (tokens >= first)
            page = tl.load(tables + row * table_row + tokens // PAGE, mask=seen, other=0).to(tl.int64)
            at = tokens % PAGE
            mask = seen[:, None] & inside[None, :]
            of_key = page * key_page + kv * key_head + at * key_token
            k = tl.load(keys + of_key[:, None] + dims[None, :], mask=mask, other=0.0)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee").to(tl.float32) * scale
            if SOFTCAP > 0:  # cap * tanh(scores / cap)
                scores = SOFTCAP * (2 * tl.sigmoid(2 * scores / SOFTCAP) - 1)
            scores = tl.where(seen[None, :], scores, float("-inf"))
            larger = tl.maximum(largest, tl.max(scores, 1))
            weights = tl.exp(scores - larger[:, None])
            shrunk = tl.exp(largest - larger)
            of_value = page * value_page + kv * value_head + at * value_token
            v = tl.load(values + of_value[:, None] + dims[None, :], mask=mask, other=0.0)
            product = tl.dot(weights.to(v.dtype), v, input_precision="ieee").to(tl.float32)
            summed = summed * shrunk[:, None] + product
            total = total * shrunk + tl.sum(weights, 1)
            largest = larger
        index = ((row * KV + kv) * SPLITS + split) * BLOCK_M + heads
        # Without the mask, three quarters of the stores would be padding up to MIN_ROWS.
        real = heads < GROUP
        tl.store(partial + index[:, None] * BLOCK_D + dims[None, :], summed, mask=real[:, None])
        tl.store(stats + index * 2, largest, mask=real)
        tl.store(stats + index * 2 + 1, total, mask=real)


@triton.jit
def _combine_kernel(
    partial,
    stats,
    lengths,
    sinks,
    out,
    out_row,
    out_head,
    SINKS: tl.constexpr,
    GROUP: tl.constexpr,
    KV: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
):
    """Combine the splits of one query head of one row: rescale them to the largest score, sum them in order, and divide by the
    sum of all weights, including the sink's."""
    row, head = tl.program_id(0), tl.program_id(1)
    length = tl.load(lengths + row)
    _, base, per = _split_bounds(length, WINDOW, SPLITS, BLOCK, MIN_SPLIT)
    splits, dims = tl.arange(0, SPLITS), tl.arange(0, BLOCK_D)
    used = splits < tl.cdiv(length - base, per)  # the others were not written
    index = ((row * KV + head // GROUP) * SPLITS + splits) * BLOCK_M + head % GROUP
    largest = tl.load(stats + index * 2, mask=used, other=float("-inf"))
    totals = tl.load(stats + index * 2 + 1, mask=used, other=0.0)
    peak = tl.max(largest, 0)
    if SINKS:
        sink = tl.load(sinks + head).to(tl.float32)
        peak = tl.maximum(peak, sink)
    weights = tl.where(used, tl.exp(largest - peak), 0.0)
    summed = tl.load(partial + index[:, None] * BLOCK_D + dims[None, :], mask=used[:, None], other=0.0)
    total = tl.sum(weights * totals, 0)
    if SINKS:
        total += tl.exp(sink - peak)
    result = tl.sum(summed * weights[:, None], 0) / tl.where(total > 0, total, 1.0)
    tl.store(out + row * out_row + head * out_head + dims, result.to(out.dtype.element_ty), mask=dims < D)


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
    """See plain.paged_attention."""
    rows, heads, dim = query.shape
    kv_heads, page = keys.shape[1], keys.shape[2]
    group = heads // kv_heads
    block_m, block_d = max(MIN_ROWS, triton.next_power_of_2(group)), max(MIN_ROWS, triton.next_power_of_2(dim))
    of_splits = (rows, kv_heads, SPLITS, block_m)
    partial = torch.empty(*of_splits, block_d, dtype=torch.float32, device=query.device)
    stats = torch.empty(*of_splits, 2, dtype=torch.float32, device=query.device)
    out = torch.empty(rows, heads, dim, dtype=query.dtype, device=query.device)
    shape = {
        "GROUP": group,
        "KV": kv_heads,
        "D": dim,
        "BLOCK_D": block_d,
        "SPLITS": SPLITS,
        "WINDOW": window,
        "BLOCK_M": block_m,
        "BLOCK": max(16, min(BLOCK_TOKENS, BLOCK_TOKENS * BLOCK_BYTES // (block_d * keys.itemsize))),
        "MIN_SPLIT": MIN_TOKENS,
    }
    _partial_kernel[(rows, kv_heads, SPLITS)](
        query,
        keys,
        values,
        tables,
        lengths,
        partial,
        stats,
        scale,
        *query.stride()[:2],
        *keys.stride()[:3],
        *values.stride()[:3],
        tables.stride(0),
        PAGE=page,
        SOFTCAP=softcap,
        num_stages=STAGES,
        num_warps=WARPS if keys.itemsize < 4 else 2 * WARPS,
        **shape,
    )
    with_sinks = sinks is not None  # without sinks the kernel does not read this pointer; pass any
    _combine_kernel[(rows, heads)](
        partial, stats, lengths, sinks if with_sinks else stats, out, *out.stride()[:2], SINKS=with_sinks, **shape
    )
    return out


@triton.jit
def _store_kernel(
    key,
    value,
    keys,
    values,
    tables,
    positions,
    new_key_row,
    new_key_head,
    new_value_row,
    new_value_head,
    key_page,
    key_head,
    key_token,
    value_page,
    value_head,
    value_token,
    table_row,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE: tl.constexpr,
):
    """Store one key head of one row. A row with a negative position is idle."""
    row, kv = tl.program_id(0), tl.program_id(1)
    position = tl.load(positions + row)
    if position >= 0:
        page = tl.load(tables + row * table_row + position // PAGE).to(tl.int64)
        at = position % PAGE
        dims = tl.arange(0, BLOCK_D)
        inside = dims < D
        k = tl.load(key + row * new_key_row + kv * new_key_head + dims, mask=inside)
        v = tl.load(value + row * new_value_row + kv * new_value_head + dims, mask=inside)
        tl.store(keys + page * key_page + kv * key_head + at * key_token + dims, k, mask=inside)
        tl.store(values + page * value_page + kv * value_head + at * value_token + dims, v, mask=inside)


def store_keys(key: Tensor, value: Tensor, keys: Tensor, values: Tensor, tables: Tensor, positions: Tensor) -> None:
    """See plain.store_keys."""
    rows, kv_heads, dim = key.shape
    _store_kernel[(rows, kv_heads)](
        key,
        value,
        keys,
        values,
        tables,
        positions,
        *key.stride()[:2],
        *value.stride()[:2],
        *keys.stride()[:3],
        *values.stride()[:3],
        tables.stride(0),
        D=dim,
        BLOCK_D=triton.next_power_of_2(dim),
        PAGE=keys.shape[2],
    )
