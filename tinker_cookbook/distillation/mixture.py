"""Examples of several supervised datasets per step, each dataset in a fixed share and with a teacher of its own.

Everything follows from (step, seed) alone, so a run can resume at any step without having drawn what came before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from tinker_cookbook.data.epochs import Epochs
from tinker_cookbook.data.mixing import Mixer, apportion, blocks, check_weights
from tinker_cookbook.supervised.types import SupervisedDataset, as_rows
from tinker_cookbook.utils.lazy import tinker

SourcedDatum: TypeAlias = tuple[int, "tinker.Datum"]
"""The number of the dataset that a datum comes from, and the datum."""


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
        self._datasets = as_rows(datasets)
        check_weights(weights, len(datasets))
        self._shares, self._batch_size = apportion(batch_size, weights), batch_size
        epochs = [Epochs(dataset, seed, "dataset", d, "epoch") for d, dataset in enumerate(self._datasets)]
        self._mixer = Mixer(epochs, blocks(self._shares))

    @property
    def layout(self) -> dict[str, list[int]]:
        """Rows of each dataset, and how many of them a step takes: with the seed, what decides every batch."""
        return {"rows": [dataset.num_rows for dataset in self._datasets], "rows_per_step": self._shares}

    @property
    def steps_per_epoch(self) -> int:
        """Steps in which every dataset is gone through at least once; the shorter ones begin again meanwhile."""
        return max(-(-data.num_rows // share) for data, share in zip(self._datasets, self._shares, strict=True))

    def get_batch(self, step: int) -> list[SourcedDatum]:
        """The datums of a step, dataset after dataset."""
        return [(d, datum) for d, row in self._mixer.get_batch(step, self._batch_size) for datum in row]
