"""Which groups a training step takes: the dataset's own batches, or its groups in order, cut anew."""

from collections.abc import Sequence

from tinker_cookbook.exceptions import ConfigurationError, DataValidationError
from tinker_cookbook.rl.types import EnvGroupBuilder, RLDataset


class TrainingBatches:
    """Batches by step. No group is left out and none comes twice; with `groups_per_batch` the last batch holds what is left.

    Args:
        groups_per_batch: None keeps the dataset's batches.
        max_steps: None for all batches.
    """

    def __init__(self, dataset: RLDataset, groups_per_batch: int | None = None, max_steps: int | None = None):
        if groups_per_batch is not None and groups_per_batch < 1:
            raise ConfigurationError(f"groups_per_batch={groups_per_batch}: must be at least 1")
        self._dataset, self._groups_per_batch = dataset, groups_per_batch
        self._ends: list[int] = []
        """number of groups in the dataset's batches up to and including i, as far as they have been counted"""
        total = len(dataset)
        if groups_per_batch is not None and total:
            self._count_to(total - 1)
            total = -(-self._ends[-1] // groups_per_batch)
        self._steps = total if max_steps is None else min(max_steps, total)
        if self._steps < 1:
            raise ConfigurationError(f"nothing to train on: {len(dataset)} batches, max_steps={max_steps}")

    def __len__(self) -> int:
        return self._steps

    def get_batch(self, step: int) -> Sequence[EnvGroupBuilder]:
        """The groups of a step, at least one. Raises DataValidationError when the dataset gives an empty batch."""
        builders = self._get_batch(step)
        if not builders:
            raise DataValidationError(f"batch {step} of the dataset ({type(self._dataset).__name__}) has no groups")
        return builders

    def _get_batch(self, step: int) -> Sequence[EnvGroupBuilder]:
        if self._groups_per_batch is None:
            return self._dataset.get_batch(step)
        first = step * self._groups_per_batch
        last = min(first + self._groups_per_batch, self._ends[-1])
        builders: list[EnvGroupBuilder] = []
        start = 0
        for index, end in enumerate(self._ends):
            if start < last and end > first:
                builders.extend(self._dataset.get_batch(index)[max(0, first - start) : last - start])
            start = end
        return builders

    def _count_to(self, index: int) -> None:
        for i in range(index + 1):
            self._ends.append((self._ends[-1] if self._ends else 0) + len(self._dataset.get_batch(i)))
