"""Map numbers to questions, and decide which questions are held out.

A question depends only on the run's seed and its number. Whether it is held out depends only on its text: one in
four is, in every run, so training and held-out questions never coincide, however few different ones a generator has.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from tinker_cookbook.env.reasoning.package import BLOCK, make_dataset
from tinker_cookbook.exceptions import DataValidationError
from tinker_cookbook.utils.seeds import derive_seed

_HELD_OUT = 4
_MOST_DRAWS = 150
"""Draws until a question is on the wanted side: all but 1 in 10**18 need fewer if there are many questions."""

_MOST_FAILURES = 10


@dataclass(frozen=True)
class Generator:
    """A generator of the package."""

    name: str
    weight: float
    overrides: str
    """JSON of config fields"""
    num_levels: int | None
    """None: no curriculum"""


class Entry(NamedTuple):
    """A question of the package."""

    id: str
    content: dict[str, Any]
    """question, answer and metadata"""
    dataset: Any
    """the dataset that scores it"""


@dataclass(frozen=True)
class Mixture:
    """Generators and their weights.

    Training items are numbers: number n of level l is item l * size + n.
    """

    generators: tuple[Generator, ...]
    size: int
    seed: int

    @property
    def num_levels(self) -> int:
        """Number of levels of the generator that has most."""
        return max(one.num_levels or 1 for one in self.generators)

    def generator(self, number: int, is_test: bool = False) -> int:
        """The index of the generator of question `number`, the same at every level."""
        rng = random.Random(derive_seed(self.seed, "generator", int(is_test), number))
        return rng.choices(range(len(self.generators)), [one.weight for one in self.generators])[0]

    def of_item(self, item: int, is_test: bool) -> Generator:
        """The generator of an item."""
        return self.generators[self.generator(item if is_test else item % self.size, is_test)]

    def entry(self, item: int, is_test: bool) -> Entry:
        """The question of an item; held-out ones are asked from all levels in turn.

        Raises DataValidationError for a generator with hardly any different questions, or one that keeps failing.
        """
        return _entry(self, item, is_test)


@lru_cache(maxsize=256)  # the members of a group share one
def _entry(mixture: Mixture, item: int, is_test: bool) -> Entry:
    generator = mixture.of_item(item, is_test)
    level, number = (item, item) if is_test else divmod(item, mixture.size)
    if generator.num_levels is not None:
        level = level % generator.num_levels if is_test else min(level, generator.num_levels - 1)
    split, shown_level = ("test", "train")[not is_test], None if generator.num_levels is None else level
    failures: list[str] = []
    for draw in range(_MOST_DRAWS):
        # Most training questions need one draw, so that neighbours share a dataset; held-out ones need several.
        block, place = divmod(number * _MOST_DRAWS + draw if is_test else number, BLOCK)
        key = (split, generator.name, -1 if shown_level is None else shown_level, block, 0 if is_test else draw)
        seed = derive_seed(mixture.seed, "reasoning_gym", *key)
        dataset = make_dataset(generator.name, generator.overrides, shown_level, seed)
        try:
            content = dataset[place]
        except Exception as error:  # some generators give up on some seeds
            failures.append(f"{type(error).__name__}: {error}")
            if len(failures) == _MOST_FAILURES:
                break
            continue
        if is_held_out(content["question"]) == is_test:
            suffix = "" if shown_level is None else f"-level{level}"
            return Entry(f"{generator.name}-{split}-{number}{suffix}", content, dataset)
    if failures:
        raise DataValidationError(
            f"env=reasoning_gym: {generator.name} failed to make question {number}"
            f"{'' if shown_level is None else f' of level {level}'} ({failures[-1]}); change "
            f"env.config.{generator.name}, or leave it out"
        )
    raise DataValidationError(
        f"env=reasoning_gym: {generator.name} has too few different questions: of {_MOST_DRAWS} none was "
        f"{'held out' if is_test else 'for training'}; change env.config.{generator.name}, or leave it out"
    )


def is_held_out(question: str) -> bool:
    """Whether a question is asked in evaluations, and never in training."""
    return hashlib.sha256(question.encode()).digest()[0] % _HELD_OUT == 0
