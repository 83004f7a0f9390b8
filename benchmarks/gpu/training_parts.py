"""Ablation of a training pass: forward and backward on the same datums, with one part off at a time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from benchmarks.gpu.ablation import ALL_ON, Variation, fused_variations, reference
from benchmarks.gpu.case import gradient_errors
from benchmarks.gpu.counting import Counts, count_step
from benchmarks.gpu.findings import describe
from benchmarks.gpu.models import fill_adapter
from benchmarks.gpu.training import training_data
from benchmarks.gpu.visit import Visit
from benchmarks.report import NOT_MEASURED, number
from tinker_local_backend.engine.cuda import varlen
from tinker_local_backend.engine.cuda.execution import ATTENTION, CudaExecution
from tinker_local_backend.engine.model import head, packing
from tinker_local_backend.engine.model.base_model import BaseModel
from tinker_local_backend.engine.model.head import Scorer
from tinker_local_backend.engine.model.lora_spec import LoraSpec
from tinker_local_backend.engine.training import trainer
from tinker_local_backend.engine.training.trainer import finish

COLUMNS = ["off", "tokens/s", "x of the time with", "computed", "launches", "waits", "peak memory",
           "gradient, worst matrix"]  # fmt: skip

SMALL_CHUNK = 1 << 24
"""Logits per chunk, as on a CPU."""


@dataclass(frozen=True)
class Measured:
    """Results of one forward and backward pass. Peak memory in bytes, None on a CPU."""

    seconds: float
    tokens: float
    computed: float
    counts: Counts
    peak: int | None
    gradients: dict[str, torch.Tensor]


def variations(model: BaseModel, execution: CudaExecution) -> list[Variation]:
    """All variations; the first is the full path."""
    return [
        Variation(ALL_ON),
        Variation("one attention call for all sequences: one each",
                  lambda: mock.patch.dict(execution._parts, {ATTENTION: "off: measured"}), ATTENTION),
        Variation("shared prefixes: every sequence whole", lambda: mock.patch.object(packing, "MIN_SHARED", 1 << 40)),
        Variation("float32 sums of the gradients of a prefix's copies: index_select's own",
                  lambda: mock.patch.object(varlen, "gather_rows", _indexed), ATTENTION),
        *fused_variations(model, execution),
        Variation("kept activations: every layer computed again", lambda: _recomputed(model)),
        Variation("large chunks of logits", lambda: mock.patch.object(head, "CHUNK_ELEMENTS_CUDA", SMALL_CHUNK),
                  needs_gpu=True),
        Variation("float32 logits: rounded to the model's dtype",
                  lambda: mock.patch.object(Scorer, "_products", _rounded_products)),
        Variation("rows with a slope known beforehand: the device is asked, chunk by chunk",
                  lambda: mock.patch.object(trainer, "sloped_rows", lambda *_: None), needs_gpu=True),
        Variation("all: the reference", lambda: reference(model, execution)),
    ]  # fmt: skip


def _indexed(rows_TX: torch.Tensor, copies: varlen.Copies) -> torch.Tensor:
    return rows_TX.index_select(0, copies.gathered)


def _recomputed(model: BaseModel) -> AbstractContextManager[object]:
    original = model.recompute
    return mock.patch.object(model, "recompute", lambda enabled: original(True))


def _rounded_products(self: Scorer, hidden: torch.Tensor) -> torch.Tensor:
    logits = self._logits(len(hidden), hidden.device)
    return logits.copy_(hidden @ self._head.weight.t())


def run(visit: Visit, name: str, model: BaseModel, execution: CudaExecution) -> None:
    """Add a row for each variation."""
    tokens, length = visit.scale.training_tokens[0], visit.scale.training_sequence
    add = visit.findings.table(
        f"Parts of training, {name}, {visit.dtype_name}: forward and backward of {tokens:,} tokens in sequences of {length:,}, "
        "eight to a prompt",
        COLUMNS,
    )
    adapter = model.new_adapter(LoraSpec(visit.rank), seed=0)
    fill_adapter(adapter, seed=1)
    data = training_data(model.vocab_size, tokens, length, shared=True)
    state = trainer.TrainState.new(adapter)

    def call() -> Any:
        state.clear()
        return finish(trainer.forward_backward(model, state, data, "cross_entropy", None, True))

    names = [key for key, _ in adapter.named_parameters()]
    all_on: Measured | None = None
    for variation in variations(model, execution):
        if visit.findings.time_is_up:
            visit.findings.leave_out(f"parts of training: {variation.off}")
            continue
        missing = variation.missing(execution, visit.on_gpu)
        if missing is not None:
            add([variation.off, missing])
            continue
        try:
            with variation.setting():
                measured = _measured(visit, call, state, names)
            all_on = all_on or measured
            row = _row(measured, all_on)
        except Exception as error:
            row = [describe(error)]
        visit.free()
        add([variation.off, *row])


def _measured(visit: Visit, call: Callable[[], Any], state: trainer.TrainState, names: list[str]) -> Measured:
    output = call()
    if visit.on_gpu:
        torch.cuda.reset_peak_memory_stats(visit.device)
    times = []
    for _ in range(visit.scale.training_repetitions):
        start = time.perf_counter()
        output = call()
        visit.synchronize()
        times.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated(visit.device) if visit.on_gpu else None
    assert state.gradients is not None
    gradients = dict(zip(names, (gradient.cpu() for gradient in state.gradients), strict=True))
    counts = count_step(visit.device, call)
    tokens = output.metrics["tokens:sum"], output.metrics["computed_tokens:sum"]
    return Measured(statistics.median(times), *tokens, counts, peak, gradients)


def _row(measured: Measured, all_on: Measured) -> list[str]:
    expected = {name: gradient.double().numpy() for name, gradient in all_on.gradients.items()}
    errors = gradient_errors(measured.gradients, expected)
    return [
        number(measured.tokens / measured.seconds),
        f"{measured.seconds / all_on.seconds:.2f}",
        f"{measured.computed:,.0f}",
        str(measured.counts.launches),
        str(measured.counts.waits),
        NOT_MEASURED if measured.peak is None else f"{measured.peak / 2**30:.1f} GiB",
        "" if measured is all_on else f"{max(errors.values()):.1e}",
    ]
