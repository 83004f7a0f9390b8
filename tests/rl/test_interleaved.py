"""Groups of several datasets in one run: in proportion, in each source's order, and batch i without the batches before."""

import asyncio
from collections.abc import Sequence

import chz
import pytest

from tests.rl.loop import NumberEnv
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.rl.dataset_utils import cycle_permutation
from tinker_cookbook.rl.interleaved import InterleavedRLDatasetBuilder
from tinker_cookbook.rl.types import Env, EnvGroupBuilder, RLDataset, RLDatasetBuilder


class Named(EnvGroupBuilder):
    def __init__(self, name: str):
        self.name = name

    async def make_envs(self) -> Sequence[Env]:
        return [NumberEnv([1], constant=True)]

    def logging_tags(self) -> list[str]:
        return [self.name[0]]


class Letters(RLDataset):
    """a0 a1 a2 ... in batches of the given sizes."""

    def __init__(self, letter: str, sizes: Sequence[int]):
        self.letter, self.sizes = letter, sizes

    def get_batch(self, index: int) -> list[Named]:
        start = sum(self.sizes[:index])
        return [Named(f"{self.letter}{start + i}") for i in range(self.sizes[index])]

    def __len__(self) -> int:
        return len(self.sizes)


@chz.chz(typecheck=True)
class LettersBuilder(RLDatasetBuilder):
    letter: str
    sizes: list[int] = chz.field(default_factory=lambda: [2, 3])
    tests: int = 0

    async def __call__(self) -> tuple[RLDataset, RLDataset | None]:
        return Letters(self.letter, self.sizes), Letters(self.letter.upper(), [self.tests]) if self.tests else None


def build(*sources: LettersBuilder, weights: list[float], groups: int = 4, batches: int = 6, seed: int = 0):
    builder = InterleavedRLDatasetBuilder(
        sources=list(sources), weights=weights, groups_per_batch=groups, total_batches=batches, seed=seed
    )
    return asyncio.run(builder())


def names(dataset: RLDataset, index: int) -> list[str]:
    groups = dataset.get_batch(index)
    return [group.name for group in groups if isinstance(group, Named)]


A, B = LettersBuilder(letter="a"), LettersBuilder(letter="b", sizes=[1, 0, 6])


def test_shares_are_exact_where_they_can_be() -> None:
    dataset, _ = build(A, B, weights=[3, 1])
    assert [sum(name[0] == "a" for name in names(dataset, i)) for i in range(6)] == [3] * 6


def test_a_batch_does_not_depend_on_what_was_asked_before() -> None:
    forward, _ = build(A, B, weights=[2, 1])
    backward, _ = build(A, B, weights=[2, 1])
    assert {i: names(forward, i) for i in range(6)} == {i: names(backward, i) for i in reversed(range(6))}
    assert names(forward, 3) == names(forward, 3)


def test_each_source_gives_all_of_its_groups_in_rounds_of_their_own_order() -> None:
    dataset, _ = build(A, B, weights=[1, 1], groups=2, batches=21, seed=3)
    for place, (letter, size) in enumerate((("a", 5), ("b", 7))):
        given = [name for i in range(21) for name in names(dataset, i) if name[0] == letter]
        for cycle in range(21 // size):
            order = cycle_permutation(size, f"3:{place}", cycle)
            assert given[cycle * size : (cycle + 1) * size] == [f"{letter}{i}" for i in order]
    assert [name for i in range(5) for name in names(dataset, i) if name[0] == "a"] != [f"a{i}" for i in range(5)]


def test_the_seed_changes_the_order_and_not_the_shares() -> None:
    one, other = (build(A, B, weights=[1, 1], groups=8, seed=seed)[0] for seed in (1, 2))
    assert [names(one, i) for i in range(6)] != [names(other, i) for i in range(6)]
    for dataset in (one, other):
        assert [sum(name[0] == "a" for name in names(dataset, i)) for i in range(6)] == [4] * 6


def test_without_a_number_of_batches_the_first_source_to_end_ends_them() -> None:
    sources = [A, LettersBuilder(letter="b", sizes=[12])]
    builder = InterleavedRLDatasetBuilder(sources=sources, weights=[1.0, 3.0], groups_per_batch=4)  # pyright: ignore[reportArgumentType]
    dataset, _ = asyncio.run(builder())
    assert len(dataset) == 4  # 12 groups of b, three to a batch
    given = [name for i in range(4) for name in names(dataset, i)]
    assert len(set(given)) == len(given) == 16
    with pytest.raises(ConfigurationError, match="total_batches=0: must be at least 1, or None"):
        chz.replace(builder, total_batches=0)


def test_all_test_groups_are_evaluated() -> None:
    with_tests = chz.replace(A, tests=3)
    _, test = build(with_tests, B, chz.replace(B, tests=1), weights=[1, 1, 1])
    assert test is not None and names(test, 0) == ["A0", "A1", "A2", "B0"] and len(test) == 1
    assert build(A, B, weights=[1, 1])[1] is None


@pytest.mark.parametrize(
    ("sources", "weights", "message"),
    [
        ([A], [1.0, 2.0], "1 sources need as many weights"),
        ([A, LettersBuilder(letter="c", sizes=[])], [1.0, 1.0], r"sources\[1\] has no batches"),
        ([A, LettersBuilder(letter="c", sizes=[0, 0])], [1.0, 1.0], r"sources\[1\] has no groups"),
    ],
)
def test_what_cannot_be_mixed_is_refused(sources: list[LettersBuilder], weights: list[float], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        names(build(*sources, weights=weights)[0], 0)


def test_there_is_no_batch_beyond_the_last() -> None:
    dataset, _ = build(A, B, weights=[1, 1])
    assert len(dataset) == 6
    for index in (-1, 6):
        with pytest.raises(IndexError):
            dataset.get_batch(index)
