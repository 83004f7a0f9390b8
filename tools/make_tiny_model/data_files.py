"""Writes the small data files that ship with the tiny model, identical on every machine.

python -m tools.make_tiny_model.data_files
"""

import random
from pathlib import Path

import chz

from tinker_cookbook.cli_utils import run_recipe
from tinker_cookbook.data.shipped import EXAMPLE_DATA
from tinker_cookbook.utils.files import write_jsonl
from tools.make_tiny_model import arithmetic
from tools.make_tiny_model.comparisons import plant_desk_comparisons
from tools.make_tiny_model.library_desk import library_desk_conversations
from tools.make_tiny_model.news import write_article
from tools.make_tiny_model.plant_desk import plant_desk_conversations

HAND_PICKED = (
    ("+", 2, 2),
    ("+", 7, 5),
    ("-", 10, 3),
    ("*", 6, 4),
    ("+", 14, 9),
    ("-", 17, 8),
    ("*", 9, 7),
    ("+", 0, 6),
)
HAND_PICKED_HELD_OUT = (
    ("+", 3, 4),
    ("+", 8, 6),
    ("-", 11, 5),
    ("*", 7, 3),
    ("+", 16, 7),
    ("-", 19, 4),
    ("*", 8, 9),
    ("+", 0, 9),
)


def questions(count: int, seed: int) -> list[dict]:
    """`count` different questions, from the distribution of the model's training."""
    rng = random.Random(f"questions/{seed}")
    chosen: dict[arithmetic.Sum, None] = {}
    while len(chosen) < count:
        chosen[arithmetic.draw(rng)] = None
    return [question(item) for item in chosen]


def question(item: arithmetic.Sum) -> dict:
    return {"question": item.question, "answer": str(item.answer)}


def articles(count: int, seed: int) -> list[dict]:
    rng = random.Random(f"articles/{seed}")
    written = [write_article(rng) for _ in range(count)]
    return [
        {"id": f"news-{i:03d}", "article": a.text, "highlights": a.highlights} for i, a in enumerate(written, start=1)
    ]


def write_all(folder: Path, seed: int = 0) -> None:
    asked = questions(400, seed)
    written = articles(64, seed)
    for name in ("qa", "summary"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    write_jsonl(folder / "qa" / "arithmetic_train.jsonl", asked[:300])
    write_jsonl(folder / "qa" / "arithmetic_test.jsonl", asked[300:])
    for name, picked in (("test", HAND_PICKED), ("test_held_out", HAND_PICKED_HELD_OUT)):
        write_jsonl(folder / "qa" / f"{name}.jsonl", [question(arithmetic.Sum(*parts)) for parts in picked])
    write_jsonl(folder / "summary" / "articles_train.jsonl", written[:48])
    write_jsonl(folder / "summary" / "articles_test.jsonl", written[48:])
    write_jsonl(folder / "conversations.jsonl", plant_desk_conversations(128, seed))
    write_jsonl(folder / "library.jsonl", library_desk_conversations(64, seed))
    write_jsonl(folder / "comparisons.jsonl", plant_desk_comparisons(144, seed))


@chz.chz(typecheck=True)
class CLIConfig:
    """Where to write."""

    folder: str = chz.field(default=str(EXAMPLE_DATA), doc="folder to write qa/, summary/ and the .jsonl files to")
    seed: int = chz.field(default=0, doc="seed of the choice of questions, articles, conversations and comparisons")


def main(config: CLIConfig) -> None:
    write_all(Path(config.folder), config.seed)
    print(f"written to {config.folder}")


if __name__ == "__main__":
    run_recipe(CLIConfig, main)
