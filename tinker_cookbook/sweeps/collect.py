"""The results of a sweep: all metrics in one table, and the runs ranked by one of them.

`collect` gives one row per run and logged step; `rank` ranks the runs of a folder as `ranking.py` says.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

from rich.console import Console
from rich.table import Table

from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.runs.ml_log import read_metrics
from tinker_cookbook.sweeps.ranking import (
    MODES,
    Mode,
    Ranked,
    SweepRun,
    best_first,
    check_value,
    default_metric,
    over_seeds,
    reduced_run,
    settings,
)
from tinker_cookbook.sweeps.run import STATUS_BASE_NAME, read_status
from tinker_cookbook.utils.files import write_json, write_text
from tinker_cookbook.utils.lazy import pandas
from tinker_cookbook.utils.metric_names import each_once
from tinker_cookbook.utils.misc_utils import markdown_table


@dataclass(frozen=True)
class Summary:
    """A ranked sweep."""

    metric: str
    mode: Mode
    value: str
    ranking: list[Ranked]
    runs: list[SweepRun]


def collect(sweep_dir: str | Path) -> pandas.DataFrame:
    """The metrics of every run of a sweep, one row per run and line of its metrics.jsonl.

    Columns: `run`, a column per swept key, `status`, `step`, and a column per metric (missing values where a row lacks
        it). A swept key with the name of another column becomes `config/<key>`.

    Raises:
        ConfigurationError: the folder has no runs of a sweep.
        DataFormatError: a file is damaged.
    """
    rows: list[dict[str, Any]] = []
    runs = _read_runs(sweep_dir)
    taken = {"run", "status", "step"} | _logged_keys(runs)
    for status, lines in runs:
        point = {f"config/{key}" if key in taken else key: value for key, value in status["point"].items()}
        head = {"run": status["name"], **point, "status": status["status"]}
        rows.extend({**head, "step": None, **line} for line in lines or [{}])
    table = pandas.DataFrame(rows)
    for column in table.columns:
        if any(isinstance(value, str) for value in table[column]):
            # A column of a table has one type, in a parquet file at least.
            table[column] = [str(value) if isinstance(value, str | int | float) else None for value in table[column]]
    table["step"] = table["step"].astype("Int64")
    return table


def write_tables(sweep_dir: str | Path, table: pandas.DataFrame) -> None:
    """Write `sweep.csv` and `sweep.parquet` into the sweep's folder."""
    folder = Path(sweep_dir).expanduser()
    table.to_csv(folder / "sweep.csv", index=False)
    table.to_parquet(folder / "sweep.parquet", index=False)


def check_ranking(metric: str | None, mode: Mode | None, value: str) -> None:
    """Check a ranking before there is anything to rank. Raises ConfigurationError."""
    check_value(value)
    if metric is not None and mode is None and metric not in MODES:
        raise ConfigurationError(f"metric={metric!r}: say whether it should be high or low, with mode=max or mode=min")


def rank(sweep_dir: str | Path, metric: str | None = None, mode: Mode | None = None, value: str = "last") -> Summary:
    """The settings of a sweep, best first, each the mean over its seeds.

    Args:
        sweep_dir: the sweep's folder.
        metric: the metric to rank by; None: the first of MODES that a run has.
        mode: whether a higher or a lower metric is better; None: as in MODES.
        value: how to reduce a run to one number: `last` (the last logged), `best`, or `mean:N` (of the last N logged).

    Raises:
        ConfigurationError: no run has the metric, it is not a number, or its direction is unknown.
    """
    check_ranking(metric, mode, value)
    read = _read_runs(sweep_dir)
    known = _logged_keys(read) - {"step"}
    chosen = metric if metric is not None else default_metric(known)
    if chosen is None or chosen not in known:
        near = difflib.get_close_matches(chosen or "", known, n=3)
        raise ConfigurationError(
            f"metric={chosen!r}: no run has logged it; "
            + (f"did you mean {' or '.join(near)}?" if near else f"they have {', '.join(sorted(known)) or 'nothing'}")
        )
    better: Mode = mode if mode is not None else MODES[chosen]
    folder = Path(sweep_dir).expanduser()
    runs = [
        reduced_run(status["name"], folder / status["name"], status, setting, lines, chosen, better, value)
        for (status, lines), setting in zip(read, settings([status for status, _ in read]), strict=True)
    ]
    return Summary(chosen, better, value, over_seeds(runs, better), best_first(runs, better))


def write_summary(sweep_dir: str | Path, summary: Summary) -> None:
    """Write `summary.json` and `summary.md` into the sweep's folder."""
    folder = Path(sweep_dir).expanduser()
    write_json(folder / "summary.json", asdict(summary))
    write_text(folder / "summary.md", _markdown(summary))


def print_summary(summary: Summary, console: Console | None = None) -> None:
    """Print the ranking, then the runs that failed."""
    console = console if console is not None else Console(soft_wrap=True)
    table = Table(title=f"{summary.metric} ({summary.value}, {summary.mode})", title_justify="left")
    headers, *rows = _ranking_rows(summary)
    for header in headers:
        table.add_column(header, justify="right" if header in ("rank", "mean", "std", "seeds") else "left")
    for row in rows:
        table.add_row(*row)
    console.print(table)
    for run in summary.runs:
        if run.status == "failed":
            console.print(f"failed: {run.name}: {run.error}", markup=False, highlight=False)


_Lines: TypeAlias = list[dict[str, Any]]


def _read_runs(sweep_dir: str | Path) -> list[tuple[dict[str, Any], _Lines]]:
    """The status of each run, and the lines of its metrics.jsonl."""
    folder = Path(sweep_dir).expanduser()
    paths = sorted(folder.glob(f"*/{STATUS_BASE_NAME}"))
    if not paths:
        raise ConfigurationError(f"sweep_dir={str(folder)!r}: has no runs of a sweep")
    return [(read_status(path), each_once(read_metrics(path.parent))) for path in paths]


def _logged_keys(runs: Sequence[tuple[dict[str, Any], _Lines]]) -> set[str]:
    return {key for _, lines in runs for line in lines for key in line}


def _ranking_rows(summary: Summary) -> list[list[str]]:
    """Header and rows of the ranking, as text."""
    keys = list(dict.fromkeys(key for entry in summary.ranking for key in entry.setting))
    rows = [["rank", *keys, "mean", "std", "seeds", "best run"]]
    for place, entry in enumerate(summary.ranking, start=1):
        values = [str(entry.setting.get(key, "")) for key in keys]
        std = "" if entry.std is None else f"{entry.std:.4g}"
        rows.append([str(place), *values, f"{entry.mean:.4g}", std, str(entry.seeds), entry.best_run])
    return rows


def _markdown(summary: Summary) -> str:
    head = f"# Sweep by {summary.metric} ({summary.value}, {summary.mode})"
    runs = [["run", "value", "lines", "status", "checkpoint", "error"]]
    for run in summary.runs:
        value = "" if run.value is None else f"{run.value:.4g}"
        runs.append([run.name, value, str(run.steps), run.status, run.checkpoint or "", run.error or ""])
    return "\n\n".join([head, markdown_table(_ranking_rows(summary)), "## Runs", markdown_table(runs)]) + "\n"
