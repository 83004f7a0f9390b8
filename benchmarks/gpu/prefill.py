"""Prefill of new prompts, long prompts and prompts with a cached prefix; and memory left reserved by a shrinking rollout."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import tinker
import torch

from benchmarks.gpu.findings import describe
from benchmarks.gpu.models import fill_adapter, random_model
from benchmarks.gpu.visit import Visit
from benchmarks.ours import LocalEngine
from benchmarks.report import number
from benchmarks.workload import random_tokens
from tinker_local_backend import SamplingClient
from tinker_local_backend.engine.cuda.generation import BurstGenerator
from tinker_local_backend.engine.model.base_model import BaseModel


@dataclass(frozen=True)
class Prompts:
    """`count` prompts of `length` tokens, of which the first `cached` are in the cache."""

    count: int
    length: int
    cached: int = 0


def run(visit: Visit) -> None:
    """Measure the first decoding shape, with an adapter on every linear."""
    model = random_model(visit.scale.decoding_shapes[0], visit.device, visit.dtype)
    with LocalEngine.of(model, visit.rank, train_unembed=True) as engine:
        fill_adapter(engine.training._run.state.adapter, seed=1)
        sampler = engine.adapter_sampler()
        add = visit.findings.table(
            f"Prompts, {visit.scale.decoding_shapes[0]}, {visit.dtype_name}, LoRA rank {visit.rank}: one token is drawn"
            " after each",
            ["prompts", "tokens", "of them in the cache", "seconds", "computed tokens/s"],
        )
        sampler.sample(_input(random_tokens(512, visit.scale.prompts[0][1], seed=99)), 1, _params(1)).result()
        for i, sizes in enumerate(visit.scale.prompts):
            prompts = Prompts(*sizes)
            if visit.findings.time_is_up:
                visit.findings.leave_out(f"prompts: {prompts}")
                continue
            try:
                seconds = _measured(sampler, prompts, seed=1000 * (i + 1))
                computed = prompts.count * (prompts.length - prompts.cached)
                row = [f"{seconds:.2f}", number(computed / seconds)]
            except Exception as error:
                row = [describe(error)]
            add([str(prompts.count), f"{prompts.length:,}", f"{prompts.cached:,}", *row])
        with visit.findings.guarded("memory of captured steps"):
            _pool(visit, engine, model, sampler)


def _measured(sampler: SamplingClient, prompts: Prompts, seed: int) -> float:
    tokens = [random_tokens(512, prompts.length, seed + i) for i in range(prompts.count)]
    if prompts.cached:
        _all([sampler.sample(_input(prompt[: prompts.cached]), 1, _params(1)) for prompt in tokens])
    start = time.perf_counter()
    _all([sampler.sample(_input(prompt), 1, _params(1)) for prompt in tokens])
    return time.perf_counter() - start


def _pool(visit: Visit, engine: LocalEngine, model: BaseModel, sampler: SamplingClient) -> None:
    """Measure memory with rows that end one after the other, so that a step is captured for every batch size."""
    rows = max(visit.scale.batches)
    add = visit.findings.table(
        f"A rollout that shrinks from {rows} rows to one: memory of the process on the device",
        ["when", "reserved by torch", "captured steps", "seconds"],
    )

    def state() -> list[str]:
        generator = engine.service._engine._generators[model.name]
        steps = len(generator.decoder._captured) if isinstance(generator, BurstGenerator) else 0
        reserved = torch.cuda.memory_reserved(visit.device) / 2**30 if visit.on_gpu else float("nan")
        return [f"{reserved:.2f} GiB", str(steps)]

    add(["before", *state(), ""])
    for when in ("after the first", "after the second"):
        start = time.perf_counter()
        prompt = _input(random_tokens(512, 32, seed=5))
        _all([sampler.sample(prompt, 1, _params(8 + i, seed=i)) for i in range(rows)])
        add([when, *state(), f"{time.perf_counter() - start:.1f}"])


def _params(tokens: int, seed: int = 0) -> tinker.SamplingParams:
    return tinker.SamplingParams(max_tokens=tokens, seed=seed, stop=[])


def _input(tokens: Sequence[int]) -> tinker.ModelInput:
    return tinker.ModelInput.from_ints(list(tokens))


def _all(futures: Sequence) -> None:
    for future in futures:
        future.result()
