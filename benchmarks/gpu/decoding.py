"""Decoding: one token for every running sequence, at real shapes: tokens per second, bandwidth, launches, waits."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from unittest import mock

import torch

from benchmarks.gpu.counting import Counts, count_step
from benchmarks.gpu.findings import describe
from benchmarks.gpu.marks import DECODE_MARKS, percent
from benchmarks.gpu.models import frozen_adapters, random_model, shape_of
from benchmarks.gpu.visit import Visit
from benchmarks.models import Shape
from benchmarks.report import number
from benchmarks.workload import random_tokens
from tinker_local_backend.engine.cuda.decoder import BURST
from tinker_local_backend.engine.cuda.execution import DECODING, CudaExecution
from tinker_local_backend.engine.cuda.generation import BurstGenerator
from tinker_local_backend.engine.cuda.graphs import Uncaptured
from tinker_local_backend.engine.model.base_model import BaseModel
from tinker_local_backend.engine.model.lora import Adapter
from tinker_local_backend.engine.model.memory import free_cuda_memory, max_pass_tokens
from tinker_local_backend.engine.sampling.generation import Generator
from tinker_local_backend.engine.sampling.pages import PAGE_TOKENS
from tinker_local_backend.engine.sampling.requests import SamplingRequest
from tinker_local_backend.engine.sampling.sampler import SamplingResult, Ticket

SHARE_FOR_CACHE = 0.85
"""share of the free memory; the rest is for the activations of a pass"""


@dataclass(frozen=True)
class Cell:
    """One row of the table."""

    batch: int
    context: int
    adapters: int

    @property
    def label(self) -> list[str]:
        return [str(self.batch), str(self.context), str(self.adapters)]


@dataclass(frozen=True)
class Speed:
    """Median, shortest and longest time per token of all rows, in seconds, and the host's launches and waits."""

    median: float
    low: float
    high: float
    counts: Counts
    """of one generator step, which samples `tokens` tokens per row"""
    tokens: int


def run(visit: Visit) -> None:
    """Measure every shape with every batch, context and number of adapters; the most informative ones first."""
    scale = visit.scale
    for name in scale.decoding_shapes:
        if visit.findings.time_is_up:
            visit.findings.leave_out(f"decoding {name}")
            continue
        model = random_model(name, visit.device, visit.dtype)
        adapters = frozen_adapters(model, visit.rank, max(scale.adapters))
        add = visit.findings.table(
            f"Decoding, {name}, {visit.dtype_name}, LoRA rank {visit.rank}: one token per sequence, the engine's bookkeeping "
            f"included; decoding is {'captured' if is_captured(model) else 'the reference'}",
            ["batch", "context", "adapters", "tokens/s", "ms/token", "copy bandwidth", "launches/token", "waits/token",
             "ms/token, not captured"],
        )  # fmt: skip
        for cell in cells(visit, name):
            if visit.findings.time_is_up:
                visit.findings.leave_out(f"decoding {name}: batch {cell.batch}, context {cell.context}")
                continue
            is_mark = cell == mark_cell(visit, 0)
            try:
                row = _figures(visit, name, cell, model, adapters[: cell.adapters], eager_too=is_mark)
            except Exception as error:
                row = [describe(error)]
            visit.free()  # not in the handler, where the error's frames still hold tensors
            add([*cell.label, *row])
        del model, adapters
        visit.free()


def cells(visit: Visit, shape: str) -> Iterator[Cell]:
    """The cells of the marks first, and for shapes after the first only these. There are at most as many adapters as rows."""
    scale = visit.scale
    marked = [mark_cell(visit, i) for i in range(len(scale.mark_batches))]
    yield from marked
    if shape == scale.decoding_shapes[0]:
        grid = itertools.product(scale.contexts, scale.batches, scale.adapters)
        every = (Cell(batch, context, count) for context, batch, count in grid if count <= batch)
        yield from (Cell(batch, context, min(batch, max(scale.adapters))) for batch, context in scale.long_contexts)
        yield from (cell for cell in every if cell not in marked)


def mark_cell(visit: Visit, index: int) -> Cell:
    """The cell in which marks.DECODE_MARKS[index] is measured."""
    return Cell(visit.scale.mark_batches[index], visit.scale.contexts[0], max(visit.scale.adapters))


def is_captured(model: BaseModel) -> bool:
    """Whether this model decodes in captured steps."""
    return isinstance(model.execution, CudaExecution) and model.execution.runs(DECODING)


def _figures(
    visit: Visit, name: str, cell: Cell, model: BaseModel, adapters: Sequence[Adapter], eager_too: bool
) -> list[str]:
    speed, eager = measure(visit, model, adapters, cell, eager_too)
    needed = step_bytes(shape_of(name), visit.rank, cell, visit.dtype.itemsize)
    share = needed / speed.median / visit.rates["copy"] if "copy" in visit.rates else float("nan")
    if name == visit.scale.decoding_shapes[0]:
        for i, mark in enumerate(DECODE_MARKS):
            if cell == mark_cell(visit, i):
                visit.findings.mark(mark.key, share)
    visit.findings.record(
        "decoding",
        shape=name,
        batch=cell.batch,
        context=cell.context,
        adapters=cell.adapters,
        rate=cell.batch / speed.median,
        share=share,
    )
    milliseconds = [1e3 * value for value in (speed.median, speed.low, speed.high)]
    return [
        number(cell.batch / speed.median),
        f"{milliseconds[0]:.2f} ({milliseconds[1]:.2f} to {milliseconds[2]:.2f})",
        percent(share),
        number(speed.counts.launches / speed.tokens),
        number(speed.counts.waits / speed.tokens),
        "" if eager is None else f"{1e3 * eager:.2f}",
    ]


def step_bytes(shape: Shape, rank: int, cell: Cell, itemsize: int) -> float:
    """Minimum bytes that a step reads: all weights once, every adapter once, every row's keys and values."""
    weights = (shape.parameters + cell.adapters * shape.adapter_parameters(rank)) * itemsize
    return weights + cell.batch * cell.context * shape.kv_bytes_per_token(itemsize)


def measure(
    visit: Visit, model: BaseModel, adapters: Sequence[Adapter], cell: Cell, eager_too: bool = False
) -> tuple[Speed, float | None]:
    """Time steps of the engine's own generator. The cache holds `context` tokens on average.

    With `eager_too`, the second result is the time per token of the same steps without capture. Raises MemoryError if the batch
    does not fit.
    """
    turns = visit.scale.bursts
    generator = started(visit, model, adapters, cell, turns=2 * turns + 3)
    tokens = BURST if isinstance(generator, BurstGenerator) else 1
    generator.step()  # captures
    times = [_seconds(visit, generator) / tokens for _ in range(turns)]
    counts = count_step(visit.device, generator.step)
    speed = Speed(statistics.median(times), min(times), max(times), counts, tokens)
    if not eager_too or not isinstance(generator, BurstGenerator):
        return speed, None
    uncapture(generator)
    generator.step()
    return speed, statistics.median(_seconds(visit, generator) / tokens for _ in range(turns))


def uncapture(generator: BurstGenerator) -> None:
    """Make the generator run its steps without capture."""
    generator.decoder._graphs = Uncaptured()
    generator.decoder._captured.clear()


def started(visit: Visit, model: BaseModel, adapters: Sequence[Adapter], cell: Cell, turns: int) -> Generator:
    """A generator with the whole batch running and room for `turns` steps, with `context` tokens halfway through them.

    Each row has a different prompt, because the keys of a shared one would be read once for all rows. Prompts are admitted as
    usual but not computed: the contents of the cache (zeros) do not affect the time to read it.

    Raises MemoryError if the batch does not fit.
    """
    tokens = turns * (BURST if is_captured(model) else 1) + 2
    before = max(1, cell.context - tokens // 2)
    needed = cell.batch * (before + tokens + 2 * PAGE_TOKENS)
    if needed > _cache_tokens(visit, model):
        size = needed * model.kv_bytes_per_token() / 2**30
        raise MemoryError(f"the cache of this batch takes {size:.0f} GiB and does not fit")
    generator = _generator(visit, model, needed, max(max_pass_tokens(visit.device), before), cell.batch)
    errors: list[BaseException] = []

    def complete(outcome: SamplingResult | BaseException) -> None:
        if isinstance(outcome, BaseException):
            errors.append(outcome)

    def nothing(tokens_T: torch.Tensor, *rest: object) -> torch.Tensor:
        return torch.zeros(len(tokens_T), model.config.hidden_size, dtype=model.dtype, device=model.device)

    kinds: list[Adapter | None] = [*adapters] or [None]
    for i in range(cell.batch):
        prompt = tuple(random_tokens(model.vocab_size, before, seed=i))
        request = SamplingRequest(prompt, kinds[i * len(kinds) // cell.batch], 1, max_tokens=tokens, seed=i)
        generator.add(Ticket(request, complete, lambda: False))
    generator._recover = _raise  # an error is this row's result: nothing is retried
    joined = mock.patch.object(model, "hidden_states", nothing), mock.patch.object(generator, "_decode", lambda: None)
    with joined[0], joined[1]:
        while generator.stats.running < cell.batch:
            generator.step()
            if errors:
                raise errors[0]
    return generator


def _raise(affected: Sequence[Ticket], rows: int, error: Exception) -> None:
    raise error


def _generator(visit: Visit, model: BaseModel, tokens: int, pass_tokens: int, batch: int) -> Generator:
    seeds = itertools.count(1).__next__
    if is_captured(model):
        assert isinstance(model.execution, CudaExecution)
        return BurstGenerator(model, tokens, seeds, model.execution.graphs, pass_tokens, batch)
    return Generator(model, tokens, seeds, pass_tokens, batch)


def _seconds(visit: Visit, generator: Generator) -> float:
    start = time.perf_counter()
    generator.step()
    visit.synchronize()
    return time.perf_counter() - start


def _cache_tokens(visit: Visit, model: BaseModel) -> int:
    free = free_cuda_memory(visit.device) * SHARE_FOR_CACHE if visit.on_gpu else 1 << 30
    return int(free) // model.kv_bytes_per_token()
