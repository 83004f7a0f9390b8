"""Mix several datasets: rows of each in given proportions, in an order that is fixed before the first is read.

`InterleavedSupervisedDataset` spreads the sources over an epoch; each batch of a `SupervisedMixture` has the same
share of every source, and records the source of each datum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias, cast

import chz

from tinker_cookbook.data.epochs import Epochs
from tinker_cookbook.data.mixing import Mixer, apportion, blocks, check_weights, plan_quotas, source_order
from tinker_cookbook.data.rows import BadRows
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.field_groups import BatchSize
from tinker_cookbook.supervised.types import RowDataset, SupervisedDataset, SupervisedDatasetBuilder
from tinker_cookbook.utils.fields import REQUIRED
from tinker_cookbook.utils.lazy import tinker
from tinker_cookbook.utils.misc_utils import shared_value
from tinker_cookbook.utils.seeds import derive_seed

SourcedDatum: TypeAlias = tuple[int, "tinker.Datum"]
"""The index of a datum's dataset, and the datum."""


def _as_rows(sources: Sequence[SupervisedDataset]) -> list[RowDataset]:
    """The datasets of a mixture. Raises ConfigurationError for one that has only batches."""
    for i, source in enumerate(sources):
        if not isinstance(source, RowDataset):
            raise ConfigurationError(
                f"dataset {i} is a {type(source).__name__}, which has only batches; mixing needs single rows: make it a "
                "RowDataset"
            )
    return cast(list[RowDataset], list(sources))


class InterleavedSupervisedDataset(RowDataset):
    """Rows of several datasets in one order. Batch i does not depend on which batches were requested before.

    An epoch has every row of every source at least once (see plan_quotas). A source that repeats within an epoch is
    shuffled differently for each pass. Sources are shuffled from the start, as by set_epoch(0).

    Args:
        sources: datasets with single rows. If one is a stream, request batches in increasing order.
        batch_size: rows per batch; the sources' own batch sizes are ignored.
        weights: share of the rows from each source, on any positive scale; None: proportional to their sizes.

    Raises:
        ConfigurationError: no source, one without rows to mix, or weights that do not match the sources.
    """

    def __init__(
        self, sources: Sequence[SupervisedDataset], batch_size: int, weights: Sequence[float] | None = None
    ) -> None:
        self._sources = _as_rows(sources)
        check_weights(weights, len(sources))
        quotas = plan_quotas([source.num_rows for source in self._sources], weights)
        super().__init__(sum(quotas), batch_size)
        self._pattern = source_order(quotas, self.num_rows)
        self.set_epoch(0)

    @property
    def bad_rows(self) -> Sequence[BadRows]:
        return [bad for source in self._sources for bad in source.bad_rows]

    def set_epoch(self, seed: int = 0) -> None:
        passes = [Epochs(source, seed, "source", i, "pass") for i, source in enumerate(self._sources)]
        self._mixer = Mixer(passes, self._pattern)

    def get_row(self, position: int) -> list[tinker.Datum]:
        return self._mixer.draw(position)[1]


class SupervisedMixture:
    """Batches of rows from several datasets, each datum with the index of its dataset.

    Step t takes rows [t n_d, (t + 1) n_d) of dataset d, which runs through its epochs one after the other, each
    shuffled by a seed derived from `seed`, d and the epoch. Nothing is dropped at the end of an epoch. The datasets'
    own batch sizes are ignored.

    Args:
        weights: shares of the batch, see `apportion`.
        batch_size: rows per step over all datasets; a row may become several datums.

    Raises ConfigurationError for weights that do not match, or a dataset without single rows.
    """

    def __init__(
        self, datasets: Sequence[SupervisedDataset], weights: Sequence[float], batch_size: int, seed: int
    ) -> None:
        self._datasets = _as_rows(datasets)
        check_weights(weights, len(datasets))
        self._shares, self._batch_size = apportion(batch_size, weights), batch_size
        epochs = [Epochs(dataset, seed, "dataset", d, "epoch") for d, dataset in enumerate(self._datasets)]
        self._mixer = Mixer(epochs, blocks(self._shares))

    @property
    def bad_rows(self) -> Sequence[BadRows]:
        """Rows skipped so far, for each dataset that skips rows."""
        return [bad for dataset in self._datasets for bad in dataset.bad_rows]

    @property
    def shared_system_prompt(self) -> str | None:
        """The system prompt shared by the conversations of all datasets; None: there is none, or it varies."""
        return shared_value(dataset.shared_system_prompt for dataset in self._datasets)

    @property
    def layout(self) -> dict[str, list[int]]:
        """Rows of each dataset, and how many of them a step takes: together with the seed, this determines every batch."""
        return {"rows": [dataset.num_rows for dataset in self._datasets], "rows_per_step": self._shares}

    @property
    def steps_per_epoch(self) -> int:
        """Steps to go through every dataset at least once; the shorter ones repeat meanwhile."""
        return max(-(-data.num_rows // share) for data, share in zip(self._datasets, self._shares, strict=True))

    def get_batch(self, step: int) -> list[SourcedDatum]:
        """The datums of a step, ordered by dataset."""
        return [(d, datum) for d, row in self._mixer.get_batch(step, self._batch_size) for datum in row]


class ConcatenatedSupervisedDataset(SupervisedDataset):
    """The batches of several datasets in sequence, for a test set with several sources."""

    def __init__(self, parts: Sequence[SupervisedDataset]) -> None:
        self._parts = parts
        self._batches = [(part, index) for part in parts for index in range(len(part))]

    def get_batch(self, index: int) -> list[tinker.Datum]:
        if not 0 <= index < len(self):
            raise IndexError(f"batch {index} of a dataset with {len(self)} batches")
        part, index_in_part = self._batches[index]
        return part.get_batch(index_in_part)

    def __len__(self) -> int:
        return len(self._batches)

    def set_epoch(self, seed: int = 0) -> None:
        for number, part in enumerate(self._parts):
            part.set_epoch(derive_seed(seed, "part", number))


@chz.chz(typecheck=True)
class InterleavedDatasetBuilder(BatchSize, SupervisedDatasetBuilder, batch_size=REQUIRED):
    """Several datasets mixed row by row. The test set is that of all sources together."""

    sources: list[SupervisedDatasetBuilder] = chz.field(doc="The datasets to mix.")
    weights: list[float] | None = chz.field(
        default=None, doc="Each dataset's share of the rows, on any scale; None: every row once per epoch."
    )

    @chz.validate
    def _check(self) -> None:
        check_weights(self.weights, len(self.sources))

    def __call__(self) -> tuple[SupervisedDataset, SupervisedDataset | None]:
        made = [source() for source in self.sources]
        tests = [test for _, test in made if test is not None]
        training = InterleavedSupervisedDataset([train for train, _ in made], self.batch_size, self.weights)
        training.shared_system_prompt = shared_value(train.shared_system_prompt for train, _ in made)
        return training, ConcatenatedSupervisedDataset(tests) if tests else None
