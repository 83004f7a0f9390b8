"""Writes the questions of the tasks collatz, collatz_6, collatz_24 and collatz_48, the same on every machine.

python -m tools.make_tiny_debate.data_files
"""

from pathlib import Path

import chz

from tinker_cookbook.cli_utils import run_recipe
from tinker_cookbook.data.shipped import EXAMPLE_DATA
from tinker_cookbook.env.shipped.questions.collatz import LENGTHS
from tinker_cookbook.utils.files import write_jsonl
from tools.make_tiny_debate.trails import LONGEST_SPLIT_BY_FACT, STEPS, split, split_by_fact, trail


def write_all(folder: Path) -> None:
    """collatz/train.jsonl, collatz/test.jsonl, and the same with the prefix facts_, below `folder`; those of other lengths in
    folders called after them.
    """
    for steps in LENGTHS:
        place = folder / "collatz" if steps == STEPS else folder / "collatz" / str(steps)
        place.mkdir(parents=True, exist_ok=True)
        for name, rows in rows_of(steps).items():
            write_jsonl(place / f"{name}.jsonl", rows)


def rows_of(steps: int) -> dict[str, list[dict[str, str]]]:
    """The rows of each file for answers of this length."""
    names = zip(("train", "test"), split(), strict=True)
    files = {name: [_row(start, steps) for start in starts] for name, starts in names}
    if steps <= LONGEST_SPLIT_BY_FACT:
        train, by_fact = split_by_fact(steps=steps)
        files["facts_train"] = [_row(start, steps) for start in train]
        files["facts_test"] = [
            {**_row(start, steps), "part": part} for part, starts in by_fact.items() for start in starts
        ]
    return files


def _row(start: int, steps: int) -> dict[str, str]:
    return {"id": f"trail-{start}", "question": str(start), "answer": str(trail(start, steps)[-1])}


@chz.chz(typecheck=True)
class CLIConfig:
    """Where to write."""

    folder: str = chz.field(default=str(EXAMPLE_DATA), doc="folder that gets collatz/")


def main(config: CLIConfig) -> None:
    write_all(Path(config.folder))


if __name__ == "__main__":
    run_recipe(CLIConfig, main)
