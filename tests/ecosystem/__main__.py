"""Runs the public recipes of each version and writes the tables of docs/ecosystem.md: python -m tests.ecosystem [version ...]

With versions only these are run, and the page stays as it is.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.ecosystem.package import VERSIONS, unpack_recipes
from tests.ecosystem.running import ROOT, Outcome, make_model, run_recipe
from tests.ecosystem.table import RECIPES
from tinker_cookbook.utils.files import write_text
from tinker_cookbook.utils.misc_utils import markdown_table

PAGE = ROOT / "docs" / "ecosystem.md"
MARK = "<!-- what follows is written by python -m tests.ecosystem -->"


def table(version: str, outcomes: Sequence[Outcome]) -> str:
    """A version's table and its count."""
    rows = [["recipe", "result", "rows of metrics", "checkpoints", "stands in for what cannot be had"]]
    for recipe, outcome in zip(RECIPES, outcomes, strict=True):
        result = "trains and saves" if recipe.writes is None else f"writes {Path(recipe.writes).name}"
        counts = [str(outcome.metrics_rows), str(outcome.checkpoints)] if recipe.log_paths else ["", ""]
        rows.append([f"`{recipe.module}`", outcome.problem or result, *counts, recipe.stands_in])
    good = sum(not outcome.problem for outcome in outcomes)
    return f"{good} of {len(outcomes)} recipes of tinker-cookbook {version} run unmodified.\n\n{markdown_table(rows)}\n"


def run_version(version: str) -> list[Outcome]:
    """What became of each recipe, in the order of the table."""
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        package = unpack_recipes(folder / "package", version)
        make_model(folder / "model", package, folder)
        for recipe in RECIPES:
            (folder / recipe.name).mkdir()
            outcomes.append(run_recipe(recipe, package, folder / "model", folder / recipe.name))
            print(f"{version} {recipe.name}: {outcomes[-1].problem or 'ok'} ({outcomes[-1].seconds:.0f} s)", flush=True)
    return outcomes


def main(versions: Sequence[str]) -> int:
    found = {version: run_version(version) for version in versions or VERSIONS}
    if not versions:
        text = PAGE.read_text(encoding="utf-8")
        tables = "\n".join(table(version, outcomes) for version, outcomes in found.items())
        write_text(PAGE, text[: text.index(MARK)] + f"{MARK}\n\n{tables}")
    return int(any(outcome.problem for outcomes in found.values() for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
