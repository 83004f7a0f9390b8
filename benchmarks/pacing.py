"""Cost of each pacing when rewards are late and uneven: on the tiny model, and on a service with scripted times.

    python -m benchmarks.pacing
    python -m benchmarks.pacing slow_seconds=5 slow_share=0.1 steps=4

Most groups get their rewards after `fast_seconds`, and a share of them, drawn by seed, after `slow_seconds`. The environment
sleeps, so a step that trains on its own samples takes at least `slow_seconds` on any machine. A stream can hide as much of that
as its training takes, so the second table has a scripted service whose sampling and training take time too, as on a GPU; it does
not depend on the load of this machine. Seconds are those of the loop, from its first step to its last.
"""

import asyncio
import dataclasses
import functools
import json
import os
import random
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any
from unittest import mock

import chz
import tinker

from benchmarks.config import RESULTS
from benchmarks.report import Report, Table, finish, number
from benchmarks.scripted import ScriptedService
from recipes import rl_basic
from tinker_cookbook import backends
from tinker_cookbook.cli_utils import run_recipe
from tinker_cookbook.completers import StopCondition
from tinker_cookbook.data.shipped import shipped_model
from tinker_cookbook.rl import train
from tinker_cookbook.rl.problem_env import OneTurnGroupBuilder
from tinker_cookbook.rl.types import ActionExtra, Env, EnvGroupBuilder, RLDataset, RLDatasetBuilder, StepResult
from tinker_cookbook.utils.seeds import derive_seed

_QUIET: dict[str, Any] = {"eval_every": 0, "save_every": 0, "num_groups_to_log": 0, "on_zero_advantages": "skip"}


@chz.chz(typecheck=True)
class PacingConfig:
    """Keys of `python -m benchmarks.pacing`."""

    steps: int = chz.field(default=8, doc="steps of each run", validator=chz.validators.gt(0))
    groups: int = chz.field(default=32, doc="groups of a batch", validator=chz.validators.gt(1))
    members: int = chz.field(default=8, doc="rollouts of a group", validator=chz.validators.gt(1))
    max_tokens: int = chz.field(default=64, doc="longest reply", validator=chz.validators.gt(0))
    fast_seconds: float = chz.field(default=0.1, doc="wait of most groups for their rewards")
    slow_seconds: float = chz.field(default=2.0, doc="wait of the other groups")
    slow_share: float = chz.field(default=0.25, doc="probability that a group is one of the others")
    minibatches: int = chz.field(default=8, doc="passes of a stream's step", validator=chz.validators.gt(0))
    max_steps_off_policy: int = chz.field(default=2, doc="batches sampled ahead", validator=chz.validators.gt(0))
    sample_seconds: float = chz.field(default=1.0, doc="scripted service: seconds per reply")
    train_seconds: float = chz.field(default=2.0, doc="scripted service: seconds of training on a whole batch")
    seed: int = chz.field(default=0, doc="seed of problems, replies and latencies")
    output: str = chz.field(default=RESULTS, doc="folder for the results (JSON and markdown)")


def latency(config: PacingConfig, batch: int, index_in_batch: int) -> float:
    """Seconds that a group waits for its rewards."""
    drawn = random.Random(derive_seed(config.seed, "latency", batch, index_in_batch)).random()
    return config.slow_seconds if drawn < config.slow_share else config.fast_seconds


class SlowSum(rl_basic.ArithmeticEnv):
    """A sum whose reward is delayed."""

    def __init__(self, *args: Any, seconds: float, **options: Any):
        super().__init__(*args, **options)
        self.seconds = seconds

    async def step(self, action: list[int], *, extra: ActionExtra | None = None) -> StepResult:
        await asyncio.sleep(self.seconds)
        return await super().step(action, extra=extra)


@dataclass(frozen=True)
class SlowSums(RLDataset):
    """The problems of `rl_basic`, each with its latency."""

    problems: RLDataset
    config: PacingConfig

    def get_batch(self, index: int) -> Sequence[EnvGroupBuilder]:
        slowed = []
        for index_in_batch, builder in enumerate(self.problems.get_batch(index)):
            assert isinstance(builder, OneTurnGroupBuilder) and isinstance(builder.env_thunk, functools.partial)
            thunk, seconds = builder.env_thunk, latency(self.config, index, index_in_batch)
            slow = functools.partial(SlowSum, *thunk.args, **thunk.keywords, seconds=seconds)
            slowed.append(dataclasses.replace(builder, env_thunk=slow))
        return slowed

    def __len__(self) -> int:
        return len(self.problems)


class SlowNumber(Env):
    """Rewards the number that the scripted service samples, after a delay."""

    def __init__(self, prompt: list[int], seconds: float):
        self.prompt, self.seconds = tinker.ModelInput.from_ints(prompt), seconds

    async def initial_observation(self) -> tuple[tinker.ModelInput, StopCondition]:
        return self.prompt, []

    async def step(self, action: list[int], *, extra: ActionExtra | None = None) -> StepResult:
        await asyncio.sleep(self.seconds)
        return StepResult(float(action[0]), True, self.prompt, [])


@dataclass(frozen=True)
class SlowNumbers(EnvGroupBuilder):
    batch: int
    index_in_batch: int
    config: PacingConfig

    async def make_envs(self) -> Sequence[SlowNumber]:
        seconds = latency(self.config, self.batch, self.index_in_batch)
        return [SlowNumber([self.index_in_batch, i, self.batch], seconds) for i in range(self.config.members)]


@dataclass(frozen=True)
class SlowNumberDataset(RLDataset):
    config: PacingConfig

    def get_batch(self, index: int) -> Sequence[EnvGroupBuilder]:
        return [SlowNumbers(index, index_in_batch, self.config) for index_in_batch in range(self.config.groups)]

    def __len__(self) -> int:
        return self.config.steps


@chz.chz(typecheck=True)
class SlowBuilder(RLDatasetBuilder):
    """The slow problems, without an evaluation set."""

    config: PacingConfig = chz.field(doc="how slow, and how many")
    problems: RLDatasetBuilder | None = chz.field(
        default=None, doc="sums for the tiny model; None: numbers for the script"
    )

    async def __call__(self) -> tuple[RLDataset, None]:
        if self.problems is None:
            return SlowNumberDataset(self.config), None
        training, _ = await self.problems()
        return SlowSums(training, self.config), None


def scripted_service(config: PacingConfig) -> ScriptedService:
    """The service of the second table."""
    return ScriptedService(config.sample_seconds, config.train_seconds, config.groups * config.members)


def pacings(config: PacingConfig) -> dict[str, dict[str, Any]]:
    """Row of the table -> keys of its run."""
    ahead, passes = config.max_steps_off_policy, config.minibatches
    by_time: dict[str, Any] = {"deterministic": False}
    stream, asynchronous = train.StreamMinibatchConfig, train.AsyncConfig
    return {
        "synchronous": {},
        f"stream, {passes} passes, deterministic": {"stream_minibatch_config": stream(num_minibatches=passes)},
        f"stream, {passes} passes": {"stream_minibatch_config": stream(num_minibatches=passes, **by_time)},
        f"{ahead} ahead, deterministic": {"async_config": asynchronous(max_steps_off_policy=ahead)},
        f"{ahead} ahead": {"async_config": asynchronous(max_steps_off_policy=ahead, **by_time)},
        f"{ahead} ahead, too_old=drop": {
            "async_config": asynchronous(max_steps_off_policy=ahead, too_old="drop", **by_time)
        },
    }


def tiny_config(config: PacingConfig, folder: str, keys: dict[str, Any]) -> train.Config:
    """A run of `rl_basic` with late rewards."""
    cli = rl_basic.CLIConfig(
        groups_per_batch=config.groups,
        group_size=config.members,
        max_steps=config.steps,
        max_tokens=config.max_tokens,
        seed=config.seed,
        log_path=folder,
        behavior_if_log_dir_exists="delete",
        **_QUIET,
        **keys,
    )
    settled = rl_basic.build_config(cli)
    return chz.replace(settled, dataset_builder=SlowBuilder(config=config, problems=settled.dataset_builder))


def scripted_config(config: PacingConfig, folder: str, keys: dict[str, Any]) -> train.Config:
    """A run on the scripted service."""
    return train.Config(
        dataset_builder=SlowBuilder(config=config),
        learning_rate=0.5,
        model_name=shipped_model("tiny_chat"),
        recipe_name="pacing",
        max_tokens=4,
        log_path=folder,
        write_records=False,
        rollout_json_export=False,
        seed=config.seed,
        kl_alarm=0.0,
        **_QUIET,
        **keys,
    )


async def run(
    make: Callable[[PacingConfig, str, dict[str, Any]], train.Config], config: PacingConfig, keys: dict[str, Any]
):
    """Make one run in a temporary folder. Returns its rows."""
    with tempfile.TemporaryDirectory() as folder:
        await train.main(make(config, folder, keys))
        lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if "groups/sampled" in row]


async def compare(
    report: Report, title: str, make: Callable[[PacingConfig, str, dict[str, Any]], train.Config], config: PacingConfig
) -> None:
    """Run all pacings and add a table of them."""
    columns = [
        "pacing",
        "seconds",
        "of synchronous",
        "trained on",
        "filtered",
        "dropped",
        "age of a group, mean (most)",
    ]
    table = Table(title, columns, [])
    report.tables.append(table)
    synchronous = 0.0
    for name, keys in pacings(config).items():
        rows = await run(make, config, keys)
        seconds = rows[-1]["progress/seconds"]
        synchronous = synchronous or seconds
        counts = {end: sum(row[f"groups/{end}"] for row in rows) for end in ("trained", "filtered", "stale")}
        age = fmean(row["step"] - row["sampling_client/step_mean"] for row in rows)
        most = max(row["step"] - row["sampling_client/step_min"] for row in rows)
        table.rows.append(
            [
                name,
                number(seconds),
                f"{seconds / synchronous:.2f}",
                *map(str, counts.values()),
                f"{age:.2f} ({most:.0f})",
            ]
        )
        report.measurements[f"{title}: {name}"] = {
            "seconds": seconds,
            **counts,
            "seconds_of_steps": [row["time/total"] for row in rows],
        }


async def measure(config: PacingConfig) -> Report:
    """Measure both tables, after a first step that loads the model."""
    report = Report.of_recipes("pacing")
    report.measurements["config"] = {name: getattr(config, name) for name in chz.chz_fields(config) if name != "output"}
    waits = (
        f"{config.steps} steps of {config.groups} groups x {config.members}; rewards after {config.fast_seconds:g} s, "
        f"{config.slow_share:.0%} of groups {config.slow_seconds:g} s"
    )
    await run(tiny_config, chz.replace(config, steps=1), {})
    await compare(report, f"tiny model: {waits}", tiny_config, config)
    took = f"sampling {config.sample_seconds:g} s, training on a batch {config.train_seconds:g} s"
    with mock.patch.object(backends, "create_service_client", lambda *_: scripted_service(config)):
        await compare(report, f"scripted service ({took}): {waits}", scripted_config, config)
    return report


async def main(config: PacingConfig) -> None:
    """Measure, print, and write the result."""
    with tempfile.TemporaryDirectory() as home:
        os.environ["TINKER_LOCAL_HOME"] = home
        report = await measure(config)
    finish(report, config.output)


if __name__ == "__main__":
    run_recipe(PacingConfig, main)
