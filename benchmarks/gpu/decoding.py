"""Section 3: one token for every running sequence, at real shapes: tokens per second, bandwidth, launches, waits."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.gpu.counting import Counts, count_step
from benchmarks.gpu.findings import describe
from benchmarks.gpu.models import frozen_adapters, random_model, shape_of
from benchmarks.gpu.visit import Visit
from benchmarks.models import Shape
from benchmarks.report import number
from benchmarks.workload import random_tokens
from tinker_local_backend.engine.admission import BESIDE_SHARE
from tinker_local_backend.engine.base_model import BaseModel
from tinker_local_backend.engine.generation import Generator
from tinker_local_backend.engine.lora import Adapter
from tinker_local_backend.engine.memory import free_cuda_memory, most_tokens
from tinker_local_backend.engine.pages import PAGE_TOKENS
from tinker_local_backend.engine.requests import SamplingRequest
from tinker_local_backend.engine.tickets import SamplingResult, Ticket

WARM_UP_STEPS = 3
SHARE_FOR_CACHE = 0.85
"""of the free memory; the rest is for the activations of a pass"""


@dataclass(frozen=True)
class Cell:
    """One row of the table."""

    batch: int
    context: int
    adapters: int


@dataclass(frozen=True)
class Speed:
    """Median, shortest and longest decode step in seconds, and what one step does."""

    median: float
    low: float
    high: float
    counts: Counts


def run(visit: Visit) -> None:
    """Every shape with every batch, context and number of adapters; the most telling ones first."""
    scale = visit.scale
    for name in scale.decoding_shapes:
        model = random_model(name, visit.device, visit.dtype)
        adapters = frozen_adapters(model, visit.rank, max(scale.adapters))
        add = visit.findings.table(
            f"Decoding, {name}, {visit.dtype_name}, LoRA rank {visit.rank}: one token per sequence and step",
            ["batch", "context", "adapters", "tokens/s", "ms/step", "copy bandwidth", "launches", "host waits"],
        )
        for context, batch, count in itertools.product(scale.contexts, scale.batches, scale.adapters):
            cell = Cell(batch, context, count)
            label = [str(batch), str(context), str(count)]
            if visit.findings.time_is_up:
                visit.findings.leave_out(f"decoding {name}: batch {batch}, context {context}, {count} adapters")
                continue
            if count > batch:  # an adapter needs a row
                continue
            try:
                row = _figures(visit, shape_of(name), cell, measure(visit, model, adapters[:count], cell))
            except Exception as error:
                row = [describe(error)]
            visit.free()  # not in the handler, where the error's frames still hold tensors
            add([*label, *row])
        del model, adapters
        visit.free()


def _figures(visit: Visit, shape: Shape, cell: Cell, speed: Speed) -> list[str]:
    needed = step_bytes(shape, visit.rank, cell, visit.dtype.itemsize)
    share = needed / speed.median / visit.rates["copy"] if "copy" in visit.rates else float("nan")
    milliseconds = [1e3 * value for value in (speed.median, speed.low, speed.high)]
    return [
        number(cell.batch / speed.median),
        f"{milliseconds[0]:.2f} ({milliseconds[1]:.2f} to {milliseconds[2]:.2f})",
        f"{share:.0%}",
        str(speed.counts.launches),
        str(speed.counts.waits),
    ]


def step_bytes(shape: Shape, rank: int, cell: Cell, itemsize: int) -> float:
    """Bytes that a step must read at least: all weights once, every adapter once, every row's keys and values."""
    weights = (shape.parameters + cell.adapters * shape.adapter_parameters(rank)) * itemsize
    return weights + cell.batch * cell.context * shape.kv_bytes_per_token(itemsize)


def measure(visit: Visit, model: BaseModel, adapters: Sequence[Adapter], cell: Cell) -> Speed:
    """Time the steps of the engine's own generator, its bookkeeping included. The cache holds `context` tokens on average.

    Raises MemoryError when the batch does not fit.
    """
    steps = WARM_UP_STEPS + visit.scale.decode_steps
    generator = started(visit, model, adapters, cell, steps)
    times = [_timed_step(visit, generator) for _ in range(steps)][WARM_UP_STEPS:]
    counts = count_step(visit.device, generator.step)
    return Speed(statistics.median(times), min(times), max(times), counts)


def started(visit: Visit, model: BaseModel, adapters: Sequence[Adapter], cell: Cell, steps: int) -> Generator:
    """A generator that has prefilled the whole batch and can take `steps` steps more, and one to be counted.

    Each row has a prompt of its own: the keys of a common one would be read once for all rows.
    """
    pass_tokens = max(most_tokens(visit.device), cell.context)
    passes = -(-cell.batch * cell.context // (pass_tokens // BESIDE_SHARE))  # those that have joined decode meanwhile
    before, tokens = max(1, cell.context - (steps + passes) // 2), steps + passes + 2
    needed = cell.batch * (before + tokens + PAGE_TOKENS)
    if not fits(visit, model, cell, steps):
        size = needed * model.kv_bytes_per_token() / 2**30
        raise MemoryError(f"the cache of this batch takes {size:.0f} GiB and does not fit")
    generator = Generator(model, needed, itertools.count(1).__next__, pass_tokens, max_running=cell.batch)
    errors: list[BaseException] = []

    def complete(outcome: SamplingResult | BaseException) -> None:
        if isinstance(outcome, BaseException):
            errors.append(outcome)

    kinds: list[Adapter | None] = [*adapters] or [None]
    for i in range(cell.batch):
        prompt = tuple(random_tokens(model.vocab_size, before, seed=i))
        request = SamplingRequest(prompt, kinds[i * len(kinds) // cell.batch], 1, max_tokens=tokens, seed=i)
        generator.add(Ticket(request, complete, lambda: False))
    while generator.running < cell.batch:
        generator.step()
        if errors:
            raise errors[0]
    return generator


def fits(visit: Visit, model: BaseModel, cell: Cell, steps: int) -> bool:
    """Whether the cache of this batch fits into what is free."""
    return cell.batch * (cell.context - steps // 2 + steps + 2 + PAGE_TOKENS) <= _cache_tokens(visit, model)


def _timed_step(visit: Visit, generator: Generator) -> float:
    start = time.perf_counter()
    generator.step()
    visit.synchronize()
    return time.perf_counter() - start


def _cache_tokens(visit: Visit, model: BaseModel) -> int:
    free = free_cuda_memory(visit.device) * SHARE_FOR_CACHE if visit.on_gpu else 1 << 30
    return int(free) // model.kv_bytes_per_token()
