"""Collatz trails and the writers who compute them: some steps slip, and all writers share one misconception.

Slips are random, so most writers agree on the right number. The misconception is shared: half of a number with a 5 in its tens
place is written 5 too low more often than not, as if the carry had been dropped (if that number is in WORLD). There a majority
vote is wrong.
"""

import random
from typing import NamedTuple

from tinker_cookbook.env.shipped.questions.collatz import next_number

LARGEST = 400
MISCONCEIVED_TENS = (5,)
MISCONCEPTION_RATE = 0.6
SLIP_RATE = 0.02
SLIPS = (1, -1, 2, -2, 3, -3, 5, -5, 10, -10)
CYCLE = 4
"""From here a trail repeats 4, 2, 1; starts are at least twelve steps away from it."""
STEPS = 12
"""Length of tiny_debate's trails. Other lengths use the same starts, so the questions are the same at all lengths."""


def _is_small(start: int) -> bool:
    number = start
    for _ in range(200):
        if number > LARGEST:
            return False
        number = next_number(number)
    return True


WORLD = [number for number in range(1, LARGEST + 1) if _is_small(number)]
"""All numbers that occur: those whose whole trail stays small, so that right steps stay within the list."""
_WORLD = frozenset(WORLD)


def trail(start: int, steps: int = STEPS) -> list[int]:
    """The right numbers after `start`, one for each step."""
    numbers = [start]
    for _ in range(steps):
        numbers.append(next_number(numbers[-1]))
    return numbers[1:]


STARTS = [start for start in WORLD if start >= 5 and CYCLE not in (start, *trail(start)[:-1])]


def split(seed: int = 7, held_out: int = 45) -> tuple[list[int], list[int]]:
    """Starts to train on and held-out ones."""
    starts = list(STARTS)
    random.Random(seed).shuffle(starts)
    return starts[held_out:], starts[:held_out]


class Split(NamedTuple):
    """Starts of a split by planted fact."""

    train: list[int]
    held_out: dict[str, list[int]]
    """by the planted facts on their trails: only facts that no training trail passes (`unseen`), other facts (`seen`), or none
    (`without`)"""


def is_misconceived(number: int) -> bool:
    return number % 2 == 0 and number // 10 % 10 in MISCONCEIVED_TENS


PLANTED = tuple(number for number in WORLD if is_misconceived(number) and next_number(number) - 5 in _WORLD)
"""Numbers whose half is often written wrong: the planted wrong facts."""
HALVES = {"facts": (52, 56, 150), "other_facts": (50, 58, 154)}
"""Planted facts that no training trail of a split passes, by the split's name. The two splits are complementary."""


def planted_in(start: int, steps: int = STEPS) -> list[int]:
    """The planted facts that the right trail from `start` passes, in order."""
    return [number for number in [start, *trail(start, steps)[:-1]] if number in PLANTED]


LONGEST_SPLIT_BY_FACT = 12
"""In steps. Nearly all longer trails pass 52, and too few pass only another planted fact."""


def split_by_fact(name: str, seed: int = 7, seen: int = 8, without: int = 10, steps: int = STEPS) -> Split:
    """The split of HALVES with this name: its training trails pass none of its facts."""
    starts = list(STARTS)
    random.Random(seed).shuffle(starts)
    unseen = frozenset(HALVES[name])
    passing: dict[str, list[int]] = {"unseen": [], "seen": [], "without": []}
    for start in starts:
        planted = frozenset(planted_in(start, steps))
        if not planted & unseen:
            passing["seen" if planted else "without"].append(start)
        elif planted <= unseen:
            passing["unseen"].append(start)
    first = list(HALVES).index(name) * without  # other questions in each split
    held_out = {
        "unseen": passing["unseen"],
        "seen": passing["seen"][:seen],
        "without": passing["without"][first : first + without],
    }
    kept = {start for part in held_out.values() for start in part}
    train = [start for start in starts if start in {*passing["seen"], *passing["without"]} - kept]
    return Split(train, held_out)


def slip(number: int, rng: random.Random) -> int:
    """Another number of WORLD, close to this one."""
    near = [number + by for by in SLIPS if number + by in _WORLD]
    return rng.choice(near or [other for other in WORLD if other != number])


def write(
    start: int,
    rng: random.Random,
    slip_rate: float = SLIP_RATE,
    misconception_rate: float = MISCONCEPTION_RATE,
    steps: int = STEPS,
) -> list[int]:
    """The numbers that a writer gives after `start`. A step after a wrong number continues from it. `slip_rate` is the rate per
    step for STEPS steps; it scales inversely with the length, so that answers of any length have equally many slips.
    """
    numbers, now = [], start
    for _ in range(steps):
        right = next_number(now)
        if is_misconceived(now) and right - 5 in _WORLD and rng.random() < misconception_rate:
            now = right - 5
        else:
            now = slip(right, rng) if rng.random() < slip_rate * (STEPS / steps) else right
        numbers.append(now)
    return numbers


def write_wrong(start: int, rng: random.Random, steps: int = STEPS) -> list[int]:
    """An answer with a mistake."""
    while True:
        numbers = write(start, rng, slip_rate=0.05, misconception_rate=0.7, steps=steps)
        if mistakes(start, numbers):
            return numbers


def before(start: int, numbers: list[int], i: int) -> int:
    """The number that step i starts from."""
    return numbers[i - 1] if i else start


def mistakes(start: int, numbers: list[int]) -> list[int]:
    return [i for i, number in enumerate(numbers) if next_number(before(start, numbers, i)) != number]


def draw(rng: random.Random) -> int:
    return rng.choice(WORLD if rng.random() < 0.5 else STARTS)
