"""The order of items: epoch after epoch, each shuffled differently.

The item at a position depends only on the seed and the position, so a run resumes anywhere without replaying earlier
items.
"""

import random
from collections.abc import Sequence
from typing import Any, Generic, Protocol, TypeVar

import chz

from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.utils.fields import FieldGroup
from tinker_cookbook.utils.seeds import derive_seed

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class EpochRows(Protocol[T_co]):
    """Rows with a different order in each epoch."""

    num_rows: int

    def get_row(self, position: int) -> T_co:
        """The row at `position` of the current epoch, 0 <= position < num_rows."""
        ...

    def set_epoch(self, seed: int = 0) -> None:
        """Shuffle the rows with `seed`."""
        ...


class ShuffledItems(Generic[T]):
    """EpochRows for a sequence. The items keep their order until set_epoch, which always shuffles the original order."""

    def __init__(self, items: Sequence[T]) -> None:
        self.num_rows = len(items)
        self._items = items
        self._order: Sequence[int] = range(len(items))

    def get_row(self, position: int) -> T:
        return self._items[self._order[position]]

    def set_epoch(self, seed: int = 0) -> None:
        order = list(range(self.num_rows))
        random.Random(seed).shuffle(order)
        self._order = order


class Epochs(Generic[T]):
    """Rows repeated for several epochs. Epoch e is shuffled with `derive_seed(*key, e)`; without a key, the order
    never changes.
    """

    def __init__(self, rows: EpochRows[T], *key: int | str) -> None:
        self._rows, self._key = rows, key
        self._epoch: int | None = None

    def draw(self, number: int) -> T:
        """Row number % num_rows of epoch number // num_rows."""
        epoch, position = divmod(number, self._rows.num_rows)
        if self._key and epoch != self._epoch:
            self._rows.set_epoch(derive_seed(*self._key, epoch))
            self._epoch = epoch
        return self._rows.get_row(position)


TEST_SIZE = 32
"""Default number of held-out rows, if there are enough."""


def not_negative(owner: Any, attribute: str) -> None:
    """A validator for `test_size`, which may be None. Raises ConfigurationError."""
    if (value := getattr(owner, attribute)) is not None and value < 0:
        raise ConfigurationError(f"{attribute.removeprefix('X_')}={value}: must be 0 (no test set) or more")


@chz.chz(typecheck=True)
class HeldOut(FieldGroup):
    """How much of a dataset is held out."""

    test_size: int | None = chz.field(
        default=0,
        doc=f"Rows held out as the test set; 0: no test set; None: {TEST_SIZE}, or a tenth of fewer than {2 * TEST_SIZE}.",
        validator=not_negative,
    )


@chz.chz(typecheck=True)
class HoldOut(HeldOut):
    """How a dataset without a test split is divided (`hold_out`)."""

    shuffle_seed: int | None = chz.field(default=0, doc="Seed of the shuffle before the split; None keeps the order.")


def usual_test_size(rows: int | None) -> int:
    """The default number of rows to hold out: TEST_SIZE, or a tenth if TEST_SIZE would be more than half.

    At least one, unless no training row would be left. For an unknown number of rows (None), TEST_SIZE.
    """
    if rows is None or rows >= 2 * TEST_SIZE:
        return TEST_SIZE
    return max(rows // 10, min(1, rows - 1))


def hold_out(
    items: Sequence[T], test_size: int | None, shuffle_seed: int | None, source: str
) -> tuple[list[T], list[T]]:
    """Training items and the first `test_size` as test items, after a shuffle (None: in the given order).

    Args:
        test_size: None: see `usual_test_size`.

    Raises:
        ConfigurationError: no training item is left; the message names `source`.
    """
    test_size = usual_test_size(len(items)) if test_size is None else test_size
    if test_size >= len(items):
        raise ConfigurationError(
            f"test_size={test_size} leaves nothing to train on: {source} has {len(items)} rows; lower test_size"
        )
    ordered = list(items)
    if shuffle_seed is not None:
        random.Random(shuffle_seed).shuffle(ordered)
    return ordered[test_size:], ordered[:test_size]
