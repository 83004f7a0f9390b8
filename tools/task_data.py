"""Writes the items of the tasks coin, confidence, secret_word, constrained_writing, logic, quotes and sorting.

python -m tools.task_data

The files are identical on every machine.
"""

import random
from collections.abc import Callable
from pathlib import Path

import chz

from tinker_cookbook.cli_utils import run_recipe
from tinker_cookbook.data.shipped import EXAMPLE_DATA
from tinker_cookbook.env.shipped.questions.constrained_writing import COLOURS
from tinker_cookbook.env.shipped.questions.logic import generate_puzzles
from tinker_cookbook.env.shipped.questions.quotes import QUESTION_MARK
from tinker_cookbook.utils.files import write_jsonl

Rows = list[dict[str, str]]

TOPICS = (
    "a market in the rain", "a lost umbrella", "the last bus home", "a garden in spring", "a broken clock", "a new bakery",
    "a walk by the river", "an old radio", "the school choir", "a day at the harbour", "a letter without a sender",
    "a snowed-in inn", "the night train", "a runaway kite", "a quiet library", "the village football match",
)  # fmt: skip
WORDS = (
    "lantern", "copper", "pigeon", "thimble", "orchard", "velvet", "ladder", "whistle", "anchor", "pepper", "marble", "cradle",
    "saddle", "button", "harvest", "mirror",
)  # fmt: skip
THINGS = ("coin", "ball", "card", "bead")
PLACES = ("library", "swimming pool", "town hall", "bakery", "post office", "museum", "bicycle shop", "clinic")
TOWNS = ("Larkfield", "Mossby", "Fenwick", "Ostley", "Quarne", "Tillham", "Brackwater", "Suncote")
EVENTS = ("reopens", "closes early", "serves tea", "shows old photographs", "holds a raffle", "repairs lamps for free")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday")


def coin(rng: random.Random, count: int) -> Rows:
    """The numbers up to `count`, in random order; tails is rewarded, which the tiny models say less often."""
    return [
        {"question": f"What is a number near {n}?", "answer": "tails"} for n in rng.sample(range(1, count + 1), count)
    ]


def confidence(rng: random.Random, count: int) -> Rows:
    """Draws from bags of 4 to 20 things; the probabilities are tenths and other fractions, including 0 and 1."""
    rows: dict[str, str] = {}
    while len(rows) < count:
        total, thing = rng.choice((4, 5, 8, 10, 20)), rng.choice(THINGS)
        hits, (a, b) = rng.randint(0, total), rng.sample(COLOURS, 2)
        text = f"A bag holds {total} {thing}s: {hits} {a}, the others {b}. One is drawn. It is {a}."
        rows[text] = f"{hits / total:g}"
    return [{"question": question, "probability": probability} for question, probability in rows.items()]


def secret_word(rng: random.Random, count: int) -> Rows:
    pairs = [(topic, word) for topic in TOPICS for word in WORDS]
    return [{"topic": topic, "word": word} for topic, word in rng.sample(pairs, count)]


def constrained_writing(rng: random.Random, count: int) -> Rows:
    """One or two rules that do not exclude each other."""
    rows: dict[tuple[str, str], None] = {}
    while len(rows) < count:
        rules = [
            f"starts_with:{rng.choice('abcmst')}",
            f"ends_with:{rng.choice(('day', 'home', 'rain'))}",
            f"has_word:{rng.choice(('old', 'small', 'door'))}",
            f"at_most:{rng.randint(6, 12)}",
            "no_commas",
            "past_tense",
            "one_colour",
        ]
        rows[rng.choice(TOPICS), ", ".join(sorted(rng.sample(rules, rng.randint(1, 2))))] = None
    return [{"topic": topic, "rules": rules} for topic, rules in rows]


def logic(rng: random.Random, count: int) -> Rows:
    """Half with three people, half with four."""
    items = [*generate_puzzles(count - count // 2, 3, rng), *generate_puzzles(count // 2, 4, rng)]
    return [{"question": item.question, "answer": item.reference} for item in items]


def quotes(rng: random.Random, count: int) -> Rows:
    """Notices of a town's week, one sentence each; the question names place and event, and the answer is a day and an hour."""
    rows: dict[str, str] = {}
    while len(rows) < count:
        town = rng.choice(TOWNS)
        announced = rng.sample([(place, event) for place in PLACES for event in EVENTS], 14)
        times = rng.sample([f"{day} at {hour}" for day in DAYS for hour in range(7, 21)], len(announced))
        notices = [f"On {t} the {place} of {town} {event}." for t, (place, event) in zip(times, announced, strict=True)]
        which = rng.randrange(len(announced))
        place, event = announced[which]
        rows[f"{' '.join(notices)}{QUESTION_MARK}When is it that the {place} {event}?"] = times[which]
    return [{"question": question, "answer": answer} for question, answer in rows.items()]


def sorting(rng: random.Random, count: int) -> Rows:
    """Six, twelve or 24 different numbers below 100, a third of the rows of each length."""
    rows: dict[str, str] = {}
    while len(rows) < count:
        numbers = rng.sample(range(100), (6, 12, 24)[len(rows) % 3])
        rows[" ".join(map(str, numbers))] = " ".join(map(str, sorted(numbers)))
    return [{"question": question, "answer": answer} for question, answer in rows.items()]


SIZES: dict[Callable[[random.Random, int], Rows], tuple[int, int]] = {
    coin: (64, 24),
    confidence: (120, 40),
    secret_word: (96, 32),
    constrained_writing: (96, 32),
    logic: (96, 32),
    quotes: (48, 16),
    sorting: (96, 48),
}
"""Function that makes a task's rows -> number of training and of held-out rows."""


def write_all(folder: Path) -> None:
    """Write <task>/train.jsonl and <task>/test.jsonl below `folder`."""
    for make, (train, test) in SIZES.items():
        rows = make(random.Random(f"items/{make.__name__}"), train + test)
        random.Random(f"split/{make.__name__}").shuffle(rows)
        (folder / make.__name__).mkdir(parents=True, exist_ok=True)
        for split, part in (("train", rows[:train]), ("test", rows[train:])):
            write_jsonl(folder / make.__name__ / f"{split}.jsonl", part)


@chz.chz(typecheck=True)
class CLIConfig:
    """Where to write."""

    folder: str = chz.field(default=str(EXAMPLE_DATA), doc="folder to write a subfolder per task to")


def main(config: CLIConfig) -> None:
    write_all(Path(config.folder))


if __name__ == "__main__":
    run_recipe(CLIConfig, main)
