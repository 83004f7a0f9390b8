"""Any recipe over a grid of its keys: every combination is a run in its own folder, and the runs are ranked.

Keys and values are checked against the recipe before anything runs. The same command with the same sweep_dir resumes:
finished runs are kept, interrupted ones resume, failed ones are retried, and new values are added.

    python -m recipes.sweep                        # a demonstration: two learning rates of rl_basic, two seeds, 8 steps
    python -m recipes.sweep recipe=recipes.rl_basic grid.learning_rate=3e-4,1e-3 seeds=0,1 set.max_steps=10 processes=2
    python -m recipes.sweep recipe=recipes.sl_basic grid.lora_rank=4,32 sweep_dir=~/ranks metric=test/nll mode=min
    python -m recipes.sweep recipe=recipes.rl_basic grid.learning_rate=1e-4,1e-3 processes=0    # all on one base model

The folder gets sweep.csv and sweep.parquet (a row per run and step), summary.json and summary.md (the ranking).
"""

import time
from pathlib import Path
from typing import Any

import chz
from rich.console import Console

from recipes.results import Concurrency, SweepKeys
from tinker_cookbook import sweeps, variables
from tinker_cookbook.cli_utils import default_log_path, run_recipe
from tinker_cookbook.exceptions import ConfigurationError, TrainingError
from tinker_cookbook.sweeps.collect import check_ranking
from tinker_cookbook.sweeps.points import SEED_KEY, gather_keys, split_values
from tinker_cookbook.sweeps.ranking import Mode

RECIPE = "sweep"
DEMO_RECIPE = "recipes.rl_basic"
DEMO_GRID = {"learning_rate": ["1e-5", "1e-3"], SEED_KEY: ["0", "1"]}
DEMO_FIXED = {"max_steps": "8", "eval_every": "8", "save_every": "0"}


@chz.chz(typecheck=True)
class CLIConfig(SweepKeys, Concurrency):
    """Keys of `python -m recipes.sweep`."""

    recipe: str | None = chz.field(default=None, doc="module of the recipe, e.g. recipes.rl_basic")
    grid: dict[str, str] = chz.field(
        default_factory=dict,
        doc="grid.<key>=value,value: values to combine; separated by | instead where a value contains commas",
    )
    seeds: str | None = chz.field(default=None, doc="seeds to combine with the grid, e.g. 0,1,2")
    metric: str | None = chz.field(
        default=None, doc="metric to rank by; default: the first common metric that the runs log"
    )
    mode: Mode | None = chz.field(default=None, doc="max or min; default: the usual direction of the metric")
    value: str = chz.field(default="last", doc="how a run becomes one number: last, best, or mean:N (of the last N)")


async def main(cli: CLIConfig) -> None:
    recipe, values, fixed = what_to_run(cli)
    check_ranking(cli.metric, cli.mode, cli.value)
    folder = Path(cli.sweep_dir or _new_folder(recipe)).expanduser()
    points = sweeps.grid(values)
    console, ended = Console(soft_wrap=True), []

    def tell(result: sweeps.RunResult) -> None:
        ended.append(result)
        what = "was finished" if result.earlier else f"{result.status} in {result.seconds:.0f} s"
        error = f": {result.error}" if result.error else ""
        console.print(f"({len(ended)}/{len(points)}) {result.name} {what}{error}", markup=False, highlight=False)

    def announce() -> None:
        console.print(f"Sweep of {recipe}, {len(points)} runs, in {folder}", highlight=False)

    ways: dict[str, Any] = {"processes": cli.processes, "concurrent": cli.concurrent}
    results = await sweeps.run_sweep(recipe, points, folder, fixed=fixed, **ways, on_start=announce, on_result=tell)
    failed = [result for result in results if result.status == "failed"]
    if len(failed) == len(results):
        raise TrainingError(f"all {len(failed)} runs failed; see {folder}/*/console.log or logs.log")
    sweeps.write_tables(folder, sweeps.collect(folder))
    summary = sweeps.rank(folder, cli.metric, cli.mode, cli.value)
    sweeps.write_summary(folder, summary)
    sweeps.print_summary(summary, console)
    console.print(f"Files: {folder}", highlight=False)
    if failed:
        raise TrainingError(f"{len(failed)} of {len(results)} runs failed; the same command tries them again")


def what_to_run(cli: CLIConfig) -> tuple[str, dict[str, list[str]], dict[str, str]]:
    """The recipe, the values to combine, and the fixed ones. Raises ConfigurationError."""
    if cli.recipe is None:
        if cli.grid or cli.seeds or cli.set:
            raise ConfigurationError("recipe: say which recipe to run, e.g. recipe=recipes.rl_basic")
        return DEMO_RECIPE, DEMO_GRID, DEMO_FIXED
    values = {key: split_values(text) for key, text in cli.grid.items()}
    if cli.seeds is not None:
        if SEED_KEY in values:
            raise ConfigurationError(f"seeds={cli.seeds} and grid.{SEED_KEY} say the same thing; drop one")
        values[SEED_KEY] = split_values(cli.seeds)
    if not values:
        raise ConfigurationError("nothing to sweep over; give grid.<key>=value,value or seeds=0,1")
    return cli.recipe, values, dict(cli.set)


def _new_folder(recipe: str) -> str:
    name = f"{time.strftime('%Y%m%d_%H%M%S')}_{recipe.rpartition('.')[2]}"
    root = variables.read("TINKER_DEBATE_LOG_ROOT")
    return str(Path(root, name)) if root else default_log_path(RECIPE, name)


if __name__ == "__main__":
    run_recipe(CLIConfig, main, prepare=lambda arguments: gather_keys(arguments, "grid", "set"))
