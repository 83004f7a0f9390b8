"""Writes the questions of the tasks collatz, collatz_6, collatz_24 and collatz_48, identical on every machine.

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
    """Write collatz/train.jsonl and collatz/test.jsonl below `folder`, and the same with prefixes facts_ and other_facts_; for
    other lengths in a subfolder named after the length.
    """
    for steps in LENGTHS:
        subfolder = folder / "collatz" if steps == STEPS else folder / "collatz" / str(steps)
        subfolder.mkdir(parents=True, exist_ok=True)
        for name, rows in rows_of(steps).items():
            write_jsonl(subfolder / f"{name}.jsonl", rows)


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
    """The part, with the first planted fact on the trail: questions about one fact are not independent."""
    planted = planted_in(start, steps)
    return f"{part}:{planted[0]}" if planted else part


@chz.chz(typecheck=True)
class CLIConfig:
    """Where to write."""

    folder: str = chz.field(default=str(EXAMPLE_DATA), doc="folder to write collatz/ to")


def main(config: CLIConfig) -> None:
    write_all(Path(config.folder))


if __name__ == "__main__":
    run_recipe(CLIConfig, main)
