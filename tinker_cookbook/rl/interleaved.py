"""Several RL datasets in one run: each batch takes groups of every source, in proportion to weights.

Which source gives which group follows from the weights and the seed alone, so batch i can be asked for without the batches
before it, and a resumed run meets the groups that the uninterrupted one would have met.
"""

import random
from bisect import bisect_right
from collections.abc import Sequence
from math import inf

import chz

from tinker_cookbook.data.mixing import Mixer, check_weights, schedule
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.rl.item_dataset import evaluation_set
from tinker_cookbook.rl.types import EnvGroupBuilder, RLDataset, RLDatasetBuilder
from tinker_cookbook.utils.misc_utils import gather_all
from tinker_cookbook.utils.seeds import derive_seed


class GroupSource:
    """The groups of a dataset, counted over its batches; after the last they begin again. The batch read last is kept.

    Raises ConfigurationError for a dataset without batches, and when it is met, for one without groups.
    """

    def __init__(self, dataset: RLDataset, name: str):
        if len(dataset) < 1:
            raise ConfigurationError(f"{name} has no batches; leave it out")
        self._dataset, self._name = dataset, name
        self._number, self._batch = 0, dataset.get_batch(0)
        self._ends = [0, len(self._batch)]
        """groups before each batch, as far as batches had to be looked at"""

    def draw(self, number: int) -> EnvGroupBuilder:
        """Group `number`, from 0; with `count` groups in all, group number % count."""
        self._look(number)
        if number >= self._ends[-1]:
            number %= self.count()
        batch = bisect_right(self._ends, number) - 1
        return self._read(batch)[number - self._ends[batch]]

    def count(self) -> int:
        """Groups in all; looks at every batch."""
        self._look(inf)
        if self._ends[-1] == 0:
            raise ConfigurationError(f"{self._name} has no groups; leave it out")
        return self._ends[-1]

    def _look(self, number: float) -> None:
        """At batches as far as that of group `number`, or at all."""
        while self._ends[-1] <= number and len(self._ends) <= len(self._dataset):
            self._ends.append(self._ends[-1] + len(self._read(len(self._ends) - 1)))

    def _read(self, number: int) -> Sequence[EnvGroupBuilder]:
        if number != self._number:
            self._number, self._batch = number, self._dataset.get_batch(number)
        return self._batch


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
        groups = [GroupSource(source, f"sources[{i}]") for i, source in enumerate(sources)]
        self._groups_per_batch, self._total_batches, self._seed = groups_per_batch, total_batches, seed
        self._mixer = Mixer(groups, schedule(weights, groups_per_batch * total_batches))

    def get_batch(self, index: int) -> list[EnvGroupBuilder]:
        if not 0 <= index < self._total_batches:
            raise IndexError(f"batch {index} of a dataset with {self._total_batches} batches")
        groups = [group for _, group in self._mixer.get_batch(index, self._groups_per_batch)]
        random.Random(derive_seed(self._seed, "interleaved", index)).shuffle(groups)
        return groups

    def __len__(self) -> int:
        return self._total_batches


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
        check_weights(self.weights, len(self.sources))

    async def __call__(self) -> tuple[RLDataset, RLDataset | None]:
        built = await gather_all(source() for source in self.sources)
        training = InterleavedRLDataset(
            [training for training, _ in built], self.weights, self.groups_per_batch, self.total_batches, self.seed
        )
        tests = [test for _, test in built if test is not None]
        groups = [group for test in tests for i in range(len(test)) for group in test.get_batch(i)]
        return training, evaluation_set(groups, lambda group, key: group)
