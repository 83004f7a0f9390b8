"""Peak memory: of training by number of tokens, at two vocabulary sizes, and of queued sampling requests.

Every point is measured in a fresh process. A single sequence cannot be split into micro-batches, so its length gives the slope.

python -m benchmarks.memory shape=small
"""

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import chz

from benchmarks.config import CommonConfig, environment, run_benchmark
from benchmarks.errors import BenchmarkError
from benchmarks.memory_child import Job, Peak
from benchmarks.models import SHAPES, Shape, ensure_model, with_vocabulary
from benchmarks.report import Report, Table, finish, number

PROMPT_TOKENS, NEW_TOKENS = 100, 128
"""tokens of each queued request"""


@chz.chz(typecheck=True)
class Config(CommonConfig):
    """Keys of `python -m benchmarks.memory`. Only the local engine is measured."""

    tokens: tuple[int, ...] = chz.field(default=(1024, 2048, 4096, 8192), doc="lengths of the one sequence trained on")
    vocabularies: tuple[int, ...] = chz.field(default=(8192, 150_000), doc="vocabulary sizes of the shape")
    long_tokens: int = chz.field(
        default=16384, doc="one more sequence, at the largest vocabulary", validator=chz.validators.gt(0)
    )
    waiting: int = chz.field(
        default=200, doc="sampling requests submitted at once, each of 100 + 128 tokens", validator=chz.validators.gt(1)
    )
    kv_budget: int = chz.field(
        default=8192, doc="TINKER_LOCAL_KV_CACHE_TOKENS for those requests", validator=chz.validators.gt(0)
    )


def run(config: Config) -> Report:
    """Measure and report; writes nothing."""
    if len(config.tokens) < 2:
        raise BenchmarkError(f"tokens={config.tokens}: give at least two lengths, a slope needs them")
    with environment(config):
        report = Report.start("memory", config)
        report.tables.append(_training_table(config, report))
        report.tables.append(_long_sequence_table(config))
        report.tables.append(_waiting_table(config))
    return report


def _training_table(config: Config, report: Report) -> Table:
    growth = {v: [_measure_training(config, v, tokens).growth for tokens in config.tokens] for v in config.vocabularies}
    report.measurements["training growth, bytes"] = {
        str(vocab): dict(zip(map(str, config.tokens), values, strict=True)) for vocab, values in growth.items()
    }
    rows = [
        [f"{tokens:,} tokens", *(f"{number(growth[v][i] / 2**20)} MiB" for v in config.vocabularies)]
        for i, tokens in enumerate(config.tokens)
    ]
    slopes = [f"{slope(config.tokens, growth[v]):,.0f} bytes/token" for v in config.vocabularies]
    heads = ["one sequence of", *(f"vocabulary {v:,}" for v in config.vocabularies)]
    return Table("Growth at the peak of one forward_backward", heads, [*rows, ["slope", *slopes]])


def _long_sequence_table(config: Config) -> Table:
    vocab = max(config.vocabularies)
    peak = _measure_training(config, vocab, config.long_tokens)
    row = [
        f"{config.long_tokens:,}",
        f"{vocab:,}",
        *(f"{value / 2**30:.2f} GiB" for value in (peak.growth, peak.total)),
    ]
    return Table("One long sequence", ["tokens", "vocabulary", "growth at the peak", "peak with the model"], [row])


def _waiting_table(config: Config) -> Table:
    shape = SHAPES[config.shape]
    model = ensure_model(config.shape, shape, config.models_dir)
    rows = []
    for count in (1, config.waiting):
        job = Job("waiting", str(model), shape.vocab, config.rank, config.device, config.threads, count)
        job = replace(job, prompt_tokens=PROMPT_TOKENS, new_tokens=NEW_TOKENS)
        peak = measure_in_child(job, config.kv_budget)
        rows.append([f"growth at the peak, {count:,} requests", _mib(peak.growth)])
    bytes_per_token = shape.kv_bytes_per_token(2 if config.dtype == "bfloat16" else 4)
    demand = config.waiting * (PROMPT_TOKENS + NEW_TOKENS)
    rows.append([f"KV budget, {config.kv_budget:,} tokens", _mib(config.kv_budget * bytes_per_token)])
    rows.append([f"KV cache if all ran at once, {demand:,} tokens", _mib(demand * bytes_per_token)])
    return Table("Waiting sample requests under a KV budget", ["", "memory"], rows)


def _mib(count: float) -> str:
    return f"{number(count / 2**20)} MiB"


def slope(lengths: Sequence[int], values: Sequence[float]) -> float:
    """Least-squares slope."""
    return statistics.linear_regression(lengths, values).slope


def _measure_training(config: Config, vocab: int, tokens: int) -> Peak:
    shape: Shape = with_vocabulary(SHAPES[config.shape], vocab)
    model = ensure_model(f"{config.shape}-v{vocab}", shape, config.models_dir)
    return measure_in_child(Job("training", str(model), vocab, config.rank, config.device, config.threads, tokens))


def measure_in_child(job: Job, kv_budget: int | None = None) -> Peak:
    """Run the job in a fresh process with this process's environment. Raises BenchmarkError if it fails."""
    environ = {**os.environ, "OMP_NUM_THREADS": str(job.threads)}
    if kv_budget is not None:
        environ["TINKER_LOCAL_KV_CACHE_TOKENS"] = str(kv_budget)
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.memory_child"],
        input=json.dumps(asdict(job)),
        capture_output=True,
        text=True,
        env=environ,
        cwd=Path(__file__).resolve().parents[1],
    )
    if done.returncode != 0:
        print(done.stderr, file=sys.stderr)
        raise BenchmarkError(f"{job.kind} with count={job.count} failed in its process (exit {done.returncode})")
    peak = Peak(**json.loads(done.stdout))
    print(f"{job.kind} {job.count}, vocabulary {job.vocab}: {_mib(peak.growth)}", file=sys.stderr, flush=True)
    return peak


def main(config: Config) -> None:
    finish(run(config), config.output)


if __name__ == "__main__":
    run_benchmark(main)
