"""What a run came to, read back from its metrics.jsonl: first steps against last, evaluations before against after."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table

from tinker_cookbook.runs.files import read_jsonl

WINDOW = 5
"""Steps averaged at each end of a run."""


def first_and_last(rows: Sequence[dict[str, Any]], key: str, window: int = WINDOW) -> tuple[float, float] | None:
    """Mean of `key` over the first and the last `window` steps that report it; None when none does."""
    values = [row[key] for row in rows if key in row]
    return (fmean(values[:window]), fmean(values[-window:])) if values else None


def before_and_after(rows: Sequence[dict[str, Any]], key: str) -> tuple[float, float] | None:
    """`key` of the first and the last evaluation; None unless there were two."""
    values = [row[key] for row in rows if key in row]
    return (values[0], values[-1]) if len(values) > 1 else None


def outcome_table(log_path: str, keys: Sequence[str], evaluations: Sequence[str] = ("train_questions", "test")) -> None:
    """Print a table of env/all/<key> for each key in training and in each evaluation, and where the files are."""
    rows = read_jsonl(Path(log_path) / "metrics.jsonl", tolerate_torn_tail=True)
    table = Table(title="What changed", title_justify="left")
    for header in ("metric", "where", "before", "after", "change"):
        table.add_column(header, justify="left" if header in ("metric", "where") else "right")
    for key in keys:
        places = [(f"rollouts, mean of first and last {WINDOW} steps", first_and_last(rows, f"env/all/{key}"))]
        places += [(name, before_and_after(rows, f"{name}/env/all/{key}")) for name in evaluations]
        for where, values in places:
            if values is not None:
                before, after = values
                table.add_row(key, where, f"{before:.3f}", f"{after:.3f}", f"{after - before:+.3f}")
    console = Console(soft_wrap=True)
    console.print(table)
    console.print(f"Files: {log_path} (metrics.jsonl, config.json, checkpoints.jsonl, one JSON record per group and step)")
