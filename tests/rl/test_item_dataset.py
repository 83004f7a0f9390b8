"""Items as groups: batches over epochs, the same ones in whatever order they are asked for."""

from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinker_cookbook.rl.item_dataset import ItemDataset, evaluation_set


class Built(NamedTuple):
    """Stands for a group of envs."""

    item: int
    key: tuple[int, int]


make_group: Any = Built


def make_dataset(items: int, groups: int, num_groups: int | None, seed: int | None = 0) -> ItemDataset[Any]:
    return ItemDataset(range(items), make_group, groups, num_groups, seed)


def items_of(dataset: ItemDataset[Any], batch: int) -> list[int]:
    return [built.item for built in dataset.get_batch(batch)]


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 30), st.integers(0, 3), st.randoms())
def test_any_order_of_access_gives_the_batches_of_sequential_access(
    items: int, groups: int, num_groups: int, seed: int, rng
) -> None:
    sequential = make_dataset(items, groups, num_groups, seed)
    expected = [items_of(sequential, i) for i in range(len(sequential))]
    drawn = [item for batch in expected for item in batch]
    assert len(drawn) == num_groups
    for start in range(0, num_groups - items + 1, items):
        assert sorted(drawn[start : start + items]) == list(range(items))
    order = [*range(len(sequential))] * 2
    rng.shuffle(order)
    jumping = make_dataset(items, groups, num_groups, seed)
    assert [items_of(jumping, i) for i in order] == [expected[i] for i in order]


def test_builders_learn_their_batch_and_place() -> None:
    dataset = make_dataset(5, 2, 5)
    assert dataset.batch_size == len(dataset.get_batch(0)) == 2
    built: Any = dataset.get_batch(2)
    assert [b.key for b in built] == [(2, 0)]


@pytest.mark.parametrize("index", [-1, 3])
def test_outside_is_an_error(index: int) -> None:
    with pytest.raises(IndexError, match=f"batch {index} of a dataset with 3 batches"):
        make_dataset(5, 2, 6).get_batch(index)


def test_an_evaluation_set_is_all_items_once_in_order() -> None:
    dataset = evaluation_set([4, 3, 5], make_group)
    assert dataset is not None and len(dataset) == 1 and items_of(dataset, 0) == [4, 3, 5]
    assert evaluation_set([], make_group) is None
