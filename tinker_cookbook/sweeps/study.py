"""A study: several sweeps in one folder, announced with their hours, resumed by the same command, reduced to one table.

Each part is a recipe over a grid of its keys, in a folder of its own (`run.py`). The study's folder gets `rows.parquet`,
every logged row of every run, and `runs.parquet`, a row per run with the measures that the study asks for. Estimates
are over seeds: differences are taken seed by seed, because runs of one seed share their data and their start.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tinker_cookbook.exceptions import TrainingError
from tinker_cookbook.runs.bootstrap import note_log_path
from tinker_cookbook.stores.folder import one_writer, open_folder
from tinker_cookbook.sweeps.collect import collect
from tinker_cookbook.sweeps.points import SEED_KEY, PlannedRun, Point, Recipe, Value, grid, load_recipe, plan
from tinker_cookbook.sweeps.run import STATUS_BASE_NAME, RunResult, read_status, run_sweep, shared_base
from tinker_cookbook.utils.intervals import ANY, Estimate, student_mean
from tinker_cookbook.utils.lazy import pandas

ROWS_BASE_NAME, RUNS_BASE_NAME = "rows.parquet", "runs.parquet"
PART, RUN, STATUS = "part", "run", "status"
STEPS_KEY = "max_steps"
TRIAL_STEPS = (1, 3)
"""Steps of the two runs that measure how long the start and each step take."""
SECONDS_PER_HOUR = 3600.0

Measure = Callable[["pandas.DataFrame"], Mapping[str, float]]
"""The rows of one run, in order -> its measures; NaN for one that it does not have."""


@dataclass(frozen=True)
class Part:
    """A recipe over a grid of its keys."""

    name: str
    """its folder below the study's, and `part` in the tables"""
    recipe: str
    """the recipe's module"""
    grid: Mapping[str, Sequence[Value]]
    """the values to combine, seeds among them"""
    fixed: Point = field(default_factory=dict[str, Value])
    """the same in every run; `max_steps` must be among them"""

    def loaded(self) -> Recipe:
        return load_recipe(self.recipe)

    def planned(self) -> list[PlannedRun]:
        """Its runs, checked against the recipe. Raises ConfigurationError."""
        return plan(self.loaded(), grid(self.grid), self.fixed)


async def run_study(
    parts: Sequence[Part],
    folder: str | Path,
    *,
    processes: int = 1,
    concurrent: int = 1,
    only_plan: bool = False,
    say: Callable[[str], None] = print,
) -> list[RunResult]:
    """Announce the runs and the expected hours, then run what is not finished.

    Args:
        parts: what to run; the runs of a part come one after the other, and so do the parts.
        folder: the study's folder; an earlier start of the same study is continued.
        processes: runs at a time, each in a separate process; 0: all in this process, on one base model.
        concurrent: with processes=0, runs at a time.
        only_plan: announce, and run nothing but the trial that the hours are estimated from.
        say: receives each line for the terminal.

    Returns:
        A result per run, in order; none with `only_plan`.

    Raises:
        ConfigurationError: as in `run_sweep`; nothing is run then.
        TrainingError: the trial failed.
    """
    planned = [part.planned() for part in parts]
    folder = open_folder(folder, "sweep_dir")
    with one_writer(folder, "sweep_dir"):
        note_log_path(folder)
        total = sum(map(len, planned))
        with shared_base([run for runs in planned for run in runs], processes):
            say(f"{total} runs in {folder}")
            for part, runs in zip(parts, planned, strict=True):
                axes = "; ".join(f"{key} {', '.join(map(str, values))}" for key, values in part.grid.items())
                say(f"  {part.name}, {len(runs)} of {part.recipe}: {axes}")
            say(await _expected(parts, folder, processes, concurrent))
            if only_plan:
                return []
            results: list[RunResult] = []

            def tell(result: RunResult) -> None:
                results.append(result)
                what = "was finished" if result.earlier else f"{result.status} in {result.seconds:.0f} s"
                error = f": {result.error}" if result.error else ""
                place = f"({len(results)}/{total}) {Path(result.log_path).parent.name}/{result.name}"
                say(f"{place} {what}{error}")

            in_order: list[RunResult] = []
            for part in parts:
                in_order += await run_sweep(
                    part.loaded(),
                    grid(part.grid),
                    folder / part.name,
                    fixed=part.fixed,
                    processes=processes,
                    concurrent=concurrent,
                    on_result=tell,
                )
    return in_order


async def _expected(parts: Sequence[Part], folder: Path, processes: int, concurrent: int) -> str:
    """What is left and how long it takes. A recipe's run takes as long as its finished ones, else as long as a trial estimates.

    Runs in this process share what it computes with: the seconds of one run are those of all that run next to it.
    """
    seconds, left, told = 0.0, 0, list[str]()
    of_recipe: dict[str, float] = {}
    for part in parts:
        finished = _seconds_of_finished([one for one in parts if one.recipe == part.recipe], folder)
        if (open_runs := len(part.planned()) - len(_seconds_of_finished([part], folder))) <= 0:
            continue
        if part.recipe not in of_recipe:
            shared = concurrent if processes == 0 else 1
            each = statistics.median(finished) / shared if finished else await _trial(part, folder, processes)
            of_recipe[part.recipe] = each
            told.append(
                f"{each:.0f} s for a run of {part.recipe}, by {'those that are finished' if finished else 'a trial'}"
            )
        left += open_runs
        seconds += open_runs * of_recipe[part.recipe] / max(1, processes)
    if not left:
        return "All runs were finished"
    return f"Expected: {left} runs to go, about {seconds / SECONDS_PER_HOUR:.2f} hours ({'; '.join(told)})"


def _seconds_of_finished(parts: Sequence[Part], folder: Path) -> list[float]:
    """Of the runs of these parts that an earlier start finished, how long each took."""
    paths = [folder / part.name / run.name / STATUS_BASE_NAME for part in parts for run in part.planned()]
    statuses = [read_status(path) for path in paths if path.exists()]
    return [float(status.get("seconds", 0.0)) for status in statuses if status["status"] == "finished"]


async def _trial(part: Part, folder: Path, processes: int) -> float:
    """Seconds that a run of the part is expected to take, by shorter runs of its last point."""
    taken: list[float] = []
    with TemporaryDirectory(dir=folder, prefix="trial") as trial:
        for steps in TRIAL_STEPS:
            (result,) = await run_sweep(
                part.loaded(),
                grid(part.grid)[-1:],
                Path(trial) / str(steps),
                fixed={**part.fixed, STEPS_KEY: steps},
                processes=min(1, processes),
            )
            if result.status == "failed":
                raise TrainingError(f"{part.name}: a trial of {steps} steps failed: {result.error}")
            taken.append(result.seconds)
    (few, many), (first, last) = TRIAL_STEPS, taken
    per_step = max(0.0, last - first) / (many - few)
    return first + per_step * (int(str(part.fixed[STEPS_KEY])) - few)


def study_rows(parts: Sequence[Part], folder: str | Path) -> pandas.DataFrame:
    """Every logged row of every run of the parts, as `collect` gives them, with the column `part`. Other runs of the
    folder, of an earlier plan, are left out. Raises as `collect` does.
    """
    tables: list[pandas.DataFrame] = []
    for part in parts:
        table = collect(Path(folder).expanduser() / part.name)
        table = table[table[RUN].isin({run.name for run in part.planned()})]
        table.insert(0, PART, part.name)
        tables.append(table)
    return pandas.concat(tables, ignore_index=True)


def reduced(rows: pandas.DataFrame, keys: Sequence[str], measure: Measure) -> pandas.DataFrame:
    """A row per finished run: part, run, the values of these swept keys, and its measures.

    Args:
        rows: as `study_rows` gives them.
        keys: columns that are the same in all rows of a run; a part without one of them has NaN there.
    """
    runs: list[dict[str, Any]] = []
    for (part, run), of_run in rows[rows[STATUS] == "finished"].groupby([PART, RUN], sort=False):
        first = of_run.iloc[0]
        runs.append({PART: part, RUN: run, **{key: first.get(key) for key in keys}, **measure(of_run)})
    return pandas.DataFrame(runs, columns=None if runs else [PART, RUN, *keys])


def write_parquet(folder: str | Path, rows: pandas.DataFrame, runs: pandas.DataFrame) -> None:
    """Write both tables into the study's folder."""
    place = Path(folder).expanduser()
    rows.to_parquet(place / ROWS_BASE_NAME, index=False)
    runs.to_parquet(place / RUNS_BASE_NAME, index=False)


def select(runs: pandas.DataFrame, setting: Mapping[str, Any]) -> pandas.DataFrame:
    """The runs with these values."""
    for key, value in setting.items():
        runs = runs[runs[key] == value]
    return runs


def over_seeds(
    runs: pandas.DataFrame, setting: Mapping[str, Any], measure: str, low_high: tuple[float, float] = ANY
) -> Estimate | None:
    """A measure's mean over the seeds of a setting, with Student's 95 % interval; None where no run has it."""
    values = [float(value) for value in select(runs, setting)[measure].dropna()]
    return student_mean(values, *low_high) if values else None


def difference(
    runs: pandas.DataFrame,
    one: Mapping[str, Any],
    other: Mapping[str, Any],
    measure: str,
    low_high: tuple[float, float] = ANY,
) -> Estimate | None:
    """A measure in one setting minus that in another, over the seeds that both have; None without a common one."""
    of_one, of_other = (select(runs, setting).set_index(SEED_KEY)[measure].dropna() for setting in (one, other))
    gaps = (of_one - of_other).dropna()
    return student_mean([float(gap) for gap in gaps], *low_high) if len(gaps) else None
