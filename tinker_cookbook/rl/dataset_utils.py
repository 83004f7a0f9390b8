"""Repeat a dataset for several epochs, and choose the order of its batches in each."""

import random
from collections.abc import Sequence
from functools import lru_cache

from tinker_cookbook.rl.types import EnvGroupBuilder, RLDataset


def cycle_permutation(size: int, seed: int | str, cycle: int) -> Sequence[int]:
    """The order of `size` items in pass `cycle`: a permutation of range(size), a pure function of the arguments."""
    return _permutation(size, str(seed), cycle)


@lru_cache(maxsize=64)
def _permutation(size: int, seed: str, cycle: int) -> tuple[int, ...]:
    order = list(range(size))
    random.Random(f"{seed}:{cycle}").shuffle(order)
    return tuple(order)


def epoch_batch_index(index: int, num_batches: int, shuffle_seed: int | None = None) -> int:
    """The index of the dataset's batch that step `index` trains on.

    Args:
        num_batches: of the dataset.
        shuffle_seed: shuffle each pass differently (`cycle_permutation`); None: keep the dataset's order.
    """
    epoch, place = divmod(index, num_batches)
    return place if shuffle_seed is None else cycle_permutation(num_batches, shuffle_seed, epoch)[place]


class EpochCycledRLDataset(RLDataset):
    """The batches of a dataset, repeated `num_epochs` times; the groups of a batch stay together.

    Args:
        inner: the dataset, with at least one batch.
        shuffle_seed: shuffle each pass differently (`cycle_permutation`); None: keep the dataset's order.

    Raises:
        ValueError: `num_epochs` is less than 1.
    """

    def __init__(self, inner: RLDataset, num_epochs: int, shuffle_seed: int | None = None):
        if num_epochs < 1:
            raise ValueError(f"num_epochs={num_epochs}: must be at least 1")
        self.inner, self.num_epochs, self.shuffle_seed = inner, num_epochs, shuffle_seed

    def get_batch(self, index: int) -> Sequence[EnvGroupBuilder]:
        if not 0 <= index < len(self):
            raise IndexError(f"batch {index} of a dataset with {len(self)} batches")
        return self.inner.get_batch(self._of_inner(index))

    def count_groups(self, index: int) -> int | None:
        return self.inner.count_groups(self._of_inner(index))

    def __len__(self) -> int:
        return len(self.inner) * self.num_epochs

    def _of_inner(self, index: int) -> int:
        return epoch_batch_index(index, len(self.inner), self.shuffle_seed)
