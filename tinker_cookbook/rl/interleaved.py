"""Several RL datasets in one run: each batch takes groups of every source, in proportion to weights.

Which source gives which group follows from the weights and the seed alone, so batch i can be asked for without the batches
before it, and a resumed run meets the groups that the uninterrupted one would have met.
"""

import random
from collections.abc import Sequence
from fractions import Fraction

import chz

from tinker_cookbook.completers import derive_seed
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.rl.types import EnvGroupBuilder, RLDataset, RLDatasetBuilder
from tinker_cookbook.utils.misc_utils import gather_all


def schedule(weights: Sequence[float], slots: int) -> list[int]:
    """The source of each slot. Of any first n slots, source s has n * weights[s] / sum(weights), give or take one.

    The next slot goes to the source that is furthest behind its share; of equals, to the first (a credit scheduler, as in
    smooth weighted round-robin). Computed exactly: no rounding adds up.
    """
    shares = [Fraction(weight) for weight in weights]
    total = sum(shares)
    credit = [Fraction(0)] * len(shares)
    chosen = []
    for _ in range(slots):
        credit = [have + share for have, share in zip(credit, shares, strict=True)]
        source = max(range(len(shares)), key=lambda s: credit[s])
        credit[source] -= total
        chosen.append(source)
    return chosen


class InterleavedRLDataset(RLDataset):
    """Group k that source s contributes is the k-th of its own groups in order; after its last it begins again."""

    def __init__(
        self,
        sources: Sequence[RLDataset],
        weights: Sequence[float],
        groups_per_batch: int,
        total_batches: int,
        seed: int,
    ):
        self._sources, self._groups_per_batch, self._seed = list(sources), groups_per_batch, seed
        self._total_batches = total_batches
        self._sizes: list[list[int]] = [[] for _ in sources]
        """groups in each batch of a source, as far as they had to be looked at"""
        counts = [0] * len(self._sources)
        self._slots: list[tuple[int, int]] = []
        """(source, how many groups it has given before) of every slot of the run"""
        for source in schedule(weights, groups_per_batch * total_batches):
            self._slots.append((source, counts[source]))
            counts[source] += 1

    def get_batch(self, index: int) -> list[EnvGroupBuilder]:
        if not 0 <= index < self._total_batches:
            raise IndexError(f"batch {index} of a dataset with {self._total_batches} batches")
        slots = self._slots[index * self._groups_per_batch : (index + 1) * self._groups_per_batch]
        groups = [self._group(source, position) for source, position in slots]
        random.Random(derive_seed(self._seed, "interleaved", index)).shuffle(groups)
        return groups

    def __len__(self) -> int:
        return self._total_batches

    def _group(self, source: int, position: int) -> EnvGroupBuilder:
        dataset, sizes = self._sources[source], self._sizes[source]
        batch = 0
        while True:
            if batch == len(dataset):
                total = sum(sizes)
                if total == 0:
                    raise ConfigurationError(f"sources[{source}] has no groups; leave it out")
                position, batch = position % total, 0
            if batch == len(sizes):
                sizes.append(len(dataset.get_batch(batch)))
            if position < sizes[batch]:
                return dataset.get_batch(batch)[position]
            position, batch = position - sizes[batch], batch + 1


class _TestGroups(RLDataset):
    """The test groups of all sources in one batch; the sources' tags keep their metrics apart."""

    def __init__(self, datasets: Sequence[RLDataset]):
        self._datasets = list(datasets)

    def get_batch(self, index: int) -> list[EnvGroupBuilder]:
        if index != 0:
            raise IndexError(f"batch {index} of a dataset with 1 batch")
        return [group for dataset in self._datasets for i in range(len(dataset)) for group in dataset.get_batch(i)]

    def __len__(self) -> int:
        return 1


@chz.chz(typecheck=True)
class InterleavedRLDatasetBuilder(RLDatasetBuilder):
    """Batches of groups from several datasets. Of the test sets of those that have one, all groups are evaluated.

    Every source keeps its own group size, tags and order; its batches only say what its groups are.
    """

    sources: list[RLDatasetBuilder] = chz.field(doc="the datasets")
    weights: list[float] = chz.field(doc="share of each source; they need not sum to 1")
    groups_per_batch: int = chz.field(doc="groups per batch, of all sources together", validator=chz.validators.gt(0))
    total_batches: int = chz.field(doc="batches of the run", validator=chz.validators.gt(0))
    seed: int = chz.field(default=0, doc="seed of the order within a batch")

    @chz.validate
    def _check(self) -> None:
        if not self.sources:
            raise ConfigurationError("sources is empty: give at least one dataset builder")
        if len(self.weights) != len(self.sources):
            raise ConfigurationError(
                f"weights has {len(self.weights)} entries for {len(self.sources)} sources; give one each"
            )
        for i, weight in enumerate(self.weights):
            if not 0 < weight < float("inf"):
                raise ConfigurationError(
                    f"weights[{i}]={weight}: must be positive; leave out a source that is not wanted"
                )

    async def __call__(self) -> tuple[RLDataset, RLDataset | None]:
        built = await gather_all(source() for source in self.sources)
        empty = next((i for i, (training, _) in enumerate(built) if len(training) == 0), None)
        if empty is not None:
            raise ConfigurationError(f"sources[{empty}] has no batches; leave it out")
        training = InterleavedRLDataset(
            [training for training, _ in built], self.weights, self.groups_per_batch, self.total_batches, self.seed
        )
        tests = [test for _, test in built if test is not None]
        return training, _TestGroups(tests) if tests else None
