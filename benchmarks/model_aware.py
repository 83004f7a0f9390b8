"""Change of the reward of each model-aware environment on the shipped model, over several seeds, with its controls.

    python -m benchmarks.model_aware
    python -m benchmarks.model_aware only=train_ghost seeds=0 page=

Trains the experiment files of configs/, one run for each file and seed, and writes the table of docs/model_aware.md. With the
same folder, finished runs are kept.
"""

import asyncio
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import chz

from benchmarks.config import run_benchmark
from benchmarks.errors import BenchmarkError
from tinker_cookbook import sweeps
from tinker_cookbook.report.tables import markdown_table
from tinker_cookbook.runs.ml_log import read_metrics
from tinker_cookbook.runs.outcome import WINDOW, before_and_after, first_and_last
from tinker_cookbook.utils.files import write_text
from tinker_cookbook.utils.metric_names import ALL_ENVIRONMENTS

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "model_aware.md"
BEGIN, END = "<!-- runs: written by `python -m benchmarks.model_aware` -->", "<!-- end of runs -->"
RECIPE = "recipes.run_experiment"
REWARD = f"{ALL_ENVIRONMENTS}reward/total"

CONTROLS: Mapping[str, Sequence[str]] = {
    "train_ghost": (
        "reward/trace_reward/format",
        "reward/trace_reward/gain",
        "reward/trace_reward/specific",
    ),
    "self_prediction": (
        "reward/prediction_reward/format",
        "reward/prediction_reward/correct",
        "reward/prediction_reward/confidence_right",
        "reward/prediction_reward/confidence_wrong",
    ),
    "entropy_intuition": (
        "reward/entropy_reward/format",
        "reward/entropy_reward/true",
        "reward/entropy_reward/told",
    ),
    "gradient_prophet": (
        "reward/delta_reward/format",
        "reward/delta_reward/over_constant",
        "reward/delta_reward/true",
    ),
    "gradient_intuition": ("predicted", "inner", "over_constant", "true"),
}
"""Experiment file -> metrics that show whether a rise is the intended behaviour."""


@chz.chz(typecheck=True)
class ModelAwareConfig:
    """Keys of `python -m benchmarks.model_aware`."""

    only: tuple[str, ...] = chz.field(default=tuple(CONTROLS), doc="experiment files of configs/, by name")
    seeds: tuple[int, ...] = chz.field(default=(0, 1, 2), doc="a run of each file for each seed")
    fixed: dict[str, str] = chz.field(default_factory=dict, doc="fixed.<key>=value: a key of all runs")
    folder: str | None = chz.field(
        default=None, doc="folder of the runs; an existing one is resumed; default: a new one"
    )
    processes: int = chz.field(
        default=0, doc="runs at a time, each in its own process; 0: one after the other in this one"
    )
    page: str = chz.field(
        default=str(PAGE), doc="Markdown file whose table is rewritten if all files run; empty: only print"
    )


@dataclass(frozen=True)
class Moved:
    """A number over several seeds. Lists are per seed."""

    key: str
    first_S: list[float]
    last_S: list[float]

    @property
    def rises_S(self) -> list[float]:
        return [last - first for first, last in zip(self.first_S, self.last_S, strict=True)]

    def __str__(self) -> str:
        rises = ", ".join(f"{rise:+.2f}" for rise in self.rises_S)
        return f"{_spread(self.first_S)} to {_spread(self.last_S)} ({rises})"


def _spread(values: Sequence[float]) -> str:
    return f"{fmean(values):.2f}" + (f" ± {stdev(values):.2f}" if len(values) > 1 else "")


def moved(rows_S: Sequence[Sequence[Mapping[str, Any]]], key: str) -> Moved:
    """Means over the first and the last steps of each run. Raises BenchmarkError if a run does not report the number."""
    ends_S = [first_and_last(rows, key) for rows in rows_S]
    return _moved(key, ends_S)


def _moved(key: str, ends_S: Sequence[tuple[float, float] | None]) -> Moved:
    reported_S = [ends for ends in ends_S if ends is not None]
    if len(reported_S) < len(ends_S):
        raise BenchmarkError(f"{key} is reported by {len(reported_S)} of {len(ends_S)} runs; see their metrics.jsonl")
    return Moved(key, [first for first, _ in reported_S], [last for _, last in reported_S])


COLUMNS = (
    "file",
    f"reward, first and last {WINDOW} steps (rise by seed)",
    "held out, before and after (rise by seed)",
    "controls",
)


def table_row(name: str, rows_S: Sequence[Sequence[Mapping[str, Any]]]) -> list[str]:
    """The table row of one file's runs."""
    reward = moved(rows_S, REWARD)
    held_out = _moved(f"test/{REWARD}", [before_and_after(rows, f"test/{REWARD}") for rows in rows_S])
    controls = [(key.rpartition("/")[2], moved(rows_S, ALL_ENVIRONMENTS + key)) for key in CONTROLS[name]]
    return [
        f"`{name}`",
        str(reward),
        str(held_out),
        "; ".join(
            f"`{short}` {fmean(control.first_S):.2f} to {fmean(control.last_S):.2f}" for short, control in controls
        ),
    ]


def fill_page(text: str, section: str) -> str:
    """The page with this section. Raises BenchmarkError if it lacks the marker lines."""
    before, begin, rest = text.partition(f"{BEGIN}\n")
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise BenchmarkError(f"page: it must have the lines {BEGIN!r} and {END!r}, in this order")
    return f"{before}{begin}\n{section}\n\n{end}{after}"


async def run(config: ModelAwareConfig) -> dict[str, list[list[dict[str, Any]]]]:
    """The metrics of each file's runs, per seed. Raises BenchmarkError if one failed."""
    if unknown := set(config.only) - CONTROLS.keys():
        raise BenchmarkError(f"only={','.join(sorted(unknown))}: choose from {', '.join(CONTROLS)}")
    folder = config.folder or tempfile.mkdtemp(prefix="model_aware-")
    print(f"Runs: {folder}", flush=True)
    files = [os.path.relpath(ROOT / "configs" / f"{name}.toml") for name in config.only]
    points = sweeps.grid({"experiment": files, "seed": list(config.seeds)})

    def report(result: sweeps.RunResult) -> None:
        print(f"{result.name}: {result.status}, {result.seconds:.0f} s {result.error or ''}", flush=True)

    results = await sweeps.run_sweep(
        RECIPE, points, folder, fixed=config.fixed, processes=config.processes, concurrent=1, on_result=report
    )
    if failed := [result.name for result in results if result.status != "finished"]:
        raise BenchmarkError(f"{', '.join(failed)} failed; see console.log there, in {folder}")
    rows = iter([read_metrics(result.log_path) for result in results])
    return {name: [list(next(rows)) for _ in config.seeds] for name in config.only}


def main(config: ModelAwareConfig) -> None:
    page = Path(config.page) if config.page and set(config.only) == CONTROLS.keys() else None
    if page is not None:
        fill_page(page.read_text(), "")
    metrics = asyncio.run(run(config))
    table = markdown_table(COLUMNS, [table_row(name, rows_S) for name, rows_S in metrics.items()])
    print(table)
    if page is not None:
        write_text(page, fill_page(page.read_text(), table))


if __name__ == "__main__":
    run_benchmark(main)
