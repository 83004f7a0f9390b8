"""Sweeps: one recipe run over a grid of its keys, resumable, with all metrics in one table and a ranking.

recipe = load_recipe("recipes.rl_basic")
results = await run_sweep(recipe, grid({"learning_rate": [1e-4, 1e-3], "seed": [0, 1]}), "~/sweep", processes=2)
table = collect("~/sweep")
summary = rank("~/sweep", metric="test/env/all/correct", mode="max")
"""

from tinker_cookbook.sweeps.collect import Summary, collect, print_summary, rank, write_summary, write_tables
from tinker_cookbook.sweeps.points import Recipe, grid, load_recipe
from tinker_cookbook.sweeps.run import RunResult, run_sweep

__all__ = [
    "Recipe",
    "RunResult",
    "Summary",
    "collect",
    "grid",
    "load_recipe",
    "print_summary",
    "rank",
    "run_sweep",
    "write_summary",
    "write_tables",
]
