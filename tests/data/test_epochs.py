"""The order of items: each once per epoch, an order of its own for each, and the same one from wherever it is resumed."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinker_cookbook.data.epochs import Epochs, ShuffledItems, hold_out, usual_test_size
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.utils.seeds import derive_seed

counts, seeds = st.integers(1, 20), st.integers(0, 5)


def epochs(count: int, *key: int | str) -> Epochs[int]:
    return Epochs(ShuffledItems(range(100, 100 + count)), *key)


@given(counts, seeds, st.integers(1, 4))
def test_every_epoch_has_every_item_once(count: int, seed: int, num_epochs: int) -> None:
    drawn = epochs(count, seed, "epoch")
    for epoch in range(num_epochs):
        items = [drawn.draw(epoch * count + i) for i in range(count)]
        assert sorted(items) == list(range(100, 100 + count))
        expected = list(range(100, 100 + count))
        random.Random(derive_seed(seed, "epoch", epoch)).shuffle(expected)
        assert items == expected


@given(counts, seeds, st.integers(0, 60))
def test_resuming_anywhere_equals_going_on(count: int, seed: int, start: int) -> None:
    going_on, resumed = epochs(count, seed, "epoch"), epochs(count, seed, "epoch")
    expected = [going_on.draw(n) for n in range(start + 30)]
    assert [resumed.draw(n) for n in range(start, start + 30)] == expected[start:]
    assert going_on.draw(start) == expected[start], "nor does it matter what was drawn before"


def test_the_order_is_that_of_all_earlier_versions() -> None:
    """A run that was begun before must meet the same items."""
    drawn = epochs(8, 0, "epoch")
    assert [drawn.draw(n) - 100 for n in range(16)] == [5, 3, 2, 0, 4, 1, 6, 7, 4, 5, 0, 6, 2, 1, 7, 3]


def test_epochs_and_seeds_differ_and_nothing_global_is_drawn_from() -> None:
    state = random.getstate()
    drawn, other, unshuffled = epochs(12, 1, "epoch"), epochs(12, 2, "epoch"), epochs(12)
    first = [drawn.draw(n) for n in range(12)]
    assert first != [drawn.draw(n) for n in range(12, 24)]
    assert first != [other.draw(n) for n in range(12)]
    assert [unshuffled.draw(n) for n in range(24)] == [*range(100, 112)] * 2
    assert random.getstate() == state


@given(st.integers(1, 20), st.integers(0, 19), st.one_of(st.none(), seeds))
def test_what_is_held_out_is_not_trained(count: int, test_size: int, seed: int | None) -> None:
    if test_size >= count:
        with pytest.raises(ConfigurationError, match=f"test_size={test_size} leaves nothing .* mine has {count} rows"):
            hold_out(range(count), test_size, seed, "mine")
        return
    train, test = hold_out(range(count), test_size, seed, "mine")
    assert len(test) == test_size and sorted(train + test) == list(range(count))
    assert (train, test) == hold_out(range(count), test_size, seed, "mine")
    if seed is None:
        assert test + train == list(range(count))


@pytest.mark.parametrize(
    ("rows", "held_out"), [(1, 0), (2, 1), (9, 1), (30, 3), (63, 6), (64, 32), (128, 32), (9_999, 32), (None, 32)]
)
def test_where_nobody_says_how_many_a_small_set_gives_a_tenth(rows: int | None, held_out: int) -> None:
    assert usual_test_size(rows) == held_out
    if rows is not None:
        train, test = hold_out(range(rows), None, 0, "mine")
        assert len(test) == held_out and len(train) == rows - held_out
