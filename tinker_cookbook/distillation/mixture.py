"""Examples of several supervised datasets per step, each dataset in a fixed share and with a teacher of its own.

Everything follows from (step, seed) alone, so a run can resume at any step without having drawn what came before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from tinker_cookbook.completers import derive_seed
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.supervised.types import RowDataset, SupervisedDataset
from tinker_cookbook.utils.lazy import tinker

Example: TypeAlias = tuple[int, "tinker.Datum"]
"""The number of its dataset, and the datum."""


def apportion(total: int, weights: Sequence[float]) -> list[int]:
    """`total` items divided in proportion to `weights`, by largest remainders (ties: the earlier one). Sums to `total`.

    Raises ConfigurationError when a weight is not positive or a share comes to nothing.
    """
    if not weights or min(weights) <= 0:
        raise ConfigurationError(f"weights {list(weights)}: give at least one, each greater than 0")
    exact = [total * weight / sum(weights) for weight in weights]
    shares = [int(share) for share in exact]
    order = sorted(range(len(weights)), key=lambda i: (shares[i] - exact[i], i))
    for i in order[: total - sum(shares)]:
        shares[i] += 1
    if 0 in shares:
        raise ConfigurationError(
            f"a batch of {total} divided by the weights {list(weights)} leaves none for dataset {shares.index(0)}; "
            "raise the batch size or that dataset's weight"
        )
    return shares


class SupervisedMixture:
    """Batches of rows from several datasets, each datum with the number of its dataset.

    Step t takes the rows [t n_d, (t + 1) n_d) of dataset d, which goes through its epochs one after the other, each shuffled
    by a seed that follows from `seed`, d and the epoch. Nothing is left out at an epoch's end. The datasets' own batch
    sizes do not matter.

    Args:
        weights: shares of the batch, see `apportion`.
        batch_size: rows per step over all datasets; a row may become several datums.

    Raises ConfigurationError for weights that do not fit, or a dataset that does not give single rows.
    """

    def __init__(
        self, datasets: Sequence[SupervisedDataset], weights: Sequence[float], batch_size: int, seed: int
    ) -> None:
        self._datasets: list[RowDataset] = []
        for d, dataset in enumerate(datasets):
            if not isinstance(dataset, RowDataset):
                raise ConfigurationError(
                    f"dataset {d} is a {type(dataset).__name__}, which gives batches only, and mixing takes single rows; "
                    "make it a RowDataset"
                )
            self._datasets.append(dataset)
        self._shares = apportion(batch_size, weights)
        self._epochs: list[int | None] = [None] * len(datasets)
        self._seed = seed

    @property
    def layout(self) -> dict[str, list[int]]:
        """Rows of each dataset, and how many of them a step takes: with the seed, what decides every batch."""
        return {"rows": [dataset.num_rows for dataset in self._datasets], "rows_per_step": self._shares}

    @property
    def steps_per_epoch(self) -> int:
        """Steps in which every dataset is gone through at least once; the shorter ones begin again meanwhile."""
        return max(-(-data.num_rows // share) for data, share in zip(self._datasets, self._shares, strict=True))

    def get_batch(self, step: int) -> list[Example]:
        """The examples of a step, dataset after dataset."""
        return [
            (d, datum)
            for d, share in enumerate(self._shares)
            for place in range(share)
            for datum in self._row(d, step * share + place)
        ]

    def _row(self, d: int, index: int) -> list[tinker.Datum]:
        dataset = self._datasets[d]
        epoch, place = divmod(index, dataset.num_rows)
        if epoch != self._epochs[d]:
            dataset.set_epoch(derive_seed(self._seed, "dataset", d, "epoch", epoch))
            self._epochs[d] = epoch
        return dataset.get_row(place)
