"""LoRA training at real shapes, forward and backward: tokens per second, matrix rate, memory."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import tinker
import torch

from benchmarks.gpu.findings import describe
from benchmarks.gpu.marks import TRAINING_SHARE, TRAINING_TOKENS, percent
from benchmarks.gpu.models import random_model, shape_of
from benchmarks.gpu.visit import Visit
from benchmarks.models import Shape
from benchmarks.ours import LocalEngine, completion_datum
from benchmarks.report import NOT_MEASURED, number
from benchmarks.workload import TrainingSequence, random_tokens
from tinker_local_backend.engine.model.base_model import BaseModel

OPERATIONS_PER_WEIGHT = 4
"""per token: 2 forward, 2 backward to the inputs. Frozen weights get no gradient; attention, adapters, recomputation and padding
are not counted, so the actual load of the device is higher."""


PUBLISHED = {
    ("qwen3-4b", 16384): "6,230 tokens/s, 23.3 GiB",
    ("qwen3-4b", 65536): "4,160 tokens/s, 42 GiB",
    ("qwen3-0.6b", 16384): "13,300 tokens/s",
}
"""prime-rl's published numbers for LoRA of rank 16 with all layers recomputed, by shape and sequence length (0.6B: unknown)."""


@dataclass(frozen=True)
class Pass:
    """Cost of one forward_backward. Peak memory in bytes, None on a CPU."""

    seconds: float
    tokens: int
    computed: int
    passes: int
    peak: int | None


def run(visit: Visit) -> None:
    """Measure every shape and number of tokens, with one and with eight completions per prompt."""
    scale = visit.scale
    for name in scale.training_shapes:
        if visit.findings.time_is_up:
            visit.findings.leave_out(f"training {name}")
            continue
        long = [tokens for shape, tokens in scale.training_long if shape == name]
        model = random_model(name, visit.device, visit.dtype, positions=max(long, default=0) + 1)
        add = visit.findings.table(
            f"Training, {name}, {visit.dtype_name}, LoRA rank {visit.rank}: forward and backward, cross-entropy on half of "
            f"each sequence of {scale.training_sequence} tokens; {OPERATIONS_PER_WEIGHT} N operations per computed token",
            ["tokens", "prompts", "computed", "passes", "tokens/s", "TFLOP/s", "matrix rate", "peak memory",
             "prime-rl, one H100, published"],
        )  # fmt: skip
        with LocalEngine.of(model, visit.rank, train_unembed=True) as engine:
            for tokens in scale.training_tokens if name == scale.training_shapes[0] else scale.training_tokens[:1]:
                for shared in (False, True):
                    label = [f"{tokens:,}", "8 to a prompt" if shared else "1 to a prompt"]
                    if visit.findings.time_is_up:
                        visit.findings.leave_out(f"training {name}: {' tokens, '.join(label)}")
                        continue
                    try:
                        result = measure(visit, engine, model, tokens, shared)
                        row = _figures(visit, shape_of(name), result)
                        _record(visit, name, tokens, scale.training_sequence, shared, result)
                        if (name, tokens, shared) == (scale.training_shapes[0], scale.training_tokens[0], False):
                            visit.findings.mark(TRAINING_SHARE.key, _share(visit, shape_of(name), result))
                            visit.findings.mark(TRAINING_TOKENS.key, result.tokens / result.seconds)
                    except Exception as error:
                        row = [describe(error)]
                    visit.free()  # not in the handler, where the error's frames still hold tensors
                    add([*label, *row])
            for tokens in long:
                label = [f"{tokens:,}", "one sequence"]
                if visit.findings.time_is_up:
                    visit.findings.leave_out(f"training {name}: {' tokens, '.join(label)}")
                    continue
                try:
                    result = measure(visit, engine, model, tokens, False, length=tokens)
                    row = [*_figures(visit, shape_of(name), result), PUBLISHED.get((name, tokens), "")]
                    _record(visit, name, tokens, tokens, False, result)
                except Exception as error:
                    row = [describe(error)]
                visit.free()
                add([*label, *row])
        del model, engine
        visit.free()


def _rate(shape: Shape, result: Pass) -> float:
    """Operations per second."""
    return OPERATIONS_PER_WEIGHT * shape.parameters * result.computed / result.seconds


def _share(visit: Visit, shape: Shape, result: Pass) -> float:
    """Share of the rate of a large matrix product."""
    return _rate(shape, result) / visit.rates.get(visit.dtype_name, float("nan"))


def _record(visit: Visit, name: str, tokens: int, length: int, shared: bool, result: Pass) -> None:
    visit.findings.record(
        "training",
        shape=name,
        tokens=tokens,
        length=length,
        shared=shared,
        passes=result.passes,
        rate=result.tokens / result.seconds,
        share=_share(visit, shape_of(name), result),
    )


def _figures(visit: Visit, shape: Shape, result: Pass) -> list[str]:
    return [
        f"{result.computed:,}",
        str(result.passes),
        number(result.tokens / result.seconds),
        number(_rate(shape, result) / 1e12),
        percent(_share(visit, shape, result)),
        NOT_MEASURED if result.peak is None else f"{result.peak / 2**30:.1f} GiB",
    ]


def training_data(vocab: int, tokens: int, length: int, shared: bool) -> list[tinker.Datum]:
    """Sequences of `length` tokens, whose first half is the prompt; `shared`: groups of eight have the same prompt."""
    half, data = length // 2, []
    for i in range(tokens // length):
        prompt = random_tokens(vocab, half, seed=i // 8 if shared else 1000 + i)
        completion = random_tokens(vocab, length - half + 1, seed=2000 + i)
        data.append(completion_datum(TrainingSequence(prompt + completion, half)))
    return data


def measure(
    visit: Visit, engine: LocalEngine, model: BaseModel, tokens: int, shared: bool, length: int | None = None
) -> Pass:
    """The median of a few calls on sequences of `length` tokens, after a warm-up call. Excludes the optimizer step."""
    data = training_data(model.vocab_size, tokens, length or visit.scale.training_sequence, shared)

    def call() -> tuple[float, int, dict[str, float]]:
        with counted_passes(model) as passes:
            start = time.perf_counter()
            output = engine.training.forward_backward(data, "cross_entropy").result()
            visit.synchronize()
            seconds = time.perf_counter() - start
        engine.training.optim_step(tinker.AdamParams(learning_rate=1e-5)).result()
        return seconds, len(passes), output.metrics

    call()
    if visit.on_gpu:
        torch.cuda.reset_peak_memory_stats(visit.device)
    calls = [call() for _ in range(visit.scale.training_repetitions)]
    peak = torch.cuda.max_memory_allocated(visit.device) if visit.on_gpu else None
    _, passes, metrics = calls[-1]
    counted = int(metrics["tokens:sum"]), int(metrics["computed_tokens:sum"])
    return Pass(statistics.median(seconds for seconds, _, _ in calls), *counted, passes, peak)


@contextmanager
def counted_passes(model: BaseModel) -> Iterator[list[int]]:
    """Yields the token counts of the passes through the model inside the context."""
    passes: list[int] = []
    original = model.training_pass

    def counted(tokens_T: torch.Tensor, *rest: Any, **options: Any) -> Any:
        passes.append(len(tokens_T))
        return original(tokens_T, *rest, **options)

    with mock.patch.object(model, "training_pass", counted):
        yield passes
