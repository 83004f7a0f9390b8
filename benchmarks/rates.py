"""Measured rates of the hardware, and minimum requirements of the work: numerator and denominator of a utilisation."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

from benchmarks.models import Shape
from benchmarks.workload import TrainingSequence

LONGEST_PRODUCT = 1.0
"""Limit on the seconds of a product on a CPU."""


def matmul_rate(device: str, dtype: str) -> float:
    """FLOP/s of a large square matrix product. On a CPU it has at most 2048 rows, or fewer if the CPU lacks the arithmetic
    (bfloat16 is then a thousand times slower than float32).
    """
    if device == "cuda":
        return _product_rate(device, dtype, 8192, repetitions=7)
    size = 256
    while size < 2048 and 2 * (2 * size) ** 3 / _product_rate(device, dtype, size, repetitions=1) < LONGEST_PRODUCT:
        size *= 2
    return _product_rate(device, dtype, size, repetitions=7)


def _product_rate(device: str, dtype: str, size: int, repetitions: int) -> float:
    a, b = (torch.randn(size, size, device=device, dtype=getattr(torch, dtype)) for _ in range(2))
    return 2 * size**3 / _seconds(lambda: a @ b, device, repetitions)


def copy_bandwidth(device: str) -> float:
    """Bytes/s of a copy within the device's memory, counting reads and writes."""
    count = 2**30 if device == "cuda" else 2**26
    source, target = (torch.empty(count, dtype=torch.uint8, device=device).zero_() for _ in range(2))
    return 2 * count / _seconds(lambda: target.copy_(source), device)


@torch.inference_mode()
def _seconds(action: Callable[[], object], device: str, repetitions: int = 7) -> float:
    times = []
    for _ in range(repetitions + 2):
        start = time.perf_counter()
        action()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[2:])


def training_flops(shape: Shape, rank: int, sequences: Sequence[TrainingSequence]) -> float:
    """Floating-point operations of LoRA training on these sequences, if no work is shared or repeated.

    A frozen matrix costs 2 operations per weight and token forward and 2 backward (only for the input), an adapter 2 and 4, and
    the head, at positions with a loss, as a frozen matrix. Causal attention costs 2 * length^2 * heads * head_dim per layer
    forward and twice that backward.
    """
    tokens = sum(len(s.tokens) - 1 for s in sequences)
    targets = sum(len(s.completion) for s in sequences)
    squares = sum((len(s.tokens) - 1) ** 2 for s in sequences)
    linears = (4 * shape.body_parameters + 6 * shape.adapter_parameters(rank)) * tokens
    return (
        linears
        + 4 * shape.head_parameters * targets
        + 6 * squares * shape.heads * shape.head_dim * shape.attention_layers
    )


def decode_bytes(
    shape: Shape, rank: int, rows: int, prompt_length: int, new_tokens: int, bytes_per_number: int
) -> float:
    """Minimum bytes that decoding reads: at each step all weights and adapters once, and every row's KV cache.

    The first token comes from the prefill, so there is one step fewer than tokens.
    """
    weights = (shape.body_parameters + shape.head_parameters + shape.adapter_parameters(rank)) * bytes_per_number
    positions = sum(prompt_length + i for i in range(1, new_tokens))
    return weights * (new_tokens - 1) + rows * positions * shape.kv_bytes_per_token(bytes_per_number)
