"""Items as groups: what to do with each, in batches that go through them epoch after epoch."""

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from tinker_cookbook.data.epochs import Epochs, ShuffledItems
from tinker_cookbook.rl.types import EnvGroupBuilder, RLDataset

T = TypeVar("T")
Group = TypeVar("Group", bound=EnvGroupBuilder)


class ItemDataset(RLDataset, Generic[Group]):
    """`groups_per_batch` items to a batch, each as the group that `make_group` makes of it.

    A batch may reach from one epoch into the next; the last batch has what is left.

    Args:
        make_group: (item, (batch, its place in the batch)) -> group; the key is for seeds.
        num_groups: groups over the whole run; None: every item once.
        seed: epoch e is shuffled by derive_seed(seed, "epoch", e); None: always the given order.
    """

    def __init__(
        self,
        items: Sequence[T],
        make_group: Callable[[T, tuple[int, int]], Group],
        groups_per_batch: int,
        num_groups: int | None = None,
        seed: int | None = None,
    ):
        self._epochs: Epochs[Any] = Epochs(ShuffledItems(items), *(() if seed is None else (seed, "epoch")))
        self._make_group, self._groups_per_batch = make_group, groups_per_batch
        self._num_groups = len(items) if num_groups is None else num_groups

    def get_batch(self, index: int) -> list[Group]:
        if not 0 <= index < len(self):
            raise IndexError(f"batch {index} of a dataset with {len(self)} batches")
        first = index * self._groups_per_batch
        count = min(self._groups_per_batch, self._num_groups - first)
        return [self._make_group(self._epochs.draw(first + i), (index, i)) for i in range(count)]

    def __len__(self) -> int:
        return -(-self._num_groups // self._groups_per_batch)


def evaluation_set(items: Sequence[T], make_group: Callable[[T, tuple[int, int]], Group]) -> ItemDataset[Group] | None:
    """All items once, in order, as one batch; None without items."""
    return ItemDataset(items, make_group, len(items)) if items else None
