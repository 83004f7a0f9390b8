"""A pool whose items move by their rewards: shares of a batch, the same draws on a resume, and results of earlier steps alone."""

import json
from collections import Counter
from pathlib import Path

import pytest

from tests.fakes import FakeServiceClient
from tests.rl.loop import NumberDataset, NumberDatasetBuilder, make_config, rows, run, untimed
from tests.rl.test_replaced_groups import PACINGS, Numbered
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.rl.curriculum import CurriculumConfig, DifficultyPool
from tinker_cookbook.rl.item_dataset import ItemDataset, TrainingBatches


def pool(num_items: int = 40, **config: float) -> DifficultyPool:
    return DifficultyPool(CurriculumConfig(**config), num_items, seed=3)


class TestDraws:
    def test_before_anything_is_known_every_item_comes_once(self) -> None:
        drawn = [item for batch in range(10) for item in pool_draws(pool(), batch + 1)[-1]]
        assert len(drawn) == 40
        assert sorted(item for batch in pool_draws(pool(), 10) for item in batch) == list(range(40))

    def test_easy_and_hard_items_have_their_shares_and_no_more(self) -> None:
        made = pool(num_items=100)
        for item in range(40):
            made.record(item, [1.0, 1.0] if item < 20 else [0.0, 0.0])
        counts = [Counter(item // 20 for item in made.draw(batch, 20)) for batch in range(3)]
        assert all(count[0] == count[1] == 2 for count in counts)  # a tenth each
        assert made.metrics() == {"curriculum/easy": 20, "curriculum/hard": 20, "curriculum/other": 60}

    def test_an_item_moves_back_when_its_group_is_mixed(self) -> None:
        made = pool()
        for rewards, (easy, hard) in (([1.0, 1.0], (1, 0)), ([0.0, 0.0], (0, 1)), ([0.0, 1.0], (0, 0))):
            made.record(5, rewards)
            assert (made.metrics()["curriculum/easy"], made.metrics()["curriculum/hard"]) == (easy, hard)

    def test_thresholds_are_means_of_rewards(self) -> None:
        made = pool(easy_above=0.75, hard_below=0.25)
        made.record(1, [1.0, 0.5])
        made.record(2, [0.5, 0.0])
        made.record(3, [0.75, 0.7])
        assert made.metrics() == {"curriculum/easy": 1, "curriculum/hard": 1, "curriculum/other": 38}

    def test_a_pool_that_is_all_easy_still_fills_a_batch(self) -> None:
        made = pool(num_items=6)
        for item in range(6):
            made.record(item, [1.0])
        assert sorted(made.draw(0, 6)) == list(range(6))
        assert len(made.draw(1, 8)) == 8  # with repetitions: there are no more items

    def test_replacements_are_other_items(self) -> None:
        made = pool()
        drawn = [made.draw(batch, 5, num_others=10) for batch in range(8)]
        assert all(len(one) == 15 and not set(one[:5]) & set(one[5:]) for one in drawn)
        assert sorted(item for one in drawn for item in one[:5]) == list(
            range(40)
        )  # all the same, each once in an epoch

    def test_replacements_come_from_half_an_epoch_ahead(self) -> None:
        one = pool()
        ahead = [set(one.draw(batch, 5)) for batch in range(8)]
        assert set(pool().draw(0, 5, num_others=10)[5:]) == ahead[5] | ahead[6]  # from 5 + 20 on

    def test_each_share_is_rounded_by_itself_and_others_fill_the_rest(self) -> None:
        made = pool(num_items=90, easy_share=0.25, hard_share=0.55)
        for item in range(60):
            made.record(item, [1.0] if item < 30 else [0.0])
        drawn = made.draw(0, 10)
        assert Counter(item // 30 for item in drawn) == {0: 2, 1: 6, 2: 2}  # 2.5, 5.5 and what is left
        assert len(set(drawn)) == 10

    def test_too_few_others_all_come_and_then_what_was_put_aside(self) -> None:
        made = pool(num_items=10, easy_share=0.0, hard_share=0.25)
        for item in range(6):
            made.record(item, [1.0] if item < 5 else [0.0])
        assert {6, 7, 8, 9} < set(made.draw(0, 6)) and len(set(made.draw(0, 6))) == 6
        assert sorted(made.draw(1, 10)) == list(range(10))
        assert Counter(made.draw(2, 25)).most_common(1)[0][1] <= 4  # no item before others had their turn
        assert set(made.draw(2, 25)) == set(range(10))

    def test_no_item_comes_twice_in_a_batch_that_spans_two_epochs(self) -> None:
        made = pool(num_items=6)
        assert all(len(set(made.draw(batch, 4))) == 4 for batch in range(12))

    def test_fewer_items_than_groups_are_repeated_evenly(self) -> None:
        assert Counter(pool(num_items=6).draw(0, 18)) == dict.fromkeys(range(6), 3)

    def test_easy_items_have_no_place_of_their_own(self) -> None:
        made = pool(num_items=50)
        made.record(7, [1.0])
        assert len({made.draw(batch, 10).index(7) for batch in range(8)}) > 3

    def test_what_is_put_aside_comes_in_turn_where_nothing_else_is_left(self) -> None:
        made = pool(num_items=6, easy_share=0.0)
        for item in range(6):
            made.record(item, [1.0])
        assert sorted(made.draw(0, 3) + made.draw(1, 3)) == list(range(6))

    def test_nearly_all_and_nearly_none_are_mixed(self) -> None:
        made = pool()
        made.record(1, [1.0, 0.99])
        made.record(2, [0.01, 0.0])
        assert made.metrics() == {"curriculum/easy": 0, "curriculum/hard": 0, "curriculum/other": 40}
        made.record(1, [1.0, 1.5])
        made.record(2, [0.0, -0.5])
        assert made.metrics() == {"curriculum/easy": 1, "curriculum/hard": 1, "curriculum/other": 38}

    def test_a_restored_pool_draws_what_the_other_one_does(self) -> None:
        one = pool()
        for batch in range(4):  # two batches ahead
            one.draw(batch, 5)
        one.record(7, [1.0])
        one.record(8, [0.0])
        two, state = pool(), one.state(first_batch=2)
        assert list(state["drawn"]) == ["2", "3"]  # no more than is asked for again
        two.restore(json.loads(json.dumps(state)))
        assert [two.draw(batch, 5) for batch in range(2, 9)] == [one.draw(batch, 5) for batch in range(2, 9)]
        assert two.metrics() == one.metrics()

    def test_shares_and_bounds_are_checked(self) -> None:
        for config, message in (
            ({"easy_share": 0.7, "hard_share": 0.4}, "are more than a batch"),
            ({"easy_above": 0.2, "hard_below": 0.2}, r"curriculum\.hard_below=0\.2 must be below"),
        ):
            with pytest.raises(ConfigurationError, match=message):
                CurriculumConfig(**config)
        assert CurriculumConfig(easy_share=1.0, hard_share=0.0).easy_share == 1.0  # a whole batch
        for share in (-0.1, 1.1):
            for name in ("easy_share", "hard_share"):
                with pytest.raises(ValueError, match=name):
                    CurriculumConfig(**{"easy_share": 0.0, "hard_share": 0.0, name: share})


def pool_draws(made: DifficultyPool, batches: int) -> list[list[int]]:
    return [made.draw(batch, 4) for batch in range(batches)]


class TestBatches:
    def test_items_are_those_of_the_dataset_however_often_it_repeats_them(self) -> None:
        dataset = ItemDataset(["a", "b", "c"], lambda item, key: Numbered(ord(item), key), 2, num_groups=20)
        batches = TrainingBatches(dataset, curriculum=CurriculumConfig())
        assert len(batches) == 10
        found = [one for step in range(3) for one in batches.get_batch(step)]
        assert Counter(chr(one.item) for one in found) == Counter("aabbcc")  # pyright: ignore[reportAttributeAccessIssue]
        assert all(one.pool_item == ord("abc"[one.pool_item or 0]) - ord("a") for one in found)
        assert found[3].key == (1, 1)  # pyright: ignore[reportAttributeAccessIssue]

    def test_a_dataset_without_items_has_its_groups_for_items(self) -> None:
        batches = TrainingBatches(NumberDataset(4, 3, 1, 0), curriculum=CurriculumConfig())
        found = [(one.batch, one.group) for step in range(4) for one in batches.get_batch(step)]  # pyright: ignore[reportAttributeAccessIssue]
        assert sorted(found) == [(b, g) for b in range(4) for g in range(3)]


@pytest.mark.parametrize("pacing", PACINGS)
def test_constant_groups_become_rare(service: FakeServiceClient, tmp_path: Path, pacing: str) -> None:
    """Half of the items always have the reward 1, the others mostly more. After the first epoch the former are left out."""
    data = NumberDatasetBuilder(batches=12, groups=4, constant_groups=2)
    curriculum = CurriculumConfig(easy_above=9.0, hard_below=1.0, easy_share=0.0, hard_share=0.0)
    for name, more in (("plain", {}), ("pool", {"curriculum": curriculum})):
        config = make_config(tmp_path / name, data, num_epochs=2, max_steps=24, **more, **PACINGS[pacing])
        run(config)
    trained = {name: sum(row["groups/trained"] for row in rows(tmp_path / name)[12:]) for name in ("plain", "pool")}
    assert trained["pool"] > trained["plain"]
    assert rows(tmp_path / "pool")[-1]["curriculum/hard"] >= 20


@pytest.mark.parametrize("pacing", ["sync", "stream", "async 2"])
def test_two_runs_are_the_same(service: FakeServiceClient, tmp_path: Path, pacing: str) -> None:
    for name in ("one", "two"):
        data = NumberDatasetBuilder(batches=6, constant_groups=1)
        run(
            make_config(
                tmp_path / name, data, curriculum=CurriculumConfig(), replace_constant_groups=1, **PACINGS[pacing]
            )
        )
    assert untimed(tmp_path / "one") == untimed(tmp_path / "two")
