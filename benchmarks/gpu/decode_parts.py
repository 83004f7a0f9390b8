"""Ablation of a decode step: the same burst of the same rows, with one part off at a time."""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from unittest import mock

import numpy as np
import torch
from torch.nn import functional as F

from benchmarks.gpu.ablation import ALL_ON, Variation, fused_variations, reference
from benchmarks.gpu.counting import count_step
from benchmarks.gpu.decoding import Cell, mark_cell, started
from benchmarks.gpu.findings import describe
from benchmarks.gpu.models import frozen_adapters
from benchmarks.gpu.visit import Visit
from benchmarks.report import number
from tinker_local_backend.engine.cuda import ops, plain, step
from tinker_local_backend.engine.cuda.decoder import BURST, Burst, Decoder
from tinker_local_backend.engine.cuda.execution import DECODING, CudaExecution
from tinker_local_backend.engine.cuda.generation import BurstGenerator, _decode_row
from tinker_local_backend.engine.cuda.graphs import Uncaptured
from tinker_local_backend.engine.cuda.step import DecodeRow
from tinker_local_backend.engine.model import base_model
from tinker_local_backend.engine.model.base_model import BaseModel
from tinker_local_backend.engine.sampling import token_choice
from tinker_local_backend.engine.sampling.pages import PAGE_TOKENS, pages_for

UNCAPTURED, ALL = "captured steps", "all: the reference, its bookkeeping included"
COLUMNS = ["off", "ms/token", "x of the time with", "launches/token", "waits/token", "logprobs of the first step"]


@dataclass(frozen=True)
class DecodeVariation(Variation):
    """`captured`: the variation can be captured; otherwise it is compared with the full path without capture."""

    captured: bool = True
    steps: int = BURST
    """steps between two host synchronisations"""
    adapters: bool = True

    @property
    def baseline(self) -> str:
        return ALL_ON if self.captured or self.off == UNCAPTURED else UNCAPTURED


@dataclass(frozen=True)
class Measured:
    """Seconds, launches and waits per token of all rows, and the result of the first burst."""

    seconds: float
    launches: float
    waits: float
    burst: Burst | None


def variations(model: BaseModel, execution: CudaExecution, context: int) -> list[DecodeVariation]:
    """The variations in order; each comes after its baseline."""
    pages = pages_for(context + BURST)

    def narrow(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, tables: torch.Tensor, *rest: object):
        # Plain torch gathers whole tables, which are mostly empty.
        return plain.paged_attention(query, keys, values, tables[:, :pages].contiguous(), *rest)  # pyright: ignore

    def kernel(name: str, by: Callable[..., object]) -> Callable[[], AbstractContextManager[object]]:
        return lambda: mock.patch.object(ops, name, by)

    return [
        DecodeVariation(ALL_ON),
        DecodeVariation(UNCAPTURED, captured=False),
        DecodeVariation("bursts: the host looks after every step", steps=1),
        DecodeVariation("split keys: one program for all keys of a head", _unsplit, needs_gpu=True),
        DecodeVariation("kernel of paged attention: plain torch", kernel("paged_attention", narrow)),
        DecodeVariation("adapters: the base model alone", adapters=False),
        DecodeVariation("kernel that stores keys: plain torch", kernel("store_keys", plain.store_keys), captured=False),
        DecodeVariation("random numbers on the device: numpy on the host",
                        lambda: mock.patch.object(step, "uniforms", _on_the_host), captured=False),
        DecodeVariation("float32 logits: rounded to the model's dtype",
                        lambda: mock.patch.object(base_model, "float32_product", _rounded)),
        *(DecodeVariation(v.off, v.setting, v.part) for v in fused_variations(model, execution)),
        DecodeVariation("LoRA by slot: products of plain torch, block by block", kernel("lora_add", plain.lora_add),
                        captured=False),
    ]  # fmt: skip


def _unsplit() -> AbstractContextManager[object]:
    return mock.patch.object(
        importlib.import_module("tinker_local_backend.engine.cuda.paged_attention_kernels"), "SPLITS", 1
    )


def _on_the_host(seeds_R: torch.Tensor, positions_R: torch.Tensor) -> torch.Tensor:
    seeds, positions = (tensor.cpu().numpy().astype(np.int64).view(np.uint64) for tensor in (seeds_R, positions_R))
    return torch.from_numpy(token_choice.uniforms(seeds, positions)).to(seeds_R.device)


def _rounded(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.linear(x, weight).to(x.dtype).float()


@torch.inference_mode()
def run(visit: Visit, name: str, model: BaseModel, execution: CudaExecution) -> None:
    """Add a row for each variation, and one for the engine's reference."""
    cell = mark_cell(visit, 0)
    add = visit.findings.table(
        f"Parts of decoding, {name}, {visit.dtype_name}: batch {cell.batch}, context {cell.context}, {cell.adapters} adapters, "
        "without the generator's bookkeeping",
        COLUMNS,
    )
    if not execution.runs(DECODING):
        add(["captured decoding", execution.parts()[DECODING]])
        return
    adapters = frozen_adapters(model, visit.rank, cell.adapters)
    generator = started(visit, model, adapters, cell, turns=4)
    assert isinstance(generator, BurstGenerator)
    generator._allocate_ahead(generator._batches.next_batch(generator._running))
    rows = [_decode_row(row) for row in generator._running]
    results: dict[str, Measured] = {}
    for variation in variations(model, execution, cell.context):
        if visit.findings.time_is_up:
            visit.findings.leave_out(f"parts of decoding: {variation.off}")
            continue
        missing = variation.missing(execution, visit.on_gpu)
        if missing is not None:
            add([variation.off, missing])
            continue
        try:
            results[variation.off] = _measured(visit, generator, rows, variation)
            row = _row(variation.off, variation.baseline, results)
        except Exception as error:
            row = [variation.off, describe(error)]
        visit.free()
        add(row)
    del generator
    visit.free()
    with reference(model, execution):
        results[ALL] = _measured_reference(visit, model, adapters, cell)
    add(_row(ALL, ALL_ON, results))


def _measured(
    visit: Visit, generator: BurstGenerator, rows: Sequence[DecodeRow], variation: DecodeVariation
) -> Measured:
    if not variation.adapters:
        rows = [replace(row, request=replace(row.request, weights=None)) for row in rows]
    with variation.setting():
        # A separate decoder, with the slots and captured steps of this variation.
        graphs = generator.decoder._graphs if variation.captured else Uncaptured()
        model, limit = generator._model, generator.decoder.state.tables.shape[1] * PAGE_TOKENS
        decoder = Decoder(model, generator._cache, graphs, limit)
        burst = decoder.run(rows, variation.steps)  # captures
        runs = visit.scale.bursts * BURST // variation.steps
        times = [_seconds(visit, lambda: decoder.run(rows, variation.steps)) for _ in range(runs)]
        counts = count_step(visit.device, lambda: decoder.run(rows, variation.steps))
    per = variation.steps
    kept = burst if variation.adapters else None
    return Measured(statistics.median(times) / per, counts.launches / per, counts.waits / per, kept)


def _measured_reference(visit: Visit, model: BaseModel, adapters: Sequence, cell: Cell) -> Measured:
    turns = visit.scale.bursts * BURST
    generator = started(visit, model, adapters, cell, turns + 3)
    generator.step()
    times = [_seconds(visit, generator.step) for _ in range(turns)]
    counts = count_step(visit.device, generator.step)
    return Measured(statistics.median(times), counts.launches, counts.waits, None)


def _seconds(visit: Visit, action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    visit.synchronize()
    return time.perf_counter() - start


def _row(off: str, baseline: str, results: dict[str, Measured]) -> list[str]:
    measured, other = results[off], results.get(baseline)
    ratio = "" if other is None else f"{measured.seconds / other.seconds:.2f}"
    ratio += f" (without {baseline})" if ratio and baseline != ALL_ON else ""
    counts = number(measured.launches), number(measured.waits)
    return [off, f"{1e3 * measured.seconds:.2f}", ratio, *counts, _difference(measured, results.get(ALL_ON))]


def _difference(measured: Measured, all_on: Measured | None) -> str:
    """Largest difference of a logprob in the first step among rows with the same token, and the number of other rows."""
    if measured.burst is None or all_on is None or all_on.burst is None or measured is all_on:
        return ""
    same = measured.burst.tokens[0] == all_on.burst.tokens[0]
    largest = np.abs(measured.burst.logprobs[0] - all_on.burst.logprobs[0])[same].max(initial=0.0)
    return f"{largest:.1e}" + (f", {int((~same).sum())} other tokens" if not same.all() else "")
