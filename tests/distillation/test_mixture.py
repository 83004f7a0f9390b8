"""Several datasets in one batch: fixed shares, nothing left out, and the same batch whatever was asked for before."""

import asyncio
from collections import Counter
from collections.abc import Sequence

import pytest
import tinker
from hypothesis import given
from hypothesis import strategies as st

from tests.distillation.test_targets import make_datum
from tests.fakes import ScriptedCompleter
from tinker_cookbook.distillation.datasets import CompositeDataset
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.rl.rollouts import do_group_rollout
from tinker_cookbook.rl.types import Env, EnvGroupBuilder, RLDataset
from tinker_cookbook.supervised.data import SupervisedDatasetFromList
from tinker_cookbook.supervised.mixture import SupervisedMixture


def numbered(dataset: int, rows: int, datums: int = 1) -> SupervisedDatasetFromList[int]:
    """Row r of dataset d as datums that tell both."""

    def convert(row: int) -> list[tinker.Datum]:
        return [make_datum([dataset, row, copy], [1.0, 1.0]) for copy in range(datums)]

    return SupervisedDatasetFromList(range(rows), 3, flatmap_fn=convert)


def mixture(sizes: Sequence[int], weights: Sequence[float], batch_size: int, seed: int = 0) -> SupervisedMixture:
    return SupervisedMixture([numbered(d, rows) for d, rows in enumerate(sizes)], weights, batch_size, seed)


def rows_of(mixed: SupervisedMixture, step: int) -> list[tuple[int, int]]:
    found = [(d, *datum.model_input.to_ints()) for d, datum in mixed.get_batch(step)]
    assert all(d == dataset for d, dataset, _ in found)
    return [(d, row) for d, _, row in found]


class TestSupervisedMixture:
    def test_each_step_has_the_shares_and_each_epoch_every_row_once(self) -> None:
        mixed = mixture([7, 4], [2.0, 1.0], 6)
        assert mixed.layout == {"rows": [7, 4], "rows_per_step": [4, 2]} and mixed.steps_per_epoch == 2
        steps = [rows_of(mixed, step) for step in range(7)]
        assert all(Counter(d for d, _ in step) == {0: 4, 1: 2} for step in steps)
        for d, size in ((0, 7), (1, 4)):
            rows = [row for step in steps for source, row in step if source == d]
            assert [sorted(rows[i : i + size]) for i in (0, size)] == [list(range(size))] * 2
            assert rows[:size] != rows[size : 2 * size]
        assert rows_of(mixture([7, 4], [2.0, 1.0], 6), 5) == steps[5] != rows_of(mixture([7, 4], [2.0, 1.0], 6, 1), 5)

    def test_a_row_of_several_datums_keeps_them_together(self) -> None:
        rows = rows_of(SupervisedMixture([numbered(0, 4, datums=2)], [1.0], 2, seed=0), 0)
        assert len(rows) == 4 and rows[0] == rows[1] and rows[2] == rows[3]


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
            seen = [b.logging_tags()[0] for i in sorted(batches) for b in batches[i] if b.dataset_index == d]
            assert seen == [f"group_{n % count}" for n in range(len(composite) * per_batch)]
        with pytest.raises(IndexError):
            composite.get_batch(len(composite))

    def test_a_group_says_which_dataset_it_is_of(self) -> None:
        groups = CompositeDataset([Groups([2]), Groups([1])], [2, 1]).get_batch(0)
        assert [group.dataset_index for group in groups] == [0, 0, 1]
        assert NumberedGroup(0).dataset_index is None
        played = asyncio.run(do_group_rollout(groups[2], ScriptedCompleter({})))
        assert (played.dataset_index, played.tags) == (1, ["group_0", "dataset_1"])

    def test_batches_may_be_of_any_size(self) -> None:
        composite = CompositeDataset([Groups([2, 1, 0, 2])], [2])
        found = [composite.get_batch(i)[j].logging_tags()[0] for i in (2, 0, 1) for j in range(2)]
        assert found == [f"group_{n % 5}" for n in (4, 5, 0, 1, 2, 3)]

    def test_bad_arguments(self) -> None:
        with pytest.raises(ConfigurationError, match="no batches"):
            CompositeDataset([Groups([])], [1])
        with pytest.raises(ConfigurationError, match="has no groups"):
            CompositeDataset([Groups([0])], [1])
        with pytest.raises(ConfigurationError, match="each must be at least 1"):
            CompositeDataset([Groups([1])], [0])
        with pytest.raises(ConfigurationError, match="1 datasets and 2 numbers"):
            CompositeDataset([Groups([1])], [1, 1])
