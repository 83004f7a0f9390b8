"""Runs the public recipes and writes the table of docs/ecosystem.md: python -m tests.ecosystem"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.ecosystem.package import VERSION, unpack_recipes
from tests.ecosystem.running import ROOT, Outcome, make_model, run_recipe
from tests.ecosystem.table import RECIPES
from tinker_cookbook.utils.files import write_text
from tinker_cookbook.utils.misc_utils import markdown_table

PAGE = ROOT / "docs" / "ecosystem.md"
MARK = "<!-- what follows is written by python -m tests.ecosystem -->"


def table(outcomes: Sequence[Outcome]) -> str:
    """The page's table and its count."""
    rows = [["recipe", "result", "rows of metrics", "checkpoints", "stands in for what cannot be had"]]
    for recipe, outcome in zip(RECIPES, outcomes, strict=True):
        result = "trains and saves" if recipe.writes is None else f"writes {Path(recipe.writes).name}"
        counts = [str(outcome.metrics_rows), str(outcome.checkpoints)] if recipe.log_paths else ["", ""]
        rows.append([f"`{recipe.module}`", outcome.problem or result, *counts, recipe.stands_in])
    good = sum(not outcome.problem for outcome in outcomes)
    return f"{good} of {len(outcomes)} recipes of tinker-cookbook {VERSION} run unmodified.\n\n{markdown_table(rows)}\n"


def main() -> int:
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        package = unpack_recipes(folder / "package")
        make_model(folder / "model", package, folder)
        for recipe in RECIPES:
            (folder / recipe.name).mkdir()
            outcomes.append(run_recipe(recipe, package, folder / "model", folder / recipe.name))
            print(f"{recipe.name}: {outcomes[-1].problem or 'ok'} ({outcomes[-1].seconds:.0f} s)", flush=True)
    text = PAGE.read_text(encoding="utf-8")
    write_text(PAGE, text[: text.index(MARK)] + f"{MARK}\n\n{table(outcomes)}")
    return int(any(outcome.problem for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
