"""Several datasets as one: rows of each in given proportions, in an order that is fixed before the first is read."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from fractions import Fraction
from math import ceil, isfinite

import chz

from tinker_cookbook.completers import derive_seed
from tinker_cookbook.exceptions import ConfigurationError, DataError, RendererError
from tinker_cookbook.supervised.types import RowDataset, SupervisedDataset, SupervisedDatasetBuilder
from tinker_cookbook.utils.lazy import tinker


def plan_quotas(sizes: Sequence[int], weights: Sequence[float] | None) -> list[int]:
    """How many rows of each source an epoch has, in proportion to the weights and at least as many as the source has.

    Without weights every row of every source comes once. With weights the epoch is the shortest in which every row comes
    at least once: sizes 100 and 10 at weights 0.5 and 0.5 give 100 rows of each, so the small one comes ten times.
    """
    if weights is None:
        return list(sizes)
    # As the user wrote them: 0.7 is 7/10, and not the nearest binary fraction, which would need one row more.
    exact = [Fraction(str(weight)) for weight in weights]
    shares = [weight / sum(exact) for weight in exact]
    total = max(ceil(size / share) for size, share in zip(sizes, shares, strict=True))
    quotas = [int(total * share) for share in shares]
    by_remainder = sorted(range(len(quotas)), key=lambda i: (quotas[i] - total * shares[i], i))
    for i in by_remainder[: total - sum(quotas)]:
        quotas[i] += 1
    return quotas


def plan_order(quotas: Sequence[int]) -> Sequence[int]:
    """Which source each row of an epoch comes from, spread evenly: the source furthest behind its share is next."""
    total = sum(quotas)
    taken = [0] * len(quotas)
    order = array("L")
    for position in range(1, total + 1):
        behind = [
            quota * position - total * count if count < quota else -total * total
            for quota, count in zip(quotas, taken, strict=True)
        ]
        source = behind.index(max(behind))
        taken[source] += 1
        order.append(source)
    return order


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
        self._sources = [_with_rows(source) for source in sources]
        check_weights(weights, len(sources))
        quotas = plan_quotas([source.num_rows for source in self._sources], weights)
        super().__init__(sum(quotas), batch_size)
        self._source_at = plan_order(quotas)
        self._ordinal_at = _ordinals(self._source_at, len(quotas))
        self.set_epoch(0)

    def set_epoch(self, seed: int = 0) -> None:
        self._seed = seed
        self._passes: list[int | None] = [None] * len(self._sources)

    def get_row(self, position: int) -> list[tinker.Datum]:
        number = self._source_at[position]
        source = self._sources[number]
        pass_number, row = divmod(self._ordinal_at[position], source.num_rows)
        if self._passes[number] != pass_number:
            source.set_epoch(derive_seed(self._seed, "source", number, "pass", pass_number))
            self._passes[number] = pass_number
        try:
            return source.get_row(row)
        except (RendererError, DataError) as error:
            raise type(error)(f"source {number} of the mixture: {error}") from error


def check_weights(weights: Sequence[float] | None, num_sources: int) -> None:
    """Raises ConfigurationError unless there is a source and, where weights are given, a positive one for each."""
    if num_sources < 1:
        raise ConfigurationError("sources is empty: a mixture needs at least one dataset")
    if weights is None:
        return
    if len(weights) != num_sources:
        raise ConfigurationError(f"weights={list(weights)}: {num_sources} sources need as many weights")
    if not all(isfinite(weight) and weight > 0 for weight in weights):
        raise ConfigurationError(f"weights={list(weights)}: each must be greater than 0; leave a source out instead")


def _ordinals(order: Sequence[int], num_sources: int) -> Sequence[int]:
    seen = [0] * num_sources
    ordinals = array("L")
    for source in order:
        ordinals.append(seen[source])
        seen[source] += 1
    return ordinals


def _with_rows(source: SupervisedDataset) -> RowDataset:
    if not isinstance(source, RowDataset):
        raise ConfigurationError(
            f"sources: {type(source).__name__} gives batches only, and mixing takes single rows; make it a RowDataset"
        )
    return source


class ConcatenatedSupervisedDataset(SupervisedDataset):
    """The batches of several datasets one after the other, for a test set of several sources."""

    def __init__(self, parts: Sequence[SupervisedDataset]) -> None:
        self._parts = list(parts)

    def get_batch(self, index: int) -> list[tinker.Datum]:
        if not 0 <= index < len(self):
            raise IndexError(f"batch {index} of a dataset with {len(self)} batches")
        for part in self._parts:
            if index < len(part):
                return part.get_batch(index)
            index -= len(part)
        raise AssertionError("unreachable: the index is within the length")

    def __len__(self) -> int:
        return sum(len(part) for part in self._parts)

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
