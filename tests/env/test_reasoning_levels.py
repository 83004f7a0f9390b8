"""Levels that move by rewards, in a run that is killed and resumed as in one that is not. Needs no package."""

import asyncio
import json
import sys
from pathlib import Path

import chz
import pytest

from tests.fakes import FAKE_VOCABULARY, FakeServiceClient, SampleCall, seeded_reply
from tests.rl.loop import NumberDatasetBuilder, NumberGroup, make_config, rows, untimed
from tinker_cookbook import backends, env
from tinker_cookbook.distillation.datasets import CompositeDataset
from tinker_cookbook.env.reasoning import package
from tinker_cookbook.env.reasoning.levels import LevelConfig, LevelPool
from tinker_cookbook.env.reasoning.questions import Generator, Mixture
from tinker_cookbook.exceptions import ConfigurationError, MissingPackageError
from tinker_cookbook.rl import train
from tinker_cookbook.rl.curriculum import CurriculumConfig
from tinker_cookbook.rl.interleaved import InterleavedRLDatasetBuilder
from tinker_cookbook.rl.item_dataset import ItemDataset
from tinker_cookbook.rl.types import RLDataset, RLDatasetBuilder

SIZE = 50


def mixture(*levels: int, seed: int = 3) -> Mixture:
    made = tuple(Generator(f"g{i}", 1.0, "{}", number) for i, number in enumerate(levels))
    return Mixture(made, SIZE, seed)


def play(pool: LevelPool, batch: int, reward: float, groups: int = 4) -> list[int]:
    """The levels of a batch, each of whose groups then has this mean reward."""
    items = pool.draw(batch, groups)
    for item in items:
        pool.record(item, [reward - 0.25, reward + 0.25])
    return [item // SIZE for item in items]


class TestLevels:
    def test_go_up_and_down_by_the_mean_of_a_full_window(self) -> None:
        pool = LevelPool(LevelConfig(raise_at=0.75, lower_at=0.25, window=4), mixture(3))
        rewards = [0.75, 0.5, 1.0, 1.0, 0.25, 0.0, 0.0, 0.0]
        played = [play(pool, batch, reward)[0] for batch, reward in enumerate(rewards)]
        # 0.5 is between the two; above the highest level and below the lowest there is none.
        assert played == [0, 1, 1, 2, 2, 1, 0, 0]

    def test_a_window_that_is_not_full_moves_nothing_and_slides(self) -> None:
        pool = LevelPool(LevelConfig(raise_at=0.75, lower_at=0.1, window=6), mixture(3))
        assert [play(pool, batch, reward)[0] for batch, reward in enumerate([0.25, 1.0, 1.0])] == [0, 0, 1]

    def test_each_generator_has_a_level_of_its_own(self) -> None:
        made = mixture(5, 5)
        pool = LevelPool(LevelConfig(window=1, raise_at=0.9), made)
        for batch in range(8):
            for item in pool.draw(batch, 6):
                pool.record(item, [float(made.generator(item % SIZE))])
        assert pool.metrics() == {"curriculum/level/g0": 0, "curriculum/level/g1": 4}

    def test_groups_that_were_drawn_at_another_level_do_not_count(self) -> None:
        pool = LevelPool(LevelConfig(window=2), mixture(9))
        items = pool.draw(0, 8)
        for item in items:
            pool.record(item, [1.0])
        assert pool.metrics() == {"curriculum/level/g0": 1}

    def test_numbers_repeat_after_all_were_asked(self) -> None:
        pool = LevelPool(LevelConfig(), mixture(1))
        drawn = [item for batch in range(10) for item in pool.draw(batch, 10)]
        assert drawn == [*range(SIZE), *range(SIZE)]

    def test_a_restored_pool_draws_what_the_other_one_does(self) -> None:
        config, made = LevelConfig(window=2), mixture(4, 4)
        one, two = LevelPool(config, made), LevelPool(config, made)
        for batch in range(5):
            one.draw(batch + 1, 3, num_others=3)  # a batch ahead
            play(one, batch, 1.0, groups=3)
        two.restore(json.loads(json.dumps(one.state(first_batch=5))))
        assert one.metrics() == two.metrics() and max(one.metrics().values()) > 0
        assert [play(one, b, 1.0, 3) for b in range(5, 9)] == [play(two, b, 1.0, 3) for b in range(5, 9)]

    def test_levels_of_other_generators_are_refused(self) -> None:
        state = LevelPool(LevelConfig(), mixture(2)).state(0)
        with pytest.raises(ConfigurationError, match="has levels of g0, not of g0, g1"):
            LevelPool(LevelConfig(), mixture(2, 2)).restore(state)

    def test_thresholds_are_checked(self) -> None:
        with pytest.raises(ConfigurationError, match=r"env\.lower_at=0\.9 must be below env\.raise_at=0\.8"):
            LevelConfig(lower_at=0.9)


@chz.chz(typecheck=True)
class LevelledBuilder(RLDatasetBuilder):
    """Groups that show their level; see NumberEnv."""

    async def __call__(self) -> tuple[RLDataset, RLDataset | None]:
        made = mixture(6, 6)
        middle = FAKE_VOCABULARY / 2
        pool = LevelPool(LevelConfig(window=2, raise_at=middle * 1.1, lower_at=middle * 0.7), made)

        def make(item: int, key: tuple[int, int]) -> NumberGroup:
            return NumberGroup(key[0], item // SIZE, 4, constant=False)

        return ItemDataset(range(6 * SIZE), make, 4, 40, pool=pool), None


PACINGS = {
    "sync": {},
    "async 2": {"async_config": train.AsyncConfig(max_steps_off_policy=2, loss_fn="importance_sampling")},
}


@pytest.mark.parametrize("pacing", PACINGS)
@pytest.mark.parametrize("kill_at", [3, 6])
def test_a_resumed_run_is_at_the_same_levels(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kill_at: int, pacing: str
) -> None:
    class Killed(BaseException):
        pass

    def new_service(kill_at: int | None = None) -> FakeServiceClient:
        fake = FakeServiceClient()

        def reply(call: SampleCall) -> list[int]:
            if call.prompt[2] == kill_at:
                raise Killed
            return seeded_reply(call)

        fake.reply = reply
        monkeypatch.setattr(backends, "create_service_client", lambda *_: fake)
        return fake

    settings = {"save_every": 2, **PACINGS[pacing]}
    new_service()
    asyncio.run(train.main(make_config(tmp_path / "whole", LevelledBuilder(), **settings)))
    levels = [[v for k, v in row.items() if k.startswith("curriculum/level/")] for row in rows(tmp_path / "whole")]
    assert len(levels) == 10 and levels[-1] != [0, 0] and len({tuple(one) for one in levels}) > 2
    service = new_service(kill_at)
    with pytest.raises(BaseException) as caught:  # alone, or in the group of a task group
        asyncio.run(train.main(make_config(tmp_path / "killed", LevelledBuilder(), **settings)))
    assert "Killed" in repr(caught.value)
    service.reply = seeded_reply
    asyncio.run(train.main(make_config(tmp_path / "killed", LevelledBuilder(), **settings)))
    assert untimed(tmp_path / "killed") == untimed(tmp_path / "whole")


class TestWhereNothingTellsRewards:
    def test_a_curriculum_of_items_is_refused_beside_it(self, tmp_path: Path) -> None:
        config = make_config(tmp_path, LevelledBuilder(), curriculum=CurriculumConfig())
        with pytest.raises(ConfigurationError, match="has its own curriculum; leave one of the two out"):
            asyncio.run(train.main(config))

    def test_mixtures_refuse_it(self) -> None:
        built = InterleavedRLDatasetBuilder(
            sources=[NumberDatasetBuilder(), LevelledBuilder()], weights=[1.0, 1.0], groups_per_batch=2
        )
        with pytest.raises(ConfigurationError, match=r"sources\[1\] has its own curriculum"):
            asyncio.run(built())
        dataset, _ = asyncio.run(LevelledBuilder()())
        with pytest.raises(ConfigurationError, match="dataset 0 has its own curriculum"):
            CompositeDataset([dataset], [2])


def test_without_the_package_one_sentence_names_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    package._factory.cache_clear()
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(
        MissingPackageError, match=r"needs the package reasoning-gym.*pip install 'reasoning-gym>=0\.1\.25'"
    ):
        env.get_env("reasoning_gym:leg_counting")
