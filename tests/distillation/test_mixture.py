"""Several datasets in one batch: fixed shares, nothing left out, and the same batch whatever was asked for before."""

import asyncio
from collections import Counter
from collections.abc import Sequence

import pytest
import tinker
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.distillation.test_targets import make_datum
from tests.fakes import ScriptedCompleter
from tinker_cookbook.distillation.datasets import CompositeDataset
from tinker_cookbook.distillation.mixture import SupervisedMixture, apportion
from tinker_cookbook.exceptions import ConfigurationError, DataValidationError
from tinker_cookbook.rl.rollouts import do_group_rollout
from tinker_cookbook.rl.types import Env, EnvGroupBuilder, RLDataset
from tinker_cookbook.supervised.data import SupervisedDatasetFromList
from tinker_cookbook.supervised.types import SupervisedDataset

weights_lists = st.lists(st.floats(0.1, 10), min_size=1, max_size=4)


class TestApportion:
    @given(st.integers(1, 60), weights_lists)
    def test_shares_sum_up_and_are_near_their_proportion(self, total: int, weights: list[float]) -> None:
        exact = [total * weight / sum(weights) for weight in weights]
        try:
            shares = apportion(total, weights)
        except ConfigurationError as error:
            assert "leaves none for dataset" in str(error) and min(exact) < 1
            return
        assert sum(shares) == total and min(shares) >= 1
        assert all(abs(share - wanted) < 1 for share, wanted in zip(shares, exact, strict=True))

    def test_ties_go_to_the_earlier(self) -> None:
        assert apportion(5, [1.0, 1.0]) == [3, 2]

    @pytest.mark.parametrize("weights", [[], [1.0, 0.0], [-1.0]])
    def test_bad_weights(self, weights: list[float]) -> None:
        with pytest.raises(ConfigurationError, match="greater than 0"):
            apportion(4, weights)


def numbered(dataset: int, rows: int, datums: int = 1) -> SupervisedDatasetFromList[int]:
    """Row r of dataset d as datums that tell both."""

    def convert(row: int) -> list[tinker.Datum]:
        return [make_datum([dataset, row, copy], [1.0, 1.0]) for copy in range(datums)]

    return SupervisedDatasetFromList(range(rows), 3, flatmap_fn=convert)


def mixture(sizes: Sequence[int], weights: Sequence[float], batch_size: int, seed: int = 0) -> SupervisedMixture:
    return SupervisedMixture([numbered(d, rows) for d, rows in enumerate(sizes)], weights, batch_size, seed)


def row_of(datum: tinker.Datum) -> tuple[int, int]:
    dataset, row = datum.model_input.to_ints()
    return dataset, row


sizes_and_weights = st.integers(1, 3).flatmap(
    lambda n: st.tuples(
        st.lists(st.integers(1, 9), min_size=n, max_size=n), st.lists(st.floats(0.3, 3), min_size=n, max_size=n)
    )
)


class TestSupervisedMixture:
    @given(sizes_and_weights, st.integers(3, 12), st.integers(0, 3))
    def test_each_epoch_of_each_dataset_has_every_row_once(
        self, sizes_weights: tuple[list[int], list[float]], batch_size: int, seed: int
    ) -> None:
        sizes, weights = sizes_weights
        exact = [batch_size * weight / sum(weights) for weight in weights]
        assume(min(exact) >= 1)
        mixed = mixture(sizes, weights, batch_size, seed)
        shares = apportion(batch_size, weights)
        drawn: list[list[int]] = [[] for _ in sizes]
        for step in range(mixed.steps_per_epoch):
            batch = mixed.get_batch(step)
            assert Counter(d for d, _ in batch) == Counter(dict(enumerate(shares)))
            for d, datum in batch:
                assert row_of(datum)[0] == d
                drawn[d].append(row_of(datum)[1])
        for rows, found in zip(sizes, drawn, strict=True):
            assert set(found) == set(range(rows))
            epochs = [found[i : i + rows] for i in range(0, len(found) - rows + 1, rows)]
            assert all(sorted(epoch) == list(range(rows)) for epoch in epochs)

    @given(sizes_and_weights, st.lists(st.integers(0, 12), min_size=1, max_size=6))
    def test_a_batch_does_not_depend_on_what_was_asked_for_before(
        self, sizes_weights: tuple[list[int], list[float]], steps: list[int]
    ) -> None:
        _, weights = sizes_weights
        assume(12 * min(weights) / sum(weights) >= 1)
        used = mixture(*sizes_weights, batch_size=12)
        for step in steps:
            fresh = mixture(*sizes_weights, batch_size=12)
            assert [row_of(datum) for _, datum in used.get_batch(step)] == [
                row_of(datum) for _, datum in fresh.get_batch(step)
            ]

    def test_the_seed_decides_the_order(self) -> None:
        orders = [[row_of(datum) for _, datum in mixture([9], [1.0], 9, seed).get_batch(0)] for seed in (0, 0, 1)]
        assert orders[0] == orders[1] != orders[2]

    def test_a_row_of_several_datums_keeps_them_together(self) -> None:
        mixed = SupervisedMixture([numbered(0, 4, datums=2)], [1.0], 2, seed=0)
        rows = [row_of(datum)[1] for _, datum in mixed.get_batch(0)]
        assert len(rows) == 4 and rows[0] == rows[1] and rows[2] == rows[3]
        assert mixed.layout == {"rows": [4], "rows_per_step": [2]} and mixed.steps_per_epoch == 2

    def test_batches_alone_cannot_be_mixed(self) -> None:
        class Batches(SupervisedDataset):
            def get_batch(self, index: int) -> list[tinker.Datum]:
                return []

            def __len__(self) -> int:
                return 1

        with pytest.raises(ConfigurationError, match="dataset 0 is a Batches, which gives batches only"):
            SupervisedMixture([Batches()], [1.0], 2, 0)


class NumberedGroup(EnvGroupBuilder):
    def __init__(self, number: int):
        self.number = number

    async def make_envs(self) -> Sequence[Env]:
        return []

    def logging_tags(self) -> list[str]:
        return [f"group_{self.number}"]


class Groups(RLDataset):
    def __init__(self, sizes: Sequence[int]):
        self.batches: list[list[EnvGroupBuilder]] = []
        for size in sizes:
            first = sum(len(batch) for batch in self.batches)
            self.batches.append([NumberedGroup(first + i) for i in range(size)])

    def get_batch(self, index: int) -> Sequence[EnvGroupBuilder]:
        return self.batches[index]

    def __len__(self) -> int:
        return len(self.batches)


def regular(count: int, size: int) -> Groups:
    """`count` groups in batches of `size`."""
    return Groups([min(size, count - first) for first in range(0, count, size)])


class TestCompositeDataset:
    @given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 4), st.integers(1, 4)), min_size=1, max_size=3))
    def test_groups_come_in_their_datasets_order_over_and_over(self, datasets: list[tuple[int, int, int]]) -> None:
        counts = [per_batch for _, _, per_batch in datasets]
        composite = CompositeDataset([regular(count, size) for count, size, _ in datasets], counts)
        assert len(composite) == max(-(-count // per_batch) for count, _, per_batch in datasets)
        # Backwards, so that no batch can rest on the one before it.
        batches = {index: composite.get_batch(index) for index in reversed(range(len(composite)))}
        for d, (count, _, per_batch) in enumerate(datasets):
            tag = f"dataset_{d}"
            seen = [b.logging_tags()[0] for i in sorted(batches) for b in batches[i] if b.logging_tags()[1] == tag]
            assert seen == [f"group_{n % count}" for n in range(len(composite) * per_batch)]
        with pytest.raises(IndexError):
            composite.get_batch(len(composite))

    def test_a_group_says_which_dataset_it_is_of(self) -> None:
        groups = CompositeDataset([Groups([2]), Groups([1])], [2, 1]).get_batch(0)
        assert [group.dataset_index for group in groups] == [0, 0, 1]
        assert NumberedGroup(0).dataset_index is None
        played = asyncio.run(do_group_rollout(groups[2], ScriptedCompleter({})))
        assert (played.dataset_index, played.tags) == (1, ["group_0", "dataset_1"])

    def test_batches_of_other_sizes_are_refused(self) -> None:
        composite = CompositeDataset([Groups([2, 1, 2])], [2])
        with pytest.raises(DataValidationError, match="batch 1 has 1 groups, expected 2"):
            composite.get_batch(1)

    def test_bad_arguments(self) -> None:
        with pytest.raises(ConfigurationError, match="no batches"):
            CompositeDataset([Groups([])], [1])
        with pytest.raises(ConfigurationError, match="without groups"):
            CompositeDataset([Groups([0])], [1])
        with pytest.raises(ConfigurationError, match="each must be at least 1"):
            CompositeDataset([Groups([1])], [0])
        with pytest.raises(ConfigurationError, match="1 datasets and 2 numbers"):
            CompositeDataset([Groups([1])], [1, 1])
