"""Writes the questions of the task collatz, the same on every machine.

python -m tools.make_tiny_debate.data_files
"""

from pathlib import Path

import chz

from tinker_cookbook.cli_utils import run_recipe
from tinker_cookbook.data.shipped import EXAMPLE_DATA
from tinker_cookbook.utils.files import write_jsonl
from tools.make_tiny_debate.trails import split, split_by_fact, trail


def write_all(folder: Path) -> None:
    """collatz/train.jsonl, collatz/test.jsonl, and the same with the prefix facts_, below `folder`."""
    (folder / "collatz").mkdir(parents=True, exist_ok=True)
    train, by_fact = split_by_fact()
    files = {
        **{name: [_row(start) for start in starts] for name, starts in zip(("train", "test"), split(), strict=True)},
        "facts_train": [_row(start) for start in train],
        "facts_test": [{**_row(start), "part": part} for part, starts in by_fact.items() for start in starts],
    }
    for name, rows in files.items():
        write_jsonl(folder / "collatz" / f"{name}.jsonl", rows)


def _row(start: int) -> dict[str, str]:
    return {"id": f"trail-{start}", "question": str(start), "answer": str(trail(start)[-1])}


@chz.chz(typecheck=True)
class CLIConfig:
    """Where to write."""

    folder: str = chz.field(default=str(EXAMPLE_DATA), doc="folder that gets collatz/")


def main(config: CLIConfig) -> None:
    write_all(Path(config.folder))


if __name__ == "__main__":
    run_recipe(CLIConfig, main)
