"""How much runs of one setting learnt, as a Markdown table: a row per run, and the mean change with Student's interval.

    python -m tools.learning_table runs=runs/lines_0,runs/lines_1,runs/lines_2

Training is the mean of the first and of the last five steps; held out is the first and the last evaluation, with the Wilson
interval over its questions.
"""

from pathlib import Path
from statistics import fmean

import chz

from tinker_cookbook.cli_utils import run_recipe
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.report.tables import markdown_table
from tinker_cookbook.runs.ml_log import read_metrics
from tinker_cookbook.runs.outcome import before_and_after, first_and_last
from tinker_cookbook.stores.training_store import CONFIG_BASE_NAME
from tinker_cookbook.utils.files import read_json_object
from tinker_cookbook.utils.intervals import student_mean, wilson

COLUMNS = ("seed", "training, first 5 steps", "last 5", "held out, before", "after")


@chz.chz(typecheck=True)
class CLIConfig:
    """Keys of `python -m tools.learning_table`."""

    runs: str = chz.field(doc="folders of runs, separated by commas")
    training: str = chz.field(default="env/all/correct", doc="the per-step metric")
    held_out: str = chz.field(default="test/env/all/correct", doc="the metric of evaluations")
    questions: str = chz.field(
        default="test/env/all/total_episodes",
        doc="metric with the number of questions of an evaluation, for intervals",
    )


def table(cli: CLIConfig) -> str:
    """The table. Raises ConfigurationError for a run that lacks a metric."""
    rows: list[list[str]] = []
    changes: dict[str, list[float]] = {"training": [], "held out": []}
    for folder in cli.runs.split(","):
        metrics = read_metrics(folder)
        trained, tested = first_and_last(metrics, cli.training), before_and_after(metrics, cli.held_out)
        if trained is None or tested is None:
            raise ConfigurationError(f"runs={folder}: lacks {cli.training}, or two evaluations of {cli.held_out}")
        seed = read_json_object(Path(folder) / CONFIG_BASE_NAME, "give the folder of a run").get("seed")
        count = next((row[cli.questions] for row in metrics if cli.questions in row), None)
        shown = [f"{value:.2f}" if count is None else str(wilson(value * count, count)) for value in tested]
        rows.append([str(seed), *(f"{value:.2f}" for value in trained), *shown])
        changes["training"].append(trained[1] - trained[0])
        changes["held out"].append(tested[1] - tested[0])
    summary = "; ".join(f"{name} {_change(values)}" for name, values in changes.items())
    return f"{markdown_table(COLUMNS, rows)}\n\nChange, mean over runs [95 %]: {summary}."


def _change(values: list[float]) -> str:
    return str(student_mean(values)) if len(values) > 1 else f"{fmean(values):.2f}"


def main(cli: CLIConfig) -> None:
    print(table(cli))


if __name__ == "__main__":
    run_recipe(CLIConfig, main)
