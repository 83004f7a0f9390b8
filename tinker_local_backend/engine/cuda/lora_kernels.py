"""Triton kernels for LoRA in decoding: rows of many adapters and of the base model in one pair of launches.

Rows are grouped into blocks of one adapter each (`adapter_slots.row_blocks`), so a block reads its adapter's matrices once and
products run on tensor cores. The inner sum is split (split-K), and the splits are added in a fixed order, without atomics.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tinker_local_backend.engine.cuda.adapter_slots import BLOCK_RANK, BLOCK_ROWS

SPLITS = 8
"""Splits of the inner sum, so that even a few blocks fill the GPU."""

BLOCK_IN, BLOCK_OUT = 128, 128
"""Columns of the input and of the output that a program loads at a time."""

STAGES = {2: 3, 4: 2}
"""Pipeline stages of the loops, by itemsize, so that they fit into 99 KB of shared memory."""


@triton.jit
def _shrink_kernel(
    x,
    a,
    order,
    blocks,
    inner,
    features,
    x_row,
    a_slot,
    a_rank,
    rows,
    RANKS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One split of x @ a.T for the rows of a block and BLOCK_R of all RANKS ranks of its parts."""
    block, split = tl.program_id(0), tl.program_id(1)
    slot = tl.load(blocks + block * 3).to(tl.int64)
    first = tl.load(blocks + block * 3 + 1)
    count = tl.load(blocks + block * 3 + 2)
    if count > 0:
        members, ranks = tl.arange(0, BLOCK_M), tl.program_id(2) * BLOCK_R + tl.arange(0, BLOCK_R)
        there = members < count
        row = tl.load(order + first + members, mask=there, other=0).to(tl.int64)
        per = tl.cdiv(tl.cdiv(features, SPLITS), BLOCK_K) * BLOCK_K
        summed = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
        for start in range(split * per, tl.minimum((split + 1) * per, features), BLOCK_K):
            columns = start + tl.arange(0, BLOCK_K)
            inside = columns < features
            of_x = tl.load(
                x + row[:, None] * x_row + columns[None, :], mask=there[:, None] & inside[None, :], other=0.0
            )
            of_a = tl.load(
                a + slot * a_slot + ranks[:, None] * a_rank + columns[None, :], mask=inside[None, :], other=0.0
            )
            summed += tl.dot(of_x, tl.trans(of_a), input_precision="ieee").to(tl.float32)
        index = (split * rows + first + members).to(tl.int64)
        tl.store(inner + index[:, None] * RANKS + ranks[None, :], summed, mask=there[:, None])


@triton.jit
def _expand_kernel(
    inner,
    b,
    order,
    blocks,
    scales,
    y,
    features,
    first_end,
    second_end,
    y_row,
    b_slot,
    b_out,
    rows,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """y += scale * inner @ b.T for the rows of a block and some columns, all of one part."""
    block = tl.program_id(0)
    slot = tl.load(blocks + block * 3).to(tl.int64)
    first = tl.load(blocks + block * 3 + 1)
    count = tl.load(blocks + block * 3 + 2)
    if count > 0:
        members = tl.arange(0, BLOCK_M)
        there = members < count
        row = tl.load(order + first + members, mask=there, other=0).to(tl.int64)
        column = tl.program_id(1) * BLOCK_N
        of_part = ((column >= first_end).to(tl.int32) + (column >= second_end).to(tl.int32)) * RANK
        columns = column + tl.arange(0, BLOCK_N)
        inside = columns < features
        product = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for start in range(0, RANK, BLOCK_R):
            ranks = start + tl.arange(0, BLOCK_R)
            summed = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
            for split in range(SPLITS):
                index = (split * rows + first + members).to(tl.int64)
                at = inner + index[:, None] * RANKS + of_part + ranks[None, :]
                summed += tl.load(at, mask=there[:, None], other=0.0)
            of_b = tl.load(
                b + slot * b_slot + columns[:, None] * b_out + ranks[None, :], mask=inside[:, None], other=0.0
            )
            # As in training, round the inner product to the model's dtype.
            product += tl.dot(summed.to(of_b.dtype), tl.trans(of_b), input_precision="ieee").to(tl.float32)
        mask = there[:, None] & inside[None, :]
        at = y + row[:, None] * y_row + columns[None, :]
        result = tl.load(at, mask=mask, other=0.0).to(tl.float32) + tl.load(scales + slot) * product
        tl.store(at, result.to(y.dtype.element_ty), mask=mask)


def block_out(ends: list[int], itemsize: int = 2) -> int:
    """Output columns per program of `_expand_kernel`, all of one part; half as many in float32, which needs more registers."""
    block = BLOCK_OUT if itemsize <= 2 else BLOCK_OUT // 2
    while block > BLOCK_ROWS and any(end % block for end in ends[:-1]):
        block //= 2
    if any(end % block for end in ends[:-1]):
        raise ValueError(f"the parts of a fused linear end at {ends}, not at multiples of {BLOCK_ROWS}")
    return block


def lora_add(
    y: Tensor, x: Tensor, a: Tensor, b: Tensor, order: Tensor, blocks: Tensor, scales: Tensor, ends: list[int]
) -> None:
    """See plain.lora_add."""
    rows, ranks, rank = len(order), a.shape[1], b.shape[2]
    inner = torch.empty(SPLITS, rows, ranks, dtype=torch.float32, device=x.device)
    block_rank, stages = min(rank, BLOCK_RANK), STAGES.get(x.itemsize, 2)
    _shrink_kernel[(len(blocks), SPLITS, ranks // block_rank)](
        x,
        a,
        order,
        blocks,
        inner,
        x.shape[1],
        x.stride(0),
        a.stride(0),
        a.stride(1),
        rows,
        RANKS=ranks,
        BLOCK_R=block_rank,
        SPLITS=SPLITS,
        BLOCK_M=BLOCK_ROWS,
        BLOCK_K=BLOCK_IN,
        num_stages=stages,
    )
    columns = block_out(ends, b.itemsize)
    first_end, second_end = (*ends[:-1], y.shape[1], y.shape[1])[:2]
    _expand_kernel[(len(blocks), triton.cdiv(y.shape[1], columns))](
        inner,
        b,
        order,
        blocks,
        scales,
        y,
        y.shape[1],
        first_end,
        second_end,
        y.stride(0),
        b.stride(0),
        b.stride(1),
        rows,
        RANK=rank,
        RANKS=ranks,
        BLOCK_R=block_rank,
        SPLITS=SPLITS,
        BLOCK_M=BLOCK_ROWS,
        BLOCK_N=columns,
        num_stages=stages,
    )
