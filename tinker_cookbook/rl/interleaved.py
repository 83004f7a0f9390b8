"""Several RL datasets in one run: each batch takes groups of every source, in proportion to weights.

Which source gives which group follows from the weights and the seed alone, so batch i can be asked for without the batches
before it, and a resumed run meets the groups that the uninterrupted one would have met.
"""

import random
from collections.abc import Sequence

import chz

from tinker_cookbook.data.mixing import Mixer, check_weights, source_order
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.rl.item_dataset import GroupSource, evaluation_set
from tinker_cookbook.rl.types import EnvGroupBuilder, RLDataset, RLDatasetBuilder
from tinker_cookbook.utils.misc_utils import gather_all, shared_value
from tinker_cookbook.utils.seeds import derive_seed


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
        self._mixer = Mixer(groups, source_order(weights, groups_per_batch * total_batches))

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
    only_evaluated: list[RLDatasetBuilder] = chz.field(
        default_factory=list, doc="further datasets, whose test sets are evaluated and on which nothing trains"
    )
    groups_per_batch: int = chz.field(doc="groups per batch, of all sources together", validator=chz.validators.gt(0))
    total_batches: int = chz.field(doc="batches of the run", validator=chz.validators.gt(0))
    seed: int = chz.field(default=0, doc="seed of the order within a batch")

    @chz.validate
    def _check(self) -> None:
        check_weights(self.weights, len(self.sources))

    @property
    def shared_system_prompt(self) -> str | None:
        return shared_value(source.shared_system_prompt for source in self._all())

    @property
    def needs_starting_policy(self) -> bool:
        return any(source.needs_starting_policy for source in self._all())

    def _all(self) -> list[RLDatasetBuilder]:
        return [*self.sources, *self.only_evaluated]

    async def __call__(self) -> tuple[RLDataset, RLDataset | None]:
        built = await gather_all(source() for source in self._all())
        trained = [training for training, _ in built[: len(self.sources)]]
        training = InterleavedRLDataset(trained, self.weights, self.groups_per_batch, self.total_batches, self.seed)
        for i, (_, test) in enumerate(built[len(self.sources) :]):
            if test is None:
                raise ConfigurationError(
                    f"only_evaluated[{i}] has no test set, so that nothing of it is evaluated; leave it out"
                )
        tests = [test for _, test in built if test is not None]
        groups = [group for test in tests for i in range(len(test)) for group in test.get_batch(i)]
        return training, evaluation_set(groups, lambda group, key: group)
