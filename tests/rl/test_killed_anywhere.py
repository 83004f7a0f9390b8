"""Runs on the fakes, killed anywhere and again, with checkpoints that expire: the outcome is that of one never killed."""

import asyncio
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from tests.fakes import FakeSamplingClient, FakeServiceClient, FakeTrainingClient
from tests.rl.loop import NumberDatasetBuilder, NumberEnv, WhichWeights, make_config, rows, untimed
from tinker_cookbook import backends
from tinker_cookbook.rl import train
from tinker_cookbook.rl.advantages import AdvantageConfig
from tinker_cookbook.rl.rollout_strategy import RetryOnFailure
from tinker_cookbook.stores.training_store import TrainingRunStore

BATCHES = 7
EXAMPLES = 25 if "TINKER_TEST_FAULTS" in os.environ else 3
"""Runs that are drawn per pacing; more in `make test-faults`."""
PACING: list[dict[str, Any]] = [
    {},
    {"async_config": train.AsyncConfig(max_steps_off_policy=0)},
    {"async_config": train.AsyncConfig(max_steps_off_policy=2)},
    {"stream_minibatch_config": train.StreamMinibatchConfig(num_minibatches=2)},
    {"async_config": train.AsyncConfig(max_steps_off_policy=2, deterministic=False)},
]
METHODS = [
    (TrainingRunStore, "write_metrics"),
    (TrainingRunStore, "write_checkpoint"),
    (FakeTrainingClient, "forward_backward"),
    (FakeTrainingClient, "optim_step"),
    (FakeTrainingClient, "save_state"),
    (FakeTrainingClient, "save_weights_for_sampler"),
    (FakeTrainingClient, "save_weights_and_get_sampling_client"),
    (FakeSamplingClient, "sample"),
]


class Killed(BaseException):
    """Stands for a signal."""


class Life:
    """Ends at the `left`-th thing that happens, and then nothing happens any more."""

    def __init__(self) -> None:
        self.left: int | None = None

    def spend(self) -> None:
        if self.left is not None:
            self.left -= 1
            if self.left <= 0:
                raise Killed

    def of(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """May end before the function and after it."""

        def wrapper(*arguments: Any, **options: Any) -> Any:
            self.spend()
            result = function(*arguments, **options)
            self.spend()
            return result

        return wrapper


class SometimesFailing(NumberEnv):
    async def step(self, action: list[int], *, extra: Any = None) -> Any:
        if sum(self.prompt.to_ints()) % 7 == 6:
            raise OSError("the sandbox is gone")
        return await super().step(action, extra=extra)


CONFIGS = st.fixed_dictionaries(
    {
        "save_every": st.sampled_from([0, 1, 2, 3]),
        "save_every_tokens": st.sampled_from([0, 60]),
        "rolling_save_every": st.sampled_from([0, 1, 2]),
        "async_periodic_saves": st.booleans(),
        "eval_every": st.sampled_from([0, 2]),
        "num_substeps": st.sampled_from([1, 2]),
        "kl_penalty_coef": st.sampled_from([0.0, 0.1]),
        "advantage": st.sampled_from([AdvantageConfig(), AdvantageConfig(baseline="role")]),
    }
)


DATA_ALL_TAKEN: dict[str, Any] = {
    "save_every": 2,
    "save_every_tokens": 0,
    "rolling_save_every": 1,
    "async_periodic_saves": False,
    "eval_every": 2,
    "num_substeps": 1,
    "kl_penalty_coef": 0.1,
    "advantage": AdvantageConfig(),
}
"""By time, its third checkpoint has no open group left, and all of the data behind it."""


@pytest.fixture
def life() -> Any:
    with pytest.MonkeyPatch.context() as monkeypatch:
        life = Life()
        for owner, name in METHODS:
            monkeypatch.setattr(owner, name, life.of(getattr(owner, name)))
        monkeypatch.setattr("tests.rl.loop.NumberEnv", SometimesFailing)
        yield life


def run(service: FakeServiceClient, log_path: Path, changes: dict[str, Any]) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(backends, "create_service_client", lambda *_: service)
        config = make_config(
            log_path,
            NumberDatasetBuilder(batches=BATCHES),
            evaluator_builders=[WhichWeights],
            on_zero_advantages="skip",
            rollout_error_tolerance=RetryOnFailure(max_retries=0),
            **changes,
        )
        asyncio.run(train.main(config))


def expire_newest(service: FakeServiceClient, log_path: Path) -> None:
    """The newest checkpoint goes, unless it is the last that is left."""
    if (log_path / "checkpoints.jsonl").exists():
        paths = [record["state_path"] for record in rows(log_path, "checkpoints.jsonl")]
        there = [path for path in paths if path in service.saved]
        if len(there) > 1:
            del service.saved[there[-1]]


def final_record(log_path: Path) -> dict[str, Any]:
    record = rows(log_path, "checkpoints.jsonl")[-1]
    counted = {key: value for key, value in record["progress"].items() if key != "seconds"}
    return {key: value for key, value in record.items() if not key.endswith("_path")} | {"progress": counted}


@pytest.mark.parametrize("pacing", PACING, ids=["sync", "async 0", "async 2", "stream", "async 2 by time"])
def test_as_if_never_killed(life: Life, pacing: dict[str, Any]) -> None:
    @given(CONFIGS, st.lists(st.tuples(st.integers(5, 250), st.booleans()), max_size=5))
    @example(DATA_ALL_TAKEN, [(214, False)])
    @settings(max_examples=EXAMPLES, phases=[Phase.explicit, Phase.reuse, Phase.generate])  # shrinking takes minutes
    def check(changes: dict[str, Any], kills: list[tuple[int, bool]]) -> None:
        changes = {**changes, **pacing}
        with tempfile.TemporaryDirectory() as folder:
            whole, killed = Path(folder, "whole"), Path(folder, "killed")
            unhurt, service = FakeServiceClient(), FakeServiceClient()
            life.left = None
            run(unhurt, whole, changes)
            for life.left, expires in kills:
                try:
                    run(service, killed, changes)
                except Killed:
                    if expires:
                        expire_newest(service, killed)
            life.left = None
            run(service, killed, changes)
            assert [row["step"] for row in rows(killed)] == [row["step"] for row in rows(whole)]
            assert final_record(killed)["final"] and final_record(killed)["batch"] == BATCHES
            assert sum(row.get("groups/sampled", 0) for row in rows(killed)) == BATCHES * 3
            if pacing != PACING[-1]:  # which groups a step takes may then be others; each is taken once
                assert untimed(killed) == untimed(whole)
                assert final_record(killed) == final_record(whole)
                assert service.trainers[-1].weights == unhurt.trainers[-1].weights

    check()
