"""What the loop's tests share: a dataset over token ids, a config on the fakes, and the rows that a run wrote."""

import asyncio
import json
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import chz
import pytest
import tinker

from tests.killing import untimed_row
from tests.waiting import HANG_SECONDS
from tinker_cookbook.data.shipped import EXAMPLE_DATA
from tinker_cookbook.exceptions import UntrainedRunError
from tinker_cookbook.rl import train
from tinker_cookbook.rl.types import Action, ActionExtra, Env, EnvGroupBuilder, RLDataset, RLDatasetBuilder, StepResult
from tinker_cookbook.runs.evaluation import SamplingClientEvaluator

TINY = str(EXAMPLE_DATA / "tiny_chat")


class NumberEnv(Env):
    """Shows [group, member, batch] and rewards the first sampled id, or 1 whatever is sampled."""

    def __init__(self, prompt: list[int], constant: bool):
        self.prompt, self.constant = tinker.ModelInput.from_ints(prompt), constant

    async def initial_observation(self):
        return self.prompt, [0]

    async def step(self, action: Action, *, extra: ActionExtra | None = None) -> StepResult:
        return StepResult(1.0 if self.constant else float(action[0]), True, self.prompt, [0], {"first": action[0]})


class NumberGroup(EnvGroupBuilder):
    def __init__(self, batch: int, group: int, members: int, constant: bool):
        self.batch, self.group, self.members, self.constant = batch, group, members, constant

    async def make_envs(self) -> Sequence[Env]:
        return [NumberEnv([self.group, i, self.batch], self.constant) for i in range(self.members)]

    def logging_tags(self) -> list[str]:
        return ["even" if self.group % 2 == 0 else "odd"]


class NumberDataset(RLDataset):
    def __init__(self, batches: int, groups: int, members: int, constant_groups: int):
        self.batches, self.groups, self.members, self.constant_groups = batches, groups, members, constant_groups

    def get_batch(self, index: int) -> list[NumberGroup]:
        return [NumberGroup(index, g, self.members, g < self.constant_groups) for g in range(self.groups)]

    def __len__(self) -> int:
        return self.batches


@chz.chz(typecheck=True)
class NumberDatasetBuilder(RLDatasetBuilder):
    batches: int = 4
    groups: int = 3
    members: int = 4
    constant_groups: int = 0
    """the first of them, whose rewards are all 1"""
    with_test: bool = False

    async def __call__(self) -> tuple[RLDataset, RLDataset | None]:
        training = NumberDataset(self.batches, self.groups, self.members, self.constant_groups)
        return training, NumberDataset(1, 2, 1, 0) if self.with_test else None


class WhichWeights(SamplingClientEvaluator):
    """Notes which weights it was given."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    async def __call__(self, sampling_client: Any) -> dict[str, float]:
        self.seen.append(sampling_client.weights)
        return {"eval/weights": float(sampling_client.weights)}


def make_config(log_path: Path, dataset: RLDatasetBuilder | None = None, **changes: Any) -> train.Config:
    base: dict[str, Any] = {
        "learning_rate": 0.5,
        "dataset_builder": dataset or NumberDatasetBuilder(),
        "model_name": TINY,
        "recipe_name": "test",
        "max_tokens": 4,
        "log_path": str(log_path),
        "eval_every": 0,
        "save_every": 0,
        "write_records": False,
        "rollout_json_export": False,
        "on_zero_advantages": "stop",  # as in the recipes
    }
    return train.Config(**{**base, **changes})


def trains_nothing() -> AbstractContextManager[Any]:
    """For a run without any advantage in fewer batches than end it."""
    return pytest.raises(UntrainedRunError, match="is over and trained nothing")


def rows(log_path: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (log_path / name).read_text().splitlines()]


def untimed(log_path: Path) -> list[dict[str, Any]]:
    """The metrics without what a clock measured."""
    return [untimed_row(row) for row in rows(log_path)]


def run(config: train.Config) -> None:
    """Train. A hang is a failure."""

    async def bounded() -> None:
        async with asyncio.timeout(HANG_SECONDS):
            await train.main(config)

    asyncio.run(bounded())
