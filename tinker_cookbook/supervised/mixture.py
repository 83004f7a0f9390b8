"""Several datasets as one: rows of each in given proportions, in an order that is fixed before the first is read."""

from __future__ import annotations

from collections.abc import Sequence

import chz

from tinker_cookbook.data.epochs import Epochs
from tinker_cookbook.data.mixing import Mixer, check_weights, plan_quotas, source_order
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.supervised.types import RowDataset, SupervisedDataset, SupervisedDatasetBuilder, as_rows
from tinker_cookbook.utils.lazy import tinker
from tinker_cookbook.utils.seeds import derive_seed


class InterleavedSupervisedDataset(RowDataset):
    """Rows of several datasets in one order. Batch i is the same whatever was asked for before.

    An epoch has every row of every source at least once (see plan_quotas). A source that comes round again within an
    epoch is shuffled anew for each pass. Sources are shuffled from the start, as by set_epoch(0).

    Args:
        sources: datasets that give single rows. A stream among them must be asked for batches in rising order.
        batch_size: rows per batch; the sources' own batch sizes do not matter.
        weights: share of the rows that each source gives, any positive scale; None: as many as it has.

    Raises:
        ConfigurationError: no source, one that has no rows to mix, or weights that do not fit the sources.
    """

    def __init__(
        self, sources: Sequence[SupervisedDataset], batch_size: int, weights: Sequence[float] | None = None
    ) -> None:
        self._sources = as_rows(sources)
        check_weights(weights, len(sources))
        quotas = plan_quotas([source.num_rows for source in self._sources], weights)
        super().__init__(sum(quotas), batch_size)
        self._pattern = source_order(quotas, self.num_rows)
        self.set_epoch(0)

    def set_epoch(self, seed: int = 0) -> None:
        passes = [Epochs(source, seed, "source", i, "pass") for i, source in enumerate(self._sources)]
        self._mixer = Mixer(passes, self._pattern)

    def get_row(self, position: int) -> list[tinker.Datum]:
        return self._mixer.draw(position)[1]


class ConcatenatedSupervisedDataset(SupervisedDataset):
    """The batches of several datasets one after the other, for a test set of several sources."""

    def __init__(self, parts: Sequence[SupervisedDataset]) -> None:
        self._parts = parts
        self._places = [(part, index) for part in parts for index in range(len(part))]

    def get_batch(self, index: int) -> list[tinker.Datum]:
        if not 0 <= index < len(self):
            raise IndexError(f"batch {index} of a dataset with {len(self)} batches")
        part, place = self._places[index]
        return part.get_batch(place)

    def __len__(self) -> int:
        return len(self._places)

    def set_epoch(self, seed: int = 0) -> None:
        for number, part in enumerate(self._parts):
            part.set_epoch(derive_seed(seed, "part", number))


@chz.chz(typecheck=True)
class InterleavedDatasetBuilder(SupervisedDatasetBuilder):
    """Several datasets mixed row by row. The test set is that of all sources together."""

    sources: list[SupervisedDatasetBuilder] = chz.field(doc="The datasets to mix.")
    batch_size: int = chz.field(doc="Rows per batch.")
    weights: list[float] | None = chz.field(
        default=None, doc="Share of the rows that each gives, on any scale; None: every row once per epoch."
    )

    @chz.validate
    def _check(self) -> None:
        check_weights(self.weights, len(self.sources))
        if self.batch_size < 1:
            raise ConfigurationError(f"batch_size={self.batch_size}: must be at least 1")

    def __call__(self) -> tuple[SupervisedDataset, SupervisedDataset | None]:
        made = [source() for source in self.sources]
        tests = [test for _, test in made if test is not None]
        training = InterleavedSupervisedDataset([train for train, _ in made], self.batch_size, self.weights)
        return training, ConcatenatedSupervisedDataset(tests) if tests else None
