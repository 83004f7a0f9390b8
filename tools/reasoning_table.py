"""Rewrites the table of reasoning-gym's generators in docs/reasoning_gym.md from the installed package.

    python -m tools.reasoning_table

Needs the extra `reasoning`. An asterisk marks a generator that evaluates answers as Python, a dagger one without levels.
"""

import sys
from itertools import groupby
from pathlib import Path

from tinker_cookbook.env.reasoning import package
from tinker_cookbook.exceptions import TinkerCookbookError
from tinker_local_backend.command import check_command

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reasoning_gym.md"
HEAD = "| category | generators |\n|---|---|\n"


def table() -> str:
    """A row for each category, with the generators in order. Raises MissingPackageError."""
    known = package.generators()
    rows = [
        f"| {category} | {', '.join(map(_shown, names))} |\n"
        for category, names in groupby(known, key=lambda name: known[name])
    ]
    return HEAD + "".join(rows)


def _shown(name: str) -> str:
    return f"`{name}`{'*' * package.runs_answers(name)}{'†' * (not package.has_levels(name))}"


def main() -> int:
    before, _, rest = PAGE.read_text().partition(HEAD)
    lines = rest.splitlines(keepends=True)
    after = "".join(lines[next((i for i, line in enumerate(lines) if not line.startswith("|")), len(lines)) :])
    try:
        PAGE.write_text(before + table() + after)
    except TinkerCookbookError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    check_command()
    sys.exit(main())
