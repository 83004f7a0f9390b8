"""The results of a run, read from its metrics.jsonl: first steps versus last, evaluations before versus after."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from tinker_cookbook.runs.checkpoints import get_last_checkpoint
from tinker_cookbook.runs.ml_log import read_metrics
from tinker_cookbook.stores.training_store import TrainingRunStore
from tinker_cookbook.utils.intervals import ANY, RATE, Z_95, Estimate, wilson, within_range
from tinker_cookbook.utils.metric_names import ALL_ENVIRONMENTS, FINAL_KEY, each_once

WINDOW = 5
"""Steps averaged at each end of a run."""

RATES = frozenset({"correct", "format", "parsed"})
"""Metrics of an environment that are 0 or 1 in each episode."""
_OTHER_RATES = frozenset({"accuracy", "agreement", "win_rate", "won"})
"""Other rates, whose number of trials is not known."""

Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class RunSummary:
    """The results of a run. Each loop's `main` returns it, and so does its recipe's."""

    log_path: Path
    """the run's folder"""
    steps: int
    """batches that are done, over all the times it was resumed"""
    metrics: Mapping[str, float | int | str]
    """the last row of metrics.jsonl, with the final evaluation and the metrics of the last step; empty if there is none"""
    state_path: str | None
    """`tinker://` path of the newest checkpoint's weights and optimizer state; None: there is none"""
    sampler_path: str | None
    """`tinker://` path of the newest weights to sample with; None: there are none"""


def summarize(log_path: str | Path) -> RunSummary:
    """Summarize a run's folder.

    Raises:
        DataFormatError: metrics.jsonl or checkpoints.jsonl is damaged.
    """
    rows = read_metrics(log_path)
    state, sampler = (get_last_checkpoint(log_path, key) for key in ("state_path", "sampler_path"))
    return RunSummary(
        log_path=Path(log_path).expanduser(),
        steps=sum(FINAL_KEY not in row for row in rows),
        metrics=rows[-1] if rows else {},
        state_path=None if state is None else state.state_path,
        sampler_path=None if sampler is None else sampler.sampler_path,
    )


def print_changes(log_path: str | Path, evaluated: Mapping[str, str], training: Mapping[str, str]) -> None:
    """Print a table of metrics before and after (unless the run is quiet), and the location of the run's files.

    Args:
        evaluated: metric -> label of the data, for metrics of evaluations.
        training: metric -> label of the data, for metrics of every step.
    """
    console = Console(soft_wrap=True)
    if not _is_quiet(log_path):
        rows = read_metrics(log_path)
        console.print(_table(each_once(rows), evaluated, training))
        if (line := tokens_line(rows)) is not None:
            console.print(line, highlight=False)
    console.print(f"Files: {log_path}")


_KINDS = (
    ("sampled", "sampled"),
    ("thrown_away", "of them thrown away"),
    ("prefill_uncached", "prefilled"),
    ("prefill_cached", "cached"),
    ("trained", "trained"),
)


def tokens_line(rows: Rows) -> str | None:
    """What a run has used, over all the times it was resumed: tokens by kind, and dollars if prices are known. None: no row
    says.
    """
    counts: dict[str, float] = {}
    for row in rows:
        counts |= {
            key: value for key, value in row.items() if key.startswith(("tokens/cumulative/", "cost/cumulative"))
        }
    shown = [f"{counts[key]:,.0f} {name}" for kind, name in _KINDS if counts.get(key := f"tokens/cumulative/{kind}")]
    if not shown:
        return None
    dollars = [f"${counts[key]:,.4f}"] if (key := "cost/cumulative_usd") in counts else []
    return f"Tokens: {', '.join([*shown, *dollars])}"


def _is_quiet(log_path: str | Path) -> bool:
    return (TrainingRunStore.in_folder(log_path).read_config() or {}).get("quiet", False)


def first_and_last(rows: Rows, key: str, window: int = WINDOW) -> tuple[float, float] | None:
    """Mean of `key` over the first and the last `window` steps that report it; None when none does."""
    having = [row for row in rows if key in row]
    return (estimate(having[:window], key).mean, estimate(having[-window:], key).mean) if having else None


def before_and_after(rows: Rows, key: str) -> tuple[float, float] | None:
    """`key` at the first and the last evaluation; None unless there are two."""
    having = [row for row in rows if key in row]
    return (having[0][key], having[-1][key]) if len(having) > 1 else None


@dataclass(frozen=True)
class Change:
    """The change of a metric over a run."""

    key: str
    where: str
    """where it was measured"""
    before: Estimate
    after: Estimate | None
    """None: measured at one step only"""

    @property
    def name(self) -> str:
        """The metric without the prefix of all environment metrics."""
        return self.key.partition(ALL_ENVIRONMENTS)[2] or self.key


def changes(rows: Rows, evaluated: Mapping[str, str], training: Mapping[str, str]) -> list[Change]:
    """For each metric in the rows, its value before and after: means over the first and the last steps, or single
    evaluations. No step counts as both before and after.

    Args:
        rows: as returned by `each_once`.
        evaluated, training: as in `print_changes`.
    """
    window, results = _ends(rows, training), list[Change]()
    for key, where in training.items():
        having = [row for row in rows if key in row]
        at_end = min(window, len(having) // 2)
        if at_end:
            results.append(Change(key, where, estimate(having[:at_end], key), estimate(having[-at_end:], key)))
        elif having:
            results.append(Change(key, where, estimate(having, key), None))
    for key, where in evaluated.items():
        having = [row for row in rows if key in row]
        if len(having) > 1:
            results.append(Change(key, where, estimate(having[:1], key), estimate(having[-1:], key)))
    return results


def _ends(rows: Rows, training: Mapping[str, str]) -> int:
    """Number of steps at each end to average."""
    return max(1, min(WINDOW, _steps(rows, training) // 2))


def _steps(rows: Rows, training: Mapping[str, str]) -> int:
    return max((sum(key in row for row in rows) for key in training), default=0)


def _table(rows: Rows, evaluated: Mapping[str, str], training: Mapping[str, str]) -> Table:
    window, steps = _ends(rows, training), _steps(rows, training)
    ends = f"first and last {window} steps" if window > 1 else "first and last step" if steps > 1 else "of one step"
    title = f"What changed ({ends}; brackets: 95 %)" if training else "What changed (brackets: 95 %)"
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        padding=(0, 1, 0, 0),
    )
    for header in ("metric", "where", "before", "after", "change"):
        table.add_column(header, justify="left" if header in ("metric", "where") else "right")
    for change in changes(rows, evaluated, training):
        after = change.after
        ends_of = ("", "") if after is None else (_show(after), f"{after.mean - change.before.mean:+.3f}")
        table.add_row(change.name, change.where, _show(change.before), *ends_of)
    return table


def range_of(key: str) -> tuple[float, float]:
    """The range of a metric's mean: 0 and 1 if it is a rate."""
    return RATE if key.rpartition("/")[2] in RATES | _OTHER_RATES else ANY


def estimate(rows: Rows, key: str) -> Estimate:
    """The mean of a metric over some rows, at least one, with its 95 % interval.

    For a rate: Wilson's interval over all episodes of the rows. For other metrics: a normal interval of the mean of
    the rows. Its ends are NaN if the rows do not determine it.
    """
    values = [float(row[key]) for row in rows]
    mean = fmean(values)
    before, _, name = key.rpartition(ALL_ENVIRONMENTS)
    episodes = [row.get(f"{before}{ALL_ENVIRONMENTS}total_episodes") for row in rows]
    if name in RATES and all(isinstance(count, int) for count in episodes):
        counts = [int(count or 0) for count in episodes]
        total = sum(counts)
        right = sum(value * count for value, count in zip(values, counts, strict=True))
        interval = wilson(right, total)
        return Estimate(mean, interval.low, interval.high)
    if len(values) < 3:
        return Estimate(mean, math.nan, math.nan)
    half = Z_95 * stdev(values) / math.sqrt(len(values))
    return within_range(Estimate(mean, mean - half, mean + half), *range_of(key))


def _show(estimate: Estimate) -> str:
    if math.isnan(estimate.low):
        return f"{estimate.mean:.3f}"
    return f"{estimate.mean:.3f} [{_short(estimate.low)} {_short(estimate.high)}]"


def _short(value: float) -> str:
    """Two decimals, without a leading zero."""
    text = f"{value:.2f}"
    return text.replace("0.", ".", 1) if text.startswith(("0.", "-0.")) else text


def print_rl_changes(log_path: str | Path, keys: Sequence[str]) -> None:
    """The table for reinforcement learning: env/all/<key> in rollouts, for training and held-out questions."""
    evaluated = {
        f"{name}/env/all/{key}": where
        for key in keys
        for name, where in (("train_questions", "training questions"), ("test", "held-out questions"))
    }
    print_changes(log_path, evaluated, {f"env/all/{key}": "rollouts" for key in keys})
