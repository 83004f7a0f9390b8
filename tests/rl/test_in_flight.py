"""However many groups a batch has, so many are sampled at a time as the config allows, and a batch of more is warned of."""

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest

from tests.fakes import FakeSamplingClient, FakeServiceClient, seeded_reply
from tests.rl.loop import NumberDataset, NumberDatasetBuilder, NumberEnv, make_config, rows, run, untimed
from tests.rl.test_stopped import PACINGS
from tinker_cookbook.completers import TinkerTokenCompleter
from tinker_cookbook.rl.config import StreamMinibatchConfig
from tinker_cookbook.rl.item_dataset import ItemDataset, TrainingBatches
from tinker_cookbook.rl.rollouts import do_batch_rollout, finished_groups


class InFlight:
    """How many episodes are between their first observation and their end; each takes some turns of the event loop."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.most = 0
        begin, step = NumberEnv.initial_observation, NumberEnv.step

        async def counted_begin(env: NumberEnv) -> Any:
            self.now += 1
            self.most = max(self.most, self.now)
            return await begin(env)

        async def counted_step(env: NumberEnv, *args: Any, **kwargs: Any) -> Any:
            for _ in range(5):
                await asyncio.sleep(0)
            self.now -= 1
            return await step(env, *args, **kwargs)

        monkeypatch.setattr(NumberEnv, "initial_observation", counted_begin)
        monkeypatch.setattr(NumberEnv, "step", counted_step)


@pytest.mark.parametrize("pacing", PACINGS)
def test_groups_in_flight_are_bounded(
    service: FakeServiceClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pacing: str
) -> None:
    counted = InFlight(monkeypatch)
    dataset = NumberDatasetBuilder(batches=2, groups=9, members=2)
    run(make_config(tmp_path, dataset, max_groups_in_flight=3, **PACINGS[pacing]))
    assert counted.most == 3 * 2 and counted.now == 0
    assert [row["groups/sampled"] for row in rows(tmp_path)] == [9, 9]


def test_an_evaluation_is_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = InFlight(monkeypatch)
    policy = TinkerTokenCompleter(FakeSamplingClient(0, seeded_reply, [], []), 4, 1.0)
    groups = NumberDataset(batches=1, groups=9, members=2, constant_groups=0).get_batch(0)
    played = finished_groups(asyncio.run(do_batch_rollout(groups, policy, at_once=4)))
    assert counted.most == 4 * 2
    assert [group.trajectories_G[0].transitions[0].ob.to_ints()[0] for group in played] == list(range(9))


def test_the_bound_changes_nothing_but_the_time(service: FakeServiceClient, tmp_path: Path) -> None:
    for name, most in (("one", 1), ("all", 1024)):
        run(make_config(tmp_path / name, max_groups_in_flight=most))
    assert untimed(tmp_path / "one") == untimed(tmp_path / "all")


def test_a_batch_of_more_is_warned_of_before_anything_is_loaded(
    service: FakeServiceClient, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with caplog.at_level(logging.WARNING):
        batches = TrainingBatches(ItemDataset(range(90_000), lambda item, key: item, 30_000), at_once=1024)  # pyright: ignore[reportArgumentType]
        assert "step 0 has 30000 groups: 1024 of them are sampled at a time" in caplog.text
        caplog.clear()
        batches.get_batch(1)
        assert not caplog.text  # said once
    monkeypatch.setattr(FakeServiceClient, "create_lora_training_client", _no_weights)
    with caplog.at_level(logging.WARNING), pytest.raises(RuntimeError, match="weights load"):
        run(
            make_config(
                tmp_path, NumberDatasetBuilder(groups=3), max_groups_in_flight=2, stream_minibatch_config=STREAM
            )
        )
    assert "step 0 has 3 groups: 2 of them" in caplog.text


STREAM = StreamMinibatchConfig(groups_per_batch=3)


def _no_weights(*args: Any, **kwargs: Any) -> None:
    raise RuntimeError("weights load")
