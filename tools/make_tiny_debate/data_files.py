"""Writes the questions of the tasks collatz, collatz_6, collatz_24 and collatz_48, the same on every machine.

python -m tools.make_tiny_debate.data_files
"""

from pathlib import Path

import chz

from tinker_cookbook.cli_utils import run_recipe
from tinker_cookbook.data.shipped import EXAMPLE_DATA
from tinker_cookbook.env.shipped.questions.collatz import LENGTHS
from tinker_cookbook.utils.files import write_jsonl
from tools.make_tiny_debate.trails import HALVES, LONGEST_SPLIT_BY_FACT, STEPS, planted_in, split, split_by_fact, trail


def write_all(folder: Path) -> None:
    """collatz/train.jsonl, collatz/test.jsonl, and the same with the prefixes facts_ and other_facts_, below `folder`; those of
    other lengths in folders called after them.
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
    for name in HALVES if steps <= LONGEST_SPLIT_BY_FACT else ():
        by_fact = split_by_fact(name, steps=steps)
        files[f"{name}_train"] = [_row(start, steps) for start in by_fact.train]
        files[f"{name}_test"] = [
            {**_row(start, steps), "part": _part(part, start, steps)}
            for part, starts in by_fact.held_out.items()
            for start in starts
        ]
    return files


def _row(start: int, steps: int) -> dict[str, str]:
    return {"id": f"trail-{start}", "question": str(start), "answer": str(trail(start, steps)[-1])}


def _part(part: str, start: int, steps: int) -> str:
    """With the planted fact that the trail passes first: questions about one fact are not independent."""
    planted = planted_in(start, steps)
    return f"{part}:{planted[0]}" if planted else part


@chz.chz(typecheck=True)
class CLIConfig:
    """Where to write."""

    folder: str = chz.field(default=str(EXAMPLE_DATA), doc="folder that gets collatz/")


def main(config: CLIConfig) -> None:
    write_all(Path(config.folder))


if __name__ == "__main__":
    run_recipe(CLIConfig, main)
