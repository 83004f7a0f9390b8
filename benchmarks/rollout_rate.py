"""Rollouts per second, from few to very many at once: short and long replies, one prompt for all or one for each group.

python -m benchmarks.rollout_rate counts=64,256,1024,4096
"""

import itertools
import random
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

import chz
import tinker

from benchmarks.config import ComparisonConfig, environment, run_benchmark
from benchmarks.errors import BenchmarkError
from benchmarks.harness import Contender, Measurement, measure
from benchmarks.models import FIRST_WORD_ID, SHAPES, ensure_model
from benchmarks.ours import LocalEngine, count_tokens
from benchmarks.report import Report, Table, finish, number
from benchmarks.workload import GROUP_SIZE
from tinker_local_backend import SamplingClient

PROMPT_TOKENS = 64
FULL_BATCH = 512
"""Sequences that the engine runs at once; from this number on, the rate should not depend on the number of rollouts."""


@chz.chz(typecheck=True)
class Config(ComparisonConfig):
    """Keys of `python -m benchmarks.rollout_rate`. There are no peers."""

    counts: tuple[int, ...] = chz.field(
        default=(64, 256, 1024, 4096, 16384), doc=f"rollouts at once, multiples of {GROUP_SIZE}"
    )
    replies: tuple[int, ...] = chz.field(default=(16, 128), doc="tokens of every reply: short ones, and long ones")
    repetitions: int = chz.field(default=3, doc="measured repetitions of each number", validator=chz.validators.gt(0))


@dataclass(frozen=True)
class Case:
    """A number of rollouts of `reply` tokens each."""

    rollouts: int
    reply: int
    one_prompt: bool

    @property
    def name(self) -> str:
        return f"{self.rollouts} rollouts of {self.reply} tokens, {'one prompt' if self.one_prompt else 'many prompts'}"


def run(config: Config) -> Report:
    """Measure and report; writes nothing."""
    if config.peers:
        raise BenchmarkError("peers: rollout_rate has none; leave the key out")
    if wrong := [count for count in config.counts if count < 1 or count % GROUP_SIZE]:
        raise BenchmarkError(f"counts={wrong[0]} is not a multiple of the group size {GROUP_SIZE}")
    shape = SHAPES[config.shape]
    cases = [Case(*case) for case in itertools.product(config.counts, config.replies, (False, True))]
    with environment(config), ExitStack() as stack:
        report = Report.start("rollout_rate", config)
        engine = stack.enter_context(LocalEngine(ensure_model(config.shape, shape, config.models_dir), config.rank))
        sampler = engine.base_sampler()
        results = measure([Contender(c.name, _work(engine, sampler, c, shape.vocab), True) for c in cases], config)
        report.measurements["Rollouts per second"] = [result.to_json() for result in results]
        report.tables.append(rates_table(cases, results))
    return report


def _work(engine: LocalEngine, sampler: SamplingClient, case: Case, vocab: int) -> Callable[[int], int]:
    """Groups of samples, all submitted at once, with different prompts in each round."""

    def work(number: int) -> int:
        local = engine.service._engine
        local.submit("evict prefixes", local.evict_prefixes).result()
        rng = random.Random(number)
        groups = case.rollouts // GROUP_SIZE
        prompts = [
            [rng.randrange(FIRST_WORD_ID, vocab) for _ in range(PROMPT_TOKENS)]
            for _ in range(1 if case.one_prompt else groups)
        ]
        params = tinker.SamplingParams(max_tokens=case.reply, temperature=1.0, stop=[])
        futures = [
            sampler.sample(tinker.ModelInput.from_ints(prompts[i % len(prompts)]), GROUP_SIZE, params)
            for i in range(groups)
        ]
        return count_tokens([list(future.result().sequences) for future in futures])

    return work


def rates_table(cases: list[Case], results: list[Measurement]) -> Table:
    """Rates, and each as a share of the best of its kind among those with a full batch."""
    rates = {case: case.rollouts / result.seconds.median for case, result in zip(cases, results, strict=True)}
    best: dict[tuple[int, bool], float] = {}
    for case, rate in rates.items():
        if case.rollouts >= FULL_BATCH:
            best[case.reply, case.one_prompt] = max(rate, best.get((case.reply, case.one_prompt), 0.0))
    rows = []
    for case, rate in rates.items():
        of_best = f"{rate / best[case.reply, case.one_prompt]:.0%}" if case.rollouts >= FULL_BATCH else ""
        prompts = "one" if case.one_prompt else f"{case.rollouts // GROUP_SIZE}"
        seconds = case.rollouts / rate
        cells = [number(case.rollouts), number(case.reply), prompts, number(seconds), number(rate)]
        rows.append([*cells, number(rate * case.reply), of_best])
    title = f"Rollouts per second, {GROUP_SIZE} samples per request; with {FULL_BATCH} and more the batch is full"
    return Table(
        title, ["rollouts", "tokens each", "prompts", "seconds", "rollouts/s", "tokens/s", "of the best, full"], rows
    )


def main(config: Config) -> None:
    finish(run(config), config.output)


if __name__ == "__main__":
    run_benchmark(main)
