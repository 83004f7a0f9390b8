"""Rank runs by one metric, reduced to one number per run, with the seeds of a setting grouped. Used by sweeps and
reports.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import chz

from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.runs.checkpoints import get_last_checkpoint
from tinker_cookbook.runs.ml_log import TrackerConfig
from tinker_cookbook.sweeps.points import SEED_KEY
from tinker_cookbook.utils.files import flatten

Mode = Literal["max", "min"]

MODES: dict[str, Mode] = {
    "test/env/all/correct": "max",
    "test/env/all/reward/total": "max",
    "env/all/correct": "max",
    "env/all/reward/total": "max",
    "test/win_rate": "max",
    "test/agreement": "max",
    "test/accuracy": "max",
    "accuracy": "max",
    "test/teacher_kl": "min",
    "teacher_kl": "min",
    "test/kl": "min",
    "train/kl": "min",
    "test/dpo_loss": "min",
    "dpo_loss": "min",
    "test/brier": "min",
    "test/cross_entropy": "min",
    "test/nll": "min",
    "train_mean_nll": "min",
}
"""Metrics whose better end is known. Without a choice, runs are ranked by the first of these that they have."""

FINISHED = "finished"
"""The status of a run whose number counts. One that failed or was cut short has a last value too, but not one to compare."""


@dataclass(frozen=True)
class SweepRun:
    """One run, reduced to one number."""

    name: str
    point: dict[str, Any]
    setting: dict[str, Any]
    """what distinguishes it from other runs, except the seed: the swept keys, and config keys that differ within the sweep"""
    value: float | None
    """None: the run never logged the metric"""
    steps: int
    status: str
    error: str | None
    checkpoint: str | None
    """the run's last weights to sample from"""


@dataclass(frozen=True)
class Ranked:
    """One setting of everything except the seed, over its seeds."""

    setting: dict[str, Any]
    mean: float
    std: float | None
    """sample standard deviation over the seeds; None with one seed"""
    seeds: int
    best_run: str


def default_metric(known: Collection[str]) -> str | None:
    """The default metric to rank runs with these metrics; None: none has a known direction."""
    return next((key for key in MODES if key in known), None)


def check_value(value: str) -> int:
    """How many of the last logged values count ("last", "mean:N"); 0: the best of all ("best"). Raises ConfigurationError."""
    if value in ("last", "best"):
        return 1 if value == "last" else 0
    kind, _, number = value.partition(":")
    if kind != "mean" or not number.isdecimal() or int(number) < 1:
        raise ConfigurationError(f"value={value!r}: must be last, best, or mean:N with N at least 1")
    return int(number)


def reduced(metric: str, lines: Sequence[Mapping[str, Any]], mode: Mode, value: str) -> float | None:
    """The number of one run, from its rows in step order; None: it never logged the metric.

    Raises ConfigurationError: the metric is not a number, or `value` is none of "last", "best" and "mean:N".
    """
    window, values = check_value(value), [line[metric] for line in lines if metric in line]
    if not values:
        return None
    if any(isinstance(number, bool) or not isinstance(number, int | float) for number in values):
        raise ConfigurationError(f"metric={metric!r}: is not a number ({values[-1]!r}); choose another")
    if window:
        return float(statistics.fmean(values[-window:]))
    return float(max(values) if mode == "max" else min(values))


def reduced_run(
    name: str,
    folder: Path,
    status: Mapping[str, Any],
    setting: dict[str, Any],
    rows: Sequence[Mapping[str, Any]],
    metric: str,
    mode: Mode,
    value: str,
) -> SweepRun:
    """A run and its number. `status`: its `status`, and `point` and `error` if it has them. Raises as `reduced`."""
    last = get_last_checkpoint(folder, "sampler_path")
    return SweepRun(
        name,
        status.get("point", {}),
        setting,
        reduced(metric, rows, mode, value),
        len(rows),
        status["status"],
        status.get("error"),
        None if last is None else last.sampler_path,
    )


NAMES = frozenset({SEED_KEY, "name", *(key for key in chz.chz_fields(TrackerConfig) if key.endswith("_name"))})
"""Keys that two runs of one setting may differ in."""


def settings(statuses: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The setting of each run: the swept keys, and other differences between the configs of runs that are not
    comparable.

    Args:
        statuses: for each run its `point` (the swept keys), `recipe` and `config`.
    """
    configs = [{"recipe": status.get("recipe")} | flatten(status.get("config") or {}) for status in statuses]
    keys = dict.fromkeys(key for config in configs for key in config)
    differing = [key for key in keys if len({repr(config.get(key)) for config in configs}) > 1]
    return [
        {key: value for key, value in status["point"].items() if key not in NAMES}
        | {key: config.get(key) for key in differing if key not in NAMES and key not in status["point"]}
        for status, config in zip(statuses, configs, strict=True)
    ]


def same_setting(settings: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    """The indices of equal settings, grouped in order of first occurrence."""
    together: dict[str, list[int]] = {}
    for i, setting in enumerate(settings):
        together.setdefault(repr(sorted(setting.items())), []).append(i)
    return list(together.values())


def over_seeds(runs: Sequence[SweepRun], mode: Mode) -> list[Ranked]:
    """A row per setting, best first; over its seeds that finished and have a number."""
    counted = [run for run in runs if run.value is not None and run.status == FINISHED]
    ranked: list[Ranked] = []
    for places in same_setting([run.setting for run in counted]):
        members = [counted[i] for i in places]
        values = [run.value for run in members if run.value is not None]
        std = statistics.stdev(values) if len(values) > 1 else None
        best = best_first(members, mode)[0].name
        ranked.append(Ranked(members[0].setting, statistics.fmean(values), std, len(values), best))
    return sorted(ranked, key=lambda entry: -entry.mean if mode == "max" else entry.mean)


def best_first(runs: Sequence[SweepRun], mode: Mode) -> list[SweepRun]:
    """The runs by their numbers; then those without one or unfinished."""

    def key(run: SweepRun) -> tuple[bool, float]:
        value = run.value if run.value is not None else 0.0
        return run.value is None or run.status != FINISHED, -value if mode == "max" else value

    return sorted(runs, key=key)
