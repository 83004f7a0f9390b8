"""What came of a sweep: all metrics in one table, and the runs ranked by one of them.

`collect` gives one row per run and logged step. `rank` reduces each run to one number, averages over seeds, and sorts.
"""

import difflib
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import chz
import pandas
from rich.console import Console
from rich.table import Table

from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.runs.checkpoints import get_last_checkpoint
from tinker_cookbook.sweeps.points import SEED_KEY
from tinker_cookbook.sweeps.run import STATUS_BASE_NAME, read_status
from tinker_cookbook.utils.files import flatten, write_json, write_text
from tinker_cookbook.utils.metric_names import each_once
from tinker_cookbook.utils.misc_utils import markdown_table
from tinker_cookbook.utils.ml_log import TrackerConfig, read_metrics

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
    "test/nll": "min",
    "train_mean_nll": "min",
}
"""Metrics whose better end is known. Without a choice, runs are ranked by the first of these that they have."""


@dataclass(frozen=True)
class RunSummary:
    """One run, reduced to one number."""

    name: str
    point: dict[str, Any]
    setting: dict[str, Any]
    """what tells it from other runs but its seed: the swept keys, and those of the config that differ anywhere in the sweep"""
    value: float | None
    """None: the run never logged the metric"""
    steps: int
    status: str
    error: str | None
    checkpoint: str | None
    """the run's last weights to sample from"""


@dataclass(frozen=True)
class Ranked:
    """One setting of everything but the seed, over its seeds."""

    setting: dict[str, Any]
    mean: float
    std: float | None
    """sample standard deviation over the seeds; None with one seed"""
    seeds: int
    best_run: str


@dataclass(frozen=True)
class Summary:
    """A ranked sweep."""

    metric: str
    mode: Mode
    value: str
    ranking: list[Ranked]
    runs: list[RunSummary]


def collect(sweep_dir: str | Path) -> pandas.DataFrame:
    """The metrics of every run of a sweep, one row per run and line of its metrics.jsonl.

    Columns: `run`, a column per swept key, `status`, `step`, and a column per metric (missing where a row has it not). A
    swept key that has the name of one of the others comes as `config/<key>`.

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
    """What can be wrong with a ranking before there is anything to rank. Raises ConfigurationError."""
    _window(value)
    if metric is not None and mode is None and metric not in MODES:
        raise ConfigurationError(f"metric={metric!r}: say whether it should be high or low, with mode=max or mode=min")


def rank(sweep_dir: str | Path, metric: str | None = None, mode: Mode | None = None, value: str = "last") -> Summary:
    """The settings of a sweep, best first, each the mean over its seeds.

    Args:
        sweep_dir: the sweep's folder.
        metric: what to rank by; None: the first of MODES that a run has.
        mode: whether a higher or a lower metric is better; None: as MODES says.
        value: how a run becomes one number: `last` (the last logged), `best`, or `mean:N` (of the last N logged).

    Raises:
        ConfigurationError: no run has the metric, or it is no number, or nothing says which end of it is better.
    """
    check_ranking(metric, mode, value)
    found = _read_runs(sweep_dir)
    known = _logged_keys(found) - {"step"}
    chosen = metric if metric is not None else next((key for key in MODES if key in known), None)
    if chosen is None or chosen not in known:
        near = difflib.get_close_matches(chosen or "", known, n=3)
        raise ConfigurationError(
            f"metric={chosen!r}: no run has logged it; "
            + (f"did you mean {' or '.join(near)}?" if near else f"they have {', '.join(sorted(known)) or 'nothing'}")
        )
    better: Mode = mode if mode is not None else MODES[chosen]
    folder = Path(sweep_dir).expanduser()
    settings = _settings([status for status, _ in found])
    runs = [
        RunSummary(
            status["name"],
            status["point"],
            setting,
            _reduce(chosen, [line[chosen] for line in lines if chosen in line], better, value),
            len(lines),
            status["status"],
            status.get("error"),
            last.sampler_path if (last := get_last_checkpoint(folder / status["name"], "sampler_path")) else None,
        )
        for (status, lines), setting in zip(found, settings, strict=True)
    ]
    return Summary(chosen, better, value, _over_seeds(runs, better), _best_first(runs, better))


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


def _window(value: str) -> int:
    """How many of the last logged values count; 0: the best of all."""
    if value in ("last", "best"):
        return 1 if value == "last" else 0
    kind, _, number = value.partition(":")
    if kind != "mean" or not number.isdecimal() or int(number) < 1:
        raise ConfigurationError(f"value={value!r}: must be last, best, or mean:N with N at least 1")
    return int(number)


def _reduce(metric: str, values: Sequence[Any], mode: Mode, value: str) -> float | None:
    if not values:
        return None
    if any(isinstance(number, bool) or not isinstance(number, int | float) for number in values):
        raise ConfigurationError(f"metric={metric!r}: is no number ({values[-1]!r}); choose another")
    if window := _window(value):
        return float(statistics.fmean(values[-window:]))
    return float(max(values) if mode == "max" else min(values))


_NAMES = {SEED_KEY, "name", *(key for key in chz.chz_fields(TrackerConfig) if key.endswith("_name"))}
"""Keys that two runs of one setting may differ in."""


def _settings(statuses: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The setting of each run: a sweep that was started again with other fixed values has runs that are not comparable."""
    configs = [{"recipe": status.get("recipe")} | flatten(status.get("config") or {}) for status in statuses]
    keys = dict.fromkeys(key for config in configs for key in config)
    differing = [key for key in keys if len({repr(config.get(key)) for config in configs}) > 1]
    return [
        {key: value for key, value in status["point"].items() if key not in _NAMES}
        | {key: config.get(key) for key in differing if key not in _NAMES and key not in status["point"]}
        for status, config in zip(statuses, configs, strict=True)
    ]


def _over_seeds(runs: Sequence[RunSummary], mode: Mode) -> list[Ranked]:
    settings: dict[str, list[RunSummary]] = {}
    for run in runs:
        # A run that failed or was cut short has a last value too, but not one to compare.
        if run.value is not None and run.status == "finished":
            settings.setdefault(repr(sorted(run.setting.items())), []).append(run)
    ranked = []
    for members in settings.values():
        values = [run.value for run in members if run.value is not None]
        std = statistics.stdev(values) if len(values) > 1 else None
        ranked.append(
            Ranked(members[0].setting, statistics.fmean(values), std, len(values), _best_first(members, mode)[0].name)
        )
    return sorted(ranked, key=lambda entry: -entry.mean if mode == "max" else entry.mean)


def _best_first(runs: Sequence[RunSummary], mode: Mode) -> list[RunSummary]:
    def key(run: RunSummary) -> tuple[bool, float]:
        value = run.value if run.value is not None else 0.0
        return run.value is None or run.status != "finished", -value if mode == "max" else value

    return sorted(runs, key=key)


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
