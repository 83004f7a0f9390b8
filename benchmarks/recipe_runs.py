"""Every recipe with its defaults, in its own process: duration, and whether its numbers improve as documented.

    python -m benchmarks.recipe_runs
    python -m benchmarks.recipe_runs only=recipes.rl_basic,recipes.tool_use

The smoke test runs the same table (`recipe_table.py`) with small settings. Exits with 1 if a recipe fails, exceeds the time limit
(per training), or moves a number in the wrong direction.
"""

from __future__ import annotations

import importlib.util
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import chz
from rich.console import Console
from rich.table import Table

from benchmarks.machine import facts
from benchmarks.recipe_table import RECIPES, RecipeRun
from tinker_cookbook import cli_utils
from tinker_cookbook.utils.files import write_json, write_text

ROOT = Path(__file__).parents[1]

Start = Callable[[list[str], dict[str, str], str], tuple[int, str]]  # (command, environment, typed) -> code, printed


@dataclass(frozen=True)
class Outcome:
    """The result of a run."""

    run: RecipeRun
    seconds: float
    cpu_seconds: float
    """of the process and its children; more reliable than `seconds` on a busy machine"""
    returncode: int
    output: str
    values: tuple[tuple[float, float] | None, ...]
    missing: tuple[str, ...]

    def problems(self, limit: float) -> list[str]:
        """The problems of the run; empty if there are none."""
        problems = [] if self.returncode == 0 else [f"exit code {self.returncode}"]
        limit *= self.run.trainings
        if self.seconds > limit:
            problems.append(f"took {self.seconds:.0f} s, more than {limit:.0f}")
        problems += [f"no {name}" for name in self.missing]
        for measure, values in zip(self.run.measures, self.values, strict=True):
            if values is None:
                problems.append(f"{measure.key} was not reported twice")
            elif not measure.moved_right(*values):
                problems.append(f"{measure.key} did not go {measure.better}")
        return problems


def spawned(command: list[str], env: dict[str, str], typed: str) -> tuple[int, str]:
    done = subprocess.run(
        command, cwd=ROOT, env=env, input=typed, text=True, timeout=900, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )  # fmt: skip
    return done.returncode, done.stdout


def run_recipe(run: RecipeRun, folder: Path, sl_basic: Path, small: bool = False, start: Start = spawned) -> Outcome:
    """Run one recipe in its own process; its checkpoints go below `folder`'s parent."""
    environment = {key: value for key, value in os.environ.items() if key != "TINKER_BACKEND"}
    environment |= {"TINKER_LOCAL_HOME": str(sl_basic.parent / "home"), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    started, used = time.perf_counter(), _children_cpu()
    returncode, output = start(run.command(folder, sl_basic, small), environment, run.stdin)
    seconds, cpu_seconds = time.perf_counter() - started, _children_cpu() - used
    values = tuple(None if returncode else measure.read(folder) for measure in run.measures)
    missing = tuple(name for name in run.files if not (folder / name).exists())
    return Outcome(run, seconds, cpu_seconds, returncode, output, values, missing)


def _children_cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


@chz.chz(typecheck=True)
class CLIConfig:
    """Keys of `python -m benchmarks.recipe_runs`."""

    only: tuple[str, ...] = chz.field(default=(), doc="run only these recipes, by module; default: all")
    limit: float = chz.field(
        default=120.0,
        doc="time limit in seconds of a recipe, or of each of its trainings",
        validator=chz.validators.gt(0),
    )
    write: bool = chz.field(
        default=False,
        doc="write benchmarks/results/recipes.md and recipes/runs.json; with only=, the rows of these recipes",
    )


def main(config: CLIConfig) -> int:
    chosen = [run for run in RECIPES if not config.only or run.module in config.only]
    if unknown := set(config.only) - {run.module for run in chosen}:
        raise SystemExit(f"only={','.join(sorted(unknown))}: not in the table of recipes")
    with tempfile.TemporaryDirectory(prefix="recipes-") as root:
        sl_basic = Path(root) / "recipes.sl_basic"
        if any("{sl_basic}" in argument for run in chosen for argument in run.arguments):
            chosen = [*(run for run in RECIPES if run.module == "recipes.sl_basic" and run not in chosen), *chosen]
        outcomes = []
        for run in chosen:
            if absent := [package for package in run.needs if importlib.util.find_spec(package) is None]:
                print(f"{run.module}: not run, {', '.join(absent)} is not installed", flush=True)
                continue
            print(f"{run.module} ...", flush=True)
            outcome = run_recipe(run, Path(root) / run.module, sl_basic)
            outcomes.append(outcome)
            problems = outcome.problems(config.limit)
            print(
                f"    {outcome.seconds:.0f} s, {outcome.cpu_seconds:.0f} s of CPU  {'; '.join(problems) or 'ok'}",
                flush=True,
            )
            if outcome.returncode:
                print(outcome.output[-2000:], flush=True)
    rows = table_rows(outcomes, config.limit)
    table = Table(title="Recipes with their defaults", title_justify="left")
    for column in COLUMNS:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*row)
    Console().print(table)
    if config.write:
        _write(rows, outcomes)
    return int(any(outcome.problems(config.limit) for outcome in outcomes))


COLUMNS = ("recipe", "seconds", "CPU seconds", "before -> after", "remark")


def table_rows(outcomes: Sequence[Outcome], limit: float) -> list[list[str]]:
    rows = []
    for outcome in outcomes:
        moved = [
            f"{measure.folder + ': ' if measure.folder else ''}{measure.key} "
            + (f"{values[0]:.3f} -> {values[1]:.3f}" if values else "not measured")
            for measure, values in zip(outcome.run.measures, outcome.values, strict=True)
        ]
        problems = "; ".join(outcome.problems(limit)) or "ok"
        times = [f"{outcome.seconds:.0f}", f"{outcome.cpu_seconds:.0f}"]
        rows.append([outcome.run.module, *times, "; ".join(moved), problems])
    return rows


def _write(rows: Sequence[Sequence[str]], outcomes: Sequence[Outcome]) -> None:
    """Write the results. Rows of recipes that were not run are kept, with the machine on which they were measured."""
    results = Path(__file__).parent / "results"
    machine = facts(1)
    now = {
        outcome.run.module: {
            "seconds": outcome.seconds,
            "cpu_seconds": outcome.cpu_seconds,
            "returncode": outcome.returncode,
            "measures": {
                f"{measure.folder}/{measure.key}".lstrip("/"): list(values) if values else None
                for measure, values in zip(outcome.run.measures, outcome.values, strict=True)
            },
            "row": list(row),
            "machine": machine,
        }
        for outcome, row in zip(outcomes, rows, strict=True)
    }
    # In a subfolder, because `benchmarks.tables` reads all JSON files in `results`.
    path = results / "recipes" / "runs.json"
    path.parent.mkdir(exist_ok=True)
    earlier = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    known = {**earlier, **now}
    content = {run.module: known[run.module] for run in RECIPES if run.module in known}
    write_json(path, content)
    lines = [
        "# Recipes with their defaults",
        "",
        "`python -m benchmarks.recipe_runs write=True`",
        "",
        "| " + " | ".join(COLUMNS) + " |",
        "|" + "---|" * len(COLUMNS),
        *("| " + " | ".join(entry["row"]) + " |" for entry in content.values()),
    ]
    write_text(results / "recipes.md", "\n".join(lines) + "\n")


if __name__ == "__main__":
    sys.exit(cli_utils.run_recipe(CLIConfig, main))
