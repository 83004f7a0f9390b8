"""Several RL datasets in one run: each batch has groups of every source, in proportion to weights.

The order of groups depends only on the weights and the seed. So batch i can be made without the batches before it,
and a resumed run gets the same groups as an uninterrupted one.
"""

import random
from collections.abc import Sequence

import chz

from tinker_cookbook.data.mixing import Mixer, check_weights, source_order
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.field_groups import GroupsPerBatch, Seeded
from tinker_cookbook.rl.dataset_utils import cycle_permutation
from tinker_cookbook.rl.item_dataset import GroupSource, evaluation_set, refuse_pool
from tinker_cookbook.rl.types import EnvGroupBuilder, RLDataset, RLDatasetBuilder
from tinker_cookbook.utils.fields import REQUIRED, docs
from tinker_cookbook.utils.misc_utils import gather_all, shared_value
from tinker_cookbook.utils.seeds import derive_seed


class InterleavedRLDataset(RLDataset):
    """Each source yields all of its groups before any repeats, in a different order each round.

    Round c over source s uses the order `cycle_permutation(groups of s, f"{seed}:{s}", c)`.
    """

    def __init__(
        self,
        sources: Sequence[RLDataset],
        weights: Sequence[float],
        groups_per_batch: int,
        total_batches: int | None,
        seed: int,
    ):
        for i, source in enumerate(sources):
            refuse_pool(source, f"sources[{i}]")
        groups = [_InRounds(GroupSource(source, f"sources[{i}]"), f"{seed}:{i}") for i, source in enumerate(sources)]
        if total_batches is None:
            total_batches = _until_first_ends([source.count() for source in groups], weights, groups_per_batch)
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


class _InRounds:
    """The groups of a source, round after round."""

    def __init__(self, source: GroupSource, seed: str):
        self._source, self._seed = source, seed

    def count(self) -> int:
        return self._source.count()

    def draw(self, number: int) -> EnvGroupBuilder:
        count = self.count()
        cycle, place = divmod(number, count)
        return self._source.draw(cycle_permutation(count, self._seed, cycle)[place])


def _until_first_ends(counts: Sequence[int], weights: Sequence[float], groups_per_batch: int) -> int:
    """Number of batches in which no source repeats a group; at least one."""
    per_batch = [weight / sum(weights) * groups_per_batch for weight in weights]
    return max(1, min(int(count / groups) for count, groups in zip(counts, per_batch, strict=True)))


@chz.chz(typecheck=True)
class InterleavedRLDatasetBuilder(GroupsPerBatch, Seeded, RLDatasetBuilder, groups_per_batch=REQUIRED):
    """Batches of groups from several datasets. All groups of all test sets are evaluated.

    Every source keeps its group size and tags; its batch size does not matter.
    """

    DOCS = docs(
        groups_per_batch="groups per batch, of all sources together",
        seed="seed of the order of each source's groups, and of that within a batch",
    )

    sources: list[RLDatasetBuilder] = chz.field(doc="the datasets")
    weights: list[float] = chz.field(doc="share of each source; they need not sum to 1")
    only_evaluated: list[RLDatasetBuilder] = chz.field(
        default_factory=list, doc="further datasets, whose test sets are evaluated and on which nothing trains"
    )
    total_batches: int | None = chz.field(
        default=None, doc="batches of the run; None: until the first source has given all of its groups"
    )

    @chz.validate
    def _check(self) -> None:
        if self.total_batches is not None and self.total_batches < 1:
            raise ConfigurationError(f"total_batches={self.total_batches}: must be at least 1, or None")
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
                    f"only_evaluated[{i}] has no test set, so nothing of it would be evaluated; leave it out"
                )
        tests = [test for _, test in built if test is not None]
        groups = [group for test in tests for i in range(len(test)) for group in test.get_batch(i)]
        return training, evaluation_set(groups, lambda group, key: group)
