"""One measurement of peak memory in a fresh process: reads a job as JSON from stdin and writes the answer as JSON to stdout."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import tinker
import torch

from benchmarks.ours import LocalEngine, completion_datum
from benchmarks.workload import TrainingSequence, random_tokens
from tinker_local_backend import TrainingClient

WARM_UP_TOKENS = 64


@dataclass(frozen=True)
class Job:
    """What to run. `count` is the length of the one sequence (training) or the number of requests (waiting)."""

    kind: Literal["training", "waiting"]
    model: str
    vocab: int
    rank: int
    device: str
    threads: int
    count: int
    prompt_tokens: int = 0
    new_tokens: int = 0


@dataclass(frozen=True)
class Peak:
    """Bytes: growth of memory at the peak of the work, and the peak of the whole process (or device)."""

    growth: int
    total: int


def run(job: Job) -> Peak:
    """Load the model, then measure only the job."""
    torch.set_num_threads(job.threads)
    with LocalEngine(Path(job.model), job.rank) as engine:
        if job.kind == "training":
            _train(engine.training, job, WARM_UP_TOKENS)
            return peak_of(lambda: _train(engine.training, job, job.count), job.device)
        return peak_of(lambda: _sample(engine, job), job.device)


def _train(training: TrainingClient, job: Job, tokens: int) -> None:
    sequence = TrainingSequence(random_tokens(job.vocab, tokens + 1, seed=0), prompt_length=1)
    training.forward_backward([completion_datum(sequence)], "cross_entropy").result()


def _sample(engine: LocalEngine, job: Job) -> None:
    """Make all requests at once, each with a different prompt; none stops early."""
    sampler = engine.adapter_sampler()
    params = tinker.SamplingParams(max_tokens=job.new_tokens, temperature=1.0, stop=[], seed=0)
    prompts = [random_tokens(job.vocab, job.prompt_tokens, seed) for seed in range(job.count)]
    futures = [sampler.sample(tinker.ModelInput.from_ints(prompt), 1, params) for prompt in prompts]
    for future in futures:
        future.result()


def peak_of(work: Callable[[], None], device: str) -> Peak:
    """Run the work. The peak is the allocator's on CUDA, else that of resident memory, whose high-water mark Linux can reset."""
    gc.collect()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        highest = torch.cuda.max_memory_allocated()
        return Peak(highest - before, highest)
    ctypes.CDLL(None).malloc_trim(0)
    before = _status_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    work()
    highest = _status_bytes("VmHWM")
    return Peak(highest - before, highest)


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise LookupError(f"/proc/self/status has no {field}")


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the answer is the only thing on stdout
    json.dump(asdict(run(Job(**json.load(sys.stdin)))), answers)
    answers.close()


if __name__ == "__main__":
    main()
