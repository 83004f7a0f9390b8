"""What a run came to, read back from its metrics.jsonl: first steps against last, evaluations before against after."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table

from tinker_cookbook.runs.metadata import CONFIG_BASE_NAME
from tinker_cookbook.utils.files import read_json_object
from tinker_cookbook.utils.ml_log import read_metrics

WINDOW = 5
"""Steps averaged at each end of a run."""


def first_and_last(rows: Sequence[Mapping[str, Any]], key: str, window: int = WINDOW) -> tuple[float, float] | None:
    """Mean of `key` over the first and the last `window` steps that report it; None when none does."""
    values = [row[key] for row in rows if key in row]
    return (fmean(values[:window]), fmean(values[-window:])) if values else None


def before_and_after(rows: Sequence[Mapping[str, Any]], key: str) -> tuple[float, float] | None:
    """`key` of the first and the last evaluation; None unless there were two."""
    values = [row[key] for row in rows if key in row]
    return (values[0], values[-1]) if len(values) > 1 else None


def print_changes(log_path: str | Path, evaluated: Mapping[str, str], training: Mapping[str, str]) -> None:
    """Print a table of metrics before and after, unless the run was to be quiet, and where the run's files are.

    Args:
        evaluated: metric -> where it was measured, for metrics of evaluations.
        training: metric -> where it was measured, for metrics of every step.
    """
    console = Console(soft_wrap=True)
    if not _is_quiet(log_path):
        console.print(_changes(read_metrics(log_path), evaluated, training))
    console.print(f"Files: {log_path}")


def _is_quiet(log_path: str | Path) -> bool:
    path = Path(log_path).expanduser() / CONFIG_BASE_NAME
    return path.exists() and read_json_object(path, "it is no run's config").get("quiet", False)


def _changes(rows: Sequence[Mapping[str, Any]], evaluated: Mapping[str, str], training: Mapping[str, str]) -> Table:
    table = Table(title="What changed", title_justify="left")
    for header in ("metric", "where", "before", "after", "change"):
        table.add_column(header, justify="left" if header in ("metric", "where") else "right")
    steps = max((sum(key in row for row in rows) for key in training), default=0)
    window = max(1, min(WINDOW, steps // 2))
    ends = f"first and last {window} steps" if window > 1 else "first and last step"
    measured = [(key, f"{where}, {ends}", first_and_last(rows, key, window)) for key, where in training.items()]
    measured += [(key, where, before_and_after(rows, key)) for key, where in evaluated.items()]
    for key, where, values in measured:
        if values is not None:
            before, after = values
            name = key.partition("env/all/")[2] or key
            table.add_row(name, where, f"{before:.3f}", f"{after:.3f}", f"{after - before:+.3f}")
    return table


def print_rl_changes(log_path: str | Path, keys: Sequence[str]) -> None:
    """The table for reinforcement learning: env/all/<key> in rollouts, on training questions and on held-out ones."""
    evaluated = {
        f"{name}/env/all/{key}": where
        for key in keys
        for name, where in (("train_questions", "training questions"), ("test", "held-out questions"))
    }
    print_changes(log_path, evaluated, {f"env/all/{key}": "rollouts" for key in keys})
