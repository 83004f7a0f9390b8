"""Each kernel of the CUDA path alone, at the shapes of a model: time, and bytes per second as a share of the copy's rate.

The kernels of decode attention, adapters and truncation are also timed with other blocks, stages and warps.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from unittest import mock

import torch

from benchmarks.gpu.findings import describe
from benchmarks.gpu.marks import percent
from benchmarks.gpu.models import shape_of
from benchmarks.gpu.visit import Visit
from benchmarks.models import Shape
from benchmarks.report import NOT_MEASURED, number
from tinker_local_backend.engine.cuda import ops, plain
from tinker_local_backend.engine.cuda.adapter_slots import SLOTS, padded_rank, row_blocks
from tinker_local_backend.engine.model.kv_cache import PAGE_TOKENS

DECODE_SHAPES = ((64, 1024), (256, 1024), (8, 8192), (1, 32768))
"""Rows and context of decode attention; variants are timed at the first and the last."""

TRAINED_TOKENS = 16384

CAPTURED_BELOW = 64e6
"""Bytes below which a kernel is timed in a CUDA graph."""


@dataclass(frozen=True)
class Kernel:
    """`run` launches the kernel; `bytes` is the minimum that it must move."""

    name: str
    size: str
    bytes: float
    run: Callable[[], object]


def run(visit: Visit) -> None:
    """Time the kernels of the first decoding shape, then variants of those that read most."""
    shape = shape_of(visit.scale.decoding_shapes[0])
    add = visit.findings.table(
        f"Kernels alone, {visit.scale.decoding_shapes[0]}, {visit.dtype_name}: least bytes over the time",
        ["kernel", "size", "time", "GB/s", "share of the copy's rate"],
    )
    for kernel in (*_decoding(visit, shape), *_training(visit, shape)):
        add([kernel.name, kernel.size, *_figures(visit, kernel)])
        visit.free()
    if visit.on_gpu:
        _variants(visit, shape)


def _figures(visit: Visit, kernel: Kernel) -> list[str]:
    try:
        seconds = _seconds(visit, kernel)
    except Exception as error:
        return [describe(error), "", ""]
    if seconds is None:
        return [NOT_MEASURED, "", ""]
    rate = kernel.bytes / seconds
    share = rate / visit.rates["copy"] if "copy" in visit.rates else float("nan")
    return [f"{1e6 * seconds:.1f} us", number(rate / 1e9), percent(share)]


def _seconds(visit: Visit, kernel: Kernel) -> float | None:
    """Median of repeated runs; None on a CPU, where it runs once. Large kernels run with a cold L2 cache; small ones, which are
    shorter than their launch, run many times in a graph."""
    if not visit.on_gpu:
        kernel.run()
        return None
    from triton.testing import do_bench, do_bench_cudagraph

    if kernel.bytes < CAPTURED_BELOW:
        milliseconds = do_bench_cudagraph(kernel.run, rep=10, return_mode="median")
    else:
        milliseconds = do_bench(kernel.run, warmup=10, rep=40, return_mode="median")
    return milliseconds / 1e3


def _decoding(visit: Visit, shape: Shape) -> Iterator[Kernel]:
    shapes = DECODE_SHAPES if visit.on_gpu else ((4, 40),)
    for rows, context in shapes:
        yield _attention(visit, shape, rows, context)
    width = shape.hidden
    for rows, adapters in ((64, SLOTS), (256, SLOTS), (64, 1)) if visit.on_gpu else ((4, 2),):
        heads = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
        ends = [shape.heads * shape.head_dim, (shape.heads + shape.kv_heads) * shape.head_dim, heads]
        yield _lora(visit, "queries, keys, values", rows, adapters, width, ends)
        yield _lora(visit, "gate, up", rows, adapters, width, [shape.mlp, 2 * shape.mlp])
        yield _lora(visit, "down", rows, adapters, shape.mlp, [width])
    yield from _between(visit, shape, 64 if visit.on_gpu else 4)
    for rows in (64, 256, 1) if visit.on_gpu else (4,):
        yield from limits(visit, shape, rows)


def _training(visit: Visit, shape: Shape) -> Iterator[Kernel]:
    yield from _between(visit, shape, TRAINED_TOKENS if visit.on_gpu else 16, backward=True)


def _random(visit: Visit, *size: int) -> torch.Tensor:
    return torch.randn(size, dtype=visit.dtype, device=visit.device)


def _attention(visit: Visit, shape: Shape, rows: int, context: int) -> Kernel:
    width = -(-context // PAGE_TOKENS)
    pool = _random(visit, 2, rows * width, shape.kv_heads, PAGE_TOKENS, shape.head_dim)
    tables = torch.randperm(rows * width, device=visit.device).int().view(rows, width)
    lengths = torch.full((rows,), context, dtype=torch.int32, device=visit.device)
    query = _random(visit, rows, shape.heads, shape.head_dim)
    arguments = (query, *pool.unbind(), tables, lengths, shape.head_dim**-0.5, 0, 0.0)
    size = 2 * rows * context * shape.kv_heads * shape.head_dim * visit.dtype.itemsize
    return Kernel("paged attention", f"{rows} rows of {context}", size, lambda: ops.paged_attention(*arguments))


def _lora(visit: Visit, name: str, rows: int, adapters: int, features: int, ends: list[int]) -> Kernel:
    rank, outputs = padded_rank(visit.rank), ends[-1]
    slots = [i * adapters // rows for i in range(rows)]
    order, blocks = (torch.from_numpy(array).to(visit.device) for array in row_blocks(slots, rows))
    a, b = _random(visit, SLOTS, len(ends) * rank, features), _random(visit, SLOTS, outputs, rank)
    x, y = _random(visit, rows, features), _random(visit, rows, outputs)
    scales = torch.ones(SLOTS, device=visit.device)
    size = (adapters * (a[0].numel() + b[0].numel()) + x.numel() + 2 * y.numel()) * visit.dtype.itemsize
    run = lambda: ops.lora_add(y, x, a, b, order, blocks, scales, ends)  # noqa: E731
    return Kernel(f"LoRA on {name}", f"{rows} rows, {adapters} adapters", size, run)


def _between(visit: Visit, shape: Shape, tokens: int, backward: bool = False) -> Iterator[Kernel]:
    """The kernels between the matrix products of a layer."""
    item, size = visit.dtype.itemsize, f"{tokens:,} tokens"
    delta, weight = _random(visit, tokens, shape.hidden), _random(visit, shape.hidden)
    x = delta.float()
    yield Kernel("sum and norm", size, (8 + 2 * item) * x.numel(), lambda: ops.add_norm(x, delta, weight, 1e-6))
    if backward:
        run = lambda: ops.add_norm_backward(x, delta, x, weight, 1e-6)  # noqa: E731
        yield Kernel("sum and norm, backward", size, (12 + 2 * item) * x.numel(), run)
    dim, kv_heads = shape.head_dim, shape.kv_heads
    qkv = _random(visit, tokens, (shape.heads + 2 * kv_heads) * dim)
    norm, cos, sin = (
        _random(visit, shape.heads + kv_heads, dim),
        _random(visit, tokens, dim),
        _random(visit, tokens, dim),
    )
    split = lambda: ops.split_heads(qkv, norm, cos, sin, kv_heads, 1e-6)  # noqa: E731
    yield Kernel("heads", size, 2 * qkv.numel() * item, split)
    if backward:
        grads = split()
        run = lambda: ops.split_heads_backward(*grads, qkv, norm, cos, sin, kv_heads, 1e-6)  # noqa: E731
        yield Kernel("heads, backward", size, 3 * qkv.numel() * item, run)
    gate_up = _random(visit, tokens, 2 * shape.mlp)
    yield Kernel("SwiGLU", size, 1.5 * gate_up.numel() * item, lambda: ops.joined_swiglu(gate_up))
    if backward:
        grad = _random(visit, tokens, shape.mlp)
        run = lambda: ops.joined_swiglu_backward(grad, gate_up)  # noqa: E731
        yield Kernel("SwiGLU, backward", size, 2.5 * gate_up.numel() * item, run)


def limits(visit: Visit, shape: Shape, rows: int) -> Iterator[Kernel]:
    """Top-p alone and after top-k, with the kernel and with the sort that it replaced."""
    probs = torch.randn(rows, shape.vocab, device=visit.device).mul_(3).softmax(-1)
    top_p, min_p = torch.full((rows,), 0.95, device=visit.device), torch.zeros(rows, device=visit.device)
    for name, k in (("top-p", 0), ("top-k and top-p", 50)):
        arguments = (probs, torch.full((rows,), k, device=visit.device), top_p, min_p)
        size, moved = f"{rows} rows of {shape.vocab:,}", 8 * probs.numel()
        yield Kernel(name, size, moved, partial(ops.truncate, *arguments))
        yield Kernel(f"{name}, by sorting", size, moved, partial(plain.truncate, *arguments))


def _variants(visit: Visit, shape: Shape) -> None:
    """Time other constants of the launchers; the fastest first."""
    from tinker_local_backend.engine.cuda import choice_kernels, lora_kernels, paged_attention_kernels

    attention = _attention(visit, shape, *DECODE_SHAPES[0])
    names = ("BLOCK_TOKENS", "STAGES", "WARPS")
    _timed(visit, attention, paged_attention_kernels, names, list(itertools.product((32, 64), (2, 3, 5), (2, 4))))
    long = _attention(visit, shape, *DECODE_SHAPES[-1])
    variants = itertools.product((16, 32, 64), (64, 128), (3, 5), (4, 8))
    _timed(visit, long, paged_attention_kernels, ("SPLITS", *names), list(variants))
    heads = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    ends = [shape.heads * shape.head_dim, (shape.heads + shape.kv_heads) * shape.head_dim, heads]
    lora = _lora(visit, "queries, keys, values", 64, SLOTS, shape.hidden, ends)
    splits = itertools.product((4, 8, 16), (64, 128), (64, 128))
    _timed(visit, lora, lora_kernels, ("SPLITS", "BLOCK_IN", "BLOCK_OUT"), list(splits))
    top_p, *_ = limits(visit, shape, 64)
    _timed(visit, top_p, choice_kernels, ("BLOCK", "WARPS"), list(itertools.product((2048, 4096, 8192), (4, 8, 16))))


def _timed(
    visit: Visit, kernel: Kernel, module: ModuleType, names: Sequence[str], variants: Sequence[tuple[int, ...]]
) -> None:
    add = visit.findings.table(
        f"{kernel.name}, {kernel.size}: other constants, the ten fastest first; those that are set: "
        + ", ".join(f"{name} {getattr(module, name)}" for name in names),
        [*names, "time", "GB/s", "share of the copy's rate"],
    )
    rows: list[tuple[float, list[str]]] = []
    for values in variants:
        if visit.findings.time_is_up:
            visit.findings.leave_out(f"{kernel.name} with {dict(zip(names, values, strict=True))}")
            continue
        with _set(module, names, values):
            figures = _figures(visit, kernel)
        seconds = float(figures[0].split()[0]) if figures[0].endswith(" us") else float("inf")
        rows.append((seconds, [*map(str, values), *figures]))
    for _, row in sorted(rows, key=lambda pair: pair[0])[:10]:
        add(row)


@contextmanager
def _set(module: ModuleType, names: Sequence[str], values: Sequence[int]) -> Iterator[None]:
    with ExitStack() as stack:
        for name, value in zip(names, values, strict=True):
            stack.enter_context(mock.patch.object(module, name, value))
        yield
