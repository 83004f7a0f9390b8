"""Groups without signal are replaced by others, in every pacing, counted, and independent of when they finish."""

from pathlib import Path
from typing import Any

import pytest

from tests.fakes import FakeServiceClient, seeded_reply
from tests.rl.loop import NumberDataset, NumberDatasetBuilder, NumberEnv, make_config, rows, run, untimed
from tests.rl.test_resume import Killed, new_service
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.rl import train
from tinker_cookbook.rl.config import check_config
from tinker_cookbook.rl.item_dataset import ItemDataset, TrainingBatches
from tinker_cookbook.rl.rollout_strategy import RetryOnFailure
from tinker_cookbook.rl.sampler import Sampler
from tinker_cookbook.rl.types import Action, ActionExtra, EnvGroupBuilder, StepResult

PACINGS: dict[str, dict[str, Any]] = {
    "sync": {},
    "stream": {"stream_minibatch_config": train.StreamMinibatchConfig(num_minibatches=2)},
    "async 0": {"async_config": train.AsyncConfig(max_steps_off_policy=0, loss_fn="importance_sampling")},
    "async 2": {"async_config": train.AsyncConfig(max_steps_off_policy=2, loss_fn="importance_sampling")},
    "by time": {
        "async_config": train.AsyncConfig(max_steps_off_policy=2, deterministic=False, loss_fn="importance_sampling")
    },
}


def accounted(row: dict[str, Any]) -> bool:
    parts = ("trained", "filtered", "replaced", "stale", "failed")
    return row["groups/sampled"] == sum(row[f"groups/{part}"] for part in parts)


@pytest.mark.parametrize("pacing", PACINGS)
def test_every_group_is_accounted_for(service: FakeServiceClient, tmp_path: Path, pacing: str) -> None:
    """The first of three groups of each batch is constant, and the one that replaces it comes from the same place."""
    data = NumberDatasetBuilder(batches=4, constant_groups=1)
    run(make_config(tmp_path, data, replace_constant_groups=2, **PACINGS[pacing]))
    found = rows(tmp_path)
    assert found and all(map(accounted, found))
    assert all(row["groups/trained"] <= 3 and row["groups/stale"] == row["groups/failed"] == 0 for row in found)
    # Each constant group has two replacements, constant as well: two are replaced and the last is filtered.
    assert {row["groups/replaced"] % 2 for row in found} == {0} and sum(row["groups/replaced"] for row in found) >= 6


class TestASignal:
    """Groups whose batch has constant ones in some places only."""

    @pytest.fixture
    def mixed(self, monkeypatch: pytest.MonkeyPatch) -> NumberDatasetBuilder:
        """In even batches the first two groups are constant, in odd ones none is."""
        original = NumberDataset.get_batch

        def get_batch(self: NumberDataset, index: int) -> Any:
            self.constant_groups = 2 if index % 2 == 0 else 0
            return original(self, index)

        monkeypatch.setattr(NumberDataset, "get_batch", get_batch)
        return NumberDatasetBuilder(batches=6)

    @pytest.mark.parametrize("pacing", ["sync", "stream", "async 2"])
    def test_batches_are_full(
        self, service: FakeServiceClient, tmp_path: Path, mixed: NumberDatasetBuilder, pacing: str
    ) -> None:
        run(make_config(tmp_path, mixed, replace_constant_groups=3, **PACINGS[pacing]))
        found = rows(tmp_path)
        assert len(found) == 6 and all(map(accounted, found))
        full = [row["groups/trained"] + row["groups/filtered"] for row in found]
        assert full == [3] * 6
        assert [row["groups/replaced"] >= 2 for row in found] == [True, False] * 3

    @pytest.mark.parametrize("pacing", ["sync", "stream", "async 2"])
    def test_two_runs_are_the_same(
        self, service: FakeServiceClient, tmp_path: Path, mixed: NumberDatasetBuilder, pacing: str
    ) -> None:
        for name in ("one", "two"):
            run(make_config(tmp_path / name, mixed, replace_constant_groups=3, **PACINGS[pacing]))
        assert untimed(tmp_path / "one") == untimed(tmp_path / "two")

    @pytest.mark.parametrize("pacing", ["sync", "stream", "async 2"])
    @pytest.mark.parametrize("kill_at", [3, 5])
    def test_a_resumed_run_counts_them_as_an_uninterrupted_one(
        self,
        monkeypatch: pytest.MonkeyPatch,
        tmp_path: Path,
        mixed: NumberDatasetBuilder,
        pacing: str,
        kill_at: int,
    ) -> None:
        """Sampling ahead, groups that have replaced others are kept with the checkpoint."""
        more = {"replace_constant_groups": 3, "save_every": 2, **PACINGS[pacing]}
        new_service(monkeypatch)
        run(make_config(tmp_path / "whole", mixed, **more))
        service = new_service(monkeypatch, kill_at)
        with pytest.raises(Killed):
            run(make_config(tmp_path / "killed", mixed, **more))
        assert len(rows(tmp_path / "killed")) < 6
        service.reply = seeded_reply
        run(make_config(tmp_path / "killed", mixed, **more))
        assert untimed(tmp_path / "killed") == untimed(tmp_path / "whole")
        assert all(map(accounted, rows(tmp_path / "killed")))
        assert sum(row["groups/replaced"] for row in rows(tmp_path / "killed")) >= 6

    def test_sampling_zero_batches_ahead_is_the_synchronous_loop(
        self, service: FakeServiceClient, tmp_path: Path, mixed: NumberDatasetBuilder
    ) -> None:
        for name in ("sync", "async 0"):
            run(make_config(tmp_path / name, mixed, replace_constant_groups=3, **PACINGS[name]))
        assert untimed(tmp_path / "sync") == untimed(tmp_path / "async 0")

    def test_what_is_replaced_was_sampled_and_thrown_away(
        self, service: FakeServiceClient, tmp_path: Path, mixed: NumberDatasetBuilder
    ) -> None:
        run(make_config(tmp_path, mixed, replace_constant_groups=3))
        last = rows(tmp_path)[-1]
        lost = sum(row["groups/replaced"] + row["groups/filtered"] for row in rows(tmp_path))
        assert last["tokens/discarded/sampled"] == lost * 4  # members with a token each
        assert last["tokens/cumulative/sampled"] == sum(row["groups/sampled"] for row in rows(tmp_path)) * 4


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Batch and place of each group that is sampled."""
    sample, seen = Sampler.sample_group, list[tuple[int, int]]()

    async def noted(self: Sampler, batch: int, place: int, builder: EnvGroupBuilder) -> Any:
        seen.append((batch, place))
        return await sample(self, batch, place, builder)

    monkeypatch.setattr(Sampler, "sample_group", noted)
    return seen


@pytest.mark.parametrize("pacing", ["sync", "async 2"])
def test_a_replacement_has_a_place_behind_its_batch(
    service: FakeServiceClient, tmp_path: Path, places: list[tuple[int, int]], pacing: str
) -> None:
    """Place 0 of three is constant, and so are those that replace it. Seeds come from the place, so none is there twice."""
    data = NumberDatasetBuilder(batches=2, constant_groups=1)
    run(make_config(tmp_path, data, replace_constant_groups=2, **PACINGS[pacing]))
    assert sorted(places) == [(batch, place) for batch in (0, 1) for place in (0, 1, 2, 3, 6)]


def test_a_group_that_failed_is_replaced_once_it_has(
    service: FakeServiceClient, tmp_path: Path, places: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Raising(NumberEnv):
        async def step(self, action: Action, *, extra: ActionExtra | None = None) -> StepResult:
            if self.prompt.to_ints() == [1, 2, 1]:
                raise OSError("the sandbox is gone")
            return await super().step(action, extra=extra)

    monkeypatch.setattr("tests.rl.loop.NumberEnv", Raising)
    run(make_config(tmp_path, rollout_error_tolerance=RetryOnFailure(max_retries=0), replace_constant_groups=2))
    assert sorted(places) == sorted([*((batch, place) for batch in range(4) for place in range(3)), (1, 4)])
    row = rows(tmp_path)[1]
    assert accounted(row) and row["groups/sampled"] == 4 and row["groups/trained"] == 3


class Numbered(EnvGroupBuilder):
    def __init__(self, item: int, key: tuple[int, int]):
        self.item, self.key = item, key

    async def make_envs(self) -> Any:
        return []


class TestWhereTheyComeFrom:
    def test_groups_that_no_batch_has_come_first(self) -> None:
        batches = TrainingBatches(ItemDataset(range(100), Numbered, 3, num_groups=12))
        found = [batches.replacement(step, place, 3) for step in range(4) for place in range(3, 9)]
        assert all(isinstance(one, Numbered) for one in found)
        assert sorted(one.item for one in found) == list(range(12, 12 + 24))  # pyright: ignore[reportAttributeAccessIssue]
        assert found[0].key == (0, 3)  # pyright: ignore[reportAttributeAccessIssue]

    def test_a_dataset_without_them_gives_those_of_later_batches(self) -> None:
        batches = TrainingBatches(NumberDataset(4, 3, 1, 0))
        found = [batches.replacement(2, place, 3) for place in range(3, 12)]
        assert [(one.batch, one.group) for one in found] == [(b, g) for b in (3, 0, 1) for g in range(3)]  # pyright: ignore[reportAttributeAccessIssue]


def test_it_does_not_go_with_credit_per_turn(tmp_path: Path) -> None:
    config = make_config(tmp_path, advantage=train.AdvantageConfig(credit="turn"), replace_constant_groups=1)
    with pytest.raises(ConfigurationError, match="replace_constant_groups compares total rewards"):
        check_config(config)
