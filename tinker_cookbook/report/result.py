"""The results of runs: how far each moved its main metric, and the best setting, ranked as in a sweep."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from tinker_cookbook.report.runs import RunData, settings
from tinker_cookbook.runs.outcome import Change, changes, estimate
from tinker_cookbook.sweeps.ranking import (
    FINISHED,
    MODES,
    Mode,
    SweepRun,
    best_first,
    default_metric,
    over_seeds,
    reduced_run,
)
from tinker_cookbook.utils.intervals import Estimate

TRAINING_QUESTIONS = "train_questions/"
ALSO_REPORTED = (
    "test/env/all/task_reward",
    "train_questions/env/all/correct",
    "env/all/debate/judge_accuracy",
    "test/env/all/debate/judge_accuracy",
    "env/all/task_reward",
)
"""Metrics of a result besides those that runs can be ranked by."""

VALUE = "last"
"""How a run is reduced to a number (`sweeps.rank`)."""

_STATUSES = {"completed": FINISHED}
"""Status of a run outside a sweep -> status in a sweep."""


def result(run: RunData) -> list[dict[str, Any]]:
    """The changes of a run's metrics, its ranking metric first.

    Each has `key`, `name`, `where`, `mode` ("max", "min" or None), `before` and `after` (None: measured once); these have `mean`,
    and `low` and `high` of its 95 % interval, None where that is unknown."""
    rows = _numbers(run.rows)
    known = {key for row in rows for key in row}
    keys = _each_different([key for key in (*MODES, *ALSO_REPORTED) if key in known], rows)
    if any(key.startswith("env/") for key in keys):
        keys = [
            key for key in keys if not key.endswith("/kl")
        ]  # here the sampler's distance from the trainer, no result
    evaluated = {key: _where(key) for key in keys if key.startswith(("test/", TRAINING_QUESTIONS))}
    training = {key: _where(key) for key in keys if key not in evaluated}
    by_key = {change.key: change for change in changes(rows, evaluated, training)}
    for key, where in evaluated.items():
        if key not in by_key:  # evaluated once
            by_key[key] = Change(key, where, estimate([row for row in rows if key in row], key), None)
    return [_as_json(by_key[key]) for key in keys]


def ranking(runs: Sequence[RunData], metric: str | None = None, mode: Mode | None = None) -> dict[str, Any] | None:
    """The settings of several runs, best first; None: there is only one run, or no metric has a direction.

    If all runs belong to a sweep, this is the table of `sweeps.rank`. If none has finished, runs with a number count.

    Args:
        metric, mode: as in `sweeps.rank`.

    Returns:
        `metric`, `mode`, `value`; `rows`, each with `setting`, `mean`, `std`, `seeds`, `best_run` and `runs` (their places); and
        `left_out`: the places of runs that do not count.
    """
    rows_of_runs = [_numbers(run.rows) for run in runs]
    chosen = metric or default_metric({key for rows in rows_of_runs for row in rows for key in row})
    if chosen is None or len(runs) < 2:
        return None
    better = mode or MODES[chosen]
    settings_of_runs = settings(runs)
    ranked: list[SweepRun] = []
    for i, (run, rows) in enumerate(zip(runs, rows_of_runs, strict=True)):
        status = {"status": _STATUSES.get(run.info.status, run.info.status), **run.sweep}
        ranked.append(reduced_run(str(i), run.folder, status, settings_of_runs[i], rows, chosen, better, VALUE))
    if not any(run.status == FINISHED and run.value is not None for run in ranked):
        ranked = [replace(run, status=FINISHED) for run in ranked]
    counted = [run for run in ranked if run.status == FINISHED and run.value is not None]
    rows: list[dict[str, Any]] = []
    for entry in over_seeds(ranked, better):
        members = [int(run.name) for run in best_first(counted, better) if run.setting == entry.setting]
        rows.append(asdict(entry) | {"best_run": int(entry.best_run), "runs": members})
    left_out = [int(run.name) for run in ranked if run not in counted]
    return {"metric": chosen, "mode": better, "value": VALUE, "rows": rows, "left_out": left_out}


def _numbers(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The rows with only their finite numbers: other values are not compared."""
    return [
        {
            key: value
            for key, value in row.items()
            if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        }
        for row in rows
    ]


def _each_different(keys: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Drop metrics that equal an earlier one at every step, such as a reward that is the fraction of right answers."""
    series: dict[str, list[tuple[int, float]]] = {}
    for key in keys:
        values = [(i, row[key]) for i, row in enumerate(rows) if key in row]
        if values not in series.values():
            series[key] = values
    return list(series)


def _where(key: str) -> str:
    if key.startswith(TRAINING_QUESTIONS):
        return "training questions"
    return "held out" if key.startswith("test/") else "rollouts" if key.startswith("env/") else "training data"


def _as_json(change: Change) -> dict[str, Any]:
    return {
        "key": change.key,
        "name": change.name,
        "where": change.where,
        "mode": MODES.get(change.key),
        "before": _estimate(change.before),
        "after": None if change.after is None else _estimate(change.after),
    }


def _estimate(estimate: Estimate) -> dict[str, float | None]:
    return {name: value if math.isfinite(value) else None for name, value in asdict(estimate).items()}
