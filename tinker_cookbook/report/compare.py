"""Ways of training compared at equal sampled tokens: a curve per run, their mean over seeds with an interval, and a picture."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.utils.files import read_jsonl
from tinker_cookbook.utils.intervals import Estimate, wilson
from tinker_cookbook.utils.ml_log import METRICS_BASE_NAME

TOKENS = "progress/sampled_tokens"
EPISODES = "total_episodes"
COLUMNS = ("what", "seeds", "tokens", "before", "at equal tokens", "minus the first")

# Two-sided 95 % points of Student's t, by degrees of freedom; beyond them the normal's is near enough.
_T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.16, 2.145, 2.131)
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")


@dataclass(frozen=True)
class Curve:
    """A metric of one run over the tokens that it had sampled by then, in order."""

    tokens: list[float]
    values: list[float]
    items: list[float] | None = None
    """where a value is the share of right answers, one to each held-out item: how many items"""

    def at(self, tokens: float) -> float:
        """The last value that was measured with no more tokens; the first one, if none was."""
        return self.values[self._place(tokens)]

    def interval_at(self, tokens: float) -> Estimate:
        """`at` with its 95 % interval over items (Wilson's); nan where it is not known how many there were."""
        place = self._place(tokens)
        value = self.values[place]
        return (
            Estimate(value, math.nan, math.nan)
            if self.items is None
            else wilson(value * self.items[place], self.items[place])
        )

    def _place(self, tokens: float) -> int:
        return max(0, sum(n <= tokens for n in self.tokens) - 1)


@dataclass(frozen=True)
class Way:
    """One way of training: a name, and a curve for each seed. Seeds that two ways share are compared with each other."""

    name: str
    curves: dict[int, Curve]

    @property
    def tokens(self) -> float:
        """What every seed of it reached."""
        return min(curve.tokens[-1] for curve in self.curves.values())


def read_curve(folder: str | Path, metric: str) -> Curve:
    """From a run's metrics.jsonl. The metric of a step stands at the tokens that had been sampled before its update.

    Raises ConfigurationError when the run has not logged the metric, with those like it.
    """
    path = Path(folder).expanduser() / METRICS_BASE_NAME
    if not path.is_file():
        raise ConfigurationError(f"{folder}: no {METRICS_BASE_NAME}; give the folder of a run")
    rows = read_jsonl(path, tolerate_torn_tail=True)
    tokens, values, items, sampled = list[float](), list[float](), list[float](), 0.0
    prefix, _, what = metric.rpartition("/")
    for row in rows:
        after = float(row.get(TOKENS, sampled))
        if isinstance(row.get(metric), int | float):
            # Evaluations, and what a step samples, are of the weights before the step's update.
            tokens.append(sampled)
            values.append(float(row[metric]))
            if what == "correct" and metric.startswith("test/") and f"{prefix}/{EPISODES}" in row:
                items.append(float(row[f"{prefix}/{EPISODES}"]))
        sampled = after
    if not values:
        like = sorted({key for row in rows for key in row if metric.rpartition("/")[2] in key})
        raise ConfigurationError(
            f"metric={metric!r}: {folder} has not logged it; it has {', '.join(like) or 'nothing like it'}"
        )
    return Curve(tokens, values, items if len(items) == len(values) else None)


def mean_interval(values: Sequence[float]) -> Estimate:
    """The mean over seeds with Student's 95 % interval; of one seed the interval is unknown (nan)."""
    n, mean = len(values), float(np.mean(values))
    if n < 2:
        return Estimate(mean, math.nan, math.nan)
    t = _T_95[n - 2] if n - 2 < len(_T_95) else 1.96
    half = t * float(np.std(values, ddof=1)) / math.sqrt(n)
    return Estimate(mean, mean - half, mean + half)


def over_seeds(curves: Sequence[Curve], tokens: float) -> Estimate:
    """The mean over seeds with its interval; of one seed with that over its items."""
    return curves[0].interval_at(tokens) if len(curves) == 1 else mean_interval([curve.at(tokens) for curve in curves])


def lead(way: Way, first: Way, tokens: float) -> Estimate | None:
    """How much more a way has than the first, seed by seed; None without a seed that both have.

    Of one seed with Newcombe's (1998) interval of two independent shares. Both answered the same items, and so it is too wide
    rather than too narrow.
    """
    shared = [seed for seed in way.curves if seed in first.curves]
    if not shared:
        return None
    if len(shared) > 1:
        return mean_interval([way.curves[seed].at(tokens) - first.curves[seed].at(tokens) for seed in shared])
    own, other = way.curves[shared[0]].interval_at(tokens), first.curves[shared[0]].interval_at(tokens)
    mean = own.mean - other.mean
    low = mean - math.hypot(own.mean - own.low, other.high - other.mean)
    return Estimate(mean, low, mean + math.hypot(own.high - own.mean, other.mean - other.low))


def at_equal_tokens(ways: Sequence[Way], tokens: float | None = None) -> float:
    """The tokens at which all are compared: those given, else what every run reached.

    Raises ConfigurationError when a run has not come so far.
    """
    reached = {way.name: way.tokens for way in ways}
    if tokens is None:
        return min(reached.values())
    if short := {name: n for name, n in reached.items() if n < tokens}:
        raise ConfigurationError(
            f"tokens={tokens:g}: {', '.join(f'{name} has measured up to {n:g}' for name, n in short.items())}"
        )
    return tokens


def table_rows(ways: Sequence[Way], tokens: float) -> list[list[str]]:
    """A row per way; differences are over the seeds that it shares with the first, seed by seed."""
    rows = []
    for way in ways:
        curves = list(way.curves.values())
        before, now = over_seeds(curves, 0.0), over_seeds(curves, tokens)
        more = None if way is ways[0] else lead(way, ways[0], tokens)
        rows.append(
            [way.name, str(len(curves)), f"{tokens:.0f}", told(before), told(now), "" if more is None else told(more)]
        )
    return rows


def told(estimate: Estimate) -> str:
    return (
        f"{estimate.mean:.3f}"
        if math.isnan(estimate.low)
        else f"{estimate.mean:.3f} [{estimate.low:.3f}, {estimate.high:.3f}]"
    )


def picture(ways: Sequence[Way], metric: str, tokens: float, width: int = 640, height: int = 360) -> str:
    """An SVG: for each way the mean over its seeds against sampled tokens, each seed thin behind it, up to `tokens`."""
    left, bottom, top, right = 56, 40, 16, 16
    values = [v for way in ways for curve in way.curves.values() for v in curve.values if math.isfinite(v)]
    low, high = min(values, default=0.0), max(values, default=1.0)
    span, reach = (high - low) or 1.0, tokens or 1.0

    def x(n: float) -> float:
        return left + (width - left - right) * n / reach

    def y(value: float) -> float:
        return height - bottom - (height - bottom - top) * (value - low) / span

    def line(points: Sequence[tuple[float, float]], colour: str, style: str) -> str:
        path = " ".join(f"{x(n):.1f},{y(value):.1f}" for n, value in points)
        return f'<polyline fill="none" stroke="{colour}" {style} points="{path}"/>'

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<line x1="{left}" y1="{y(low):.1f}" x2="{width - right}" y2="{y(low):.1f}" stroke="#888"/>',
        f'<line x1="{left}" y1="{y(low):.1f}" x2="{left}" y2="{top}" stroke="#888"/>',
        f'<text x="{(left + width) / 2:.0f}" y="{height - 8}" text-anchor="middle">sampled tokens, up to {tokens:.0f}</text>',
        f'<text x="{left + 6}" y="{top + 6}">{escape(metric)}</text>',
    ]
    for value in (low, high):
        parts.append(f'<text x="{left - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{value:.3g}</text>')
    for i, way in enumerate(ways):
        colour = _COLOURS[i % len(_COLOURS)]
        grid = sorted({n for curve in way.curves.values() for n in curve.tokens if n <= tokens})
        for curve in way.curves.values():
            own = [(n, v) for n, v in zip(curve.tokens, curve.values, strict=True) if n <= tokens]
            parts.append(line(own, colour, 'stroke-opacity="0.3"'))
        mean = [(n, float(np.mean([curve.at(n) for curve in way.curves.values()]))) for n in grid]
        parts.append(line(mean, colour, 'stroke-width="2"'))
        parts.append(
            f'<text x="{width - right}" y="{top + 22 + 16 * i}" text-anchor="end" fill="{colour}">{escape(way.name)}</text>'
        )
    return "\n".join([*parts, "</svg>\n"])


def seed_of(config: Mapping[str, Any], default: int) -> int:
    """A run's seed, from its config; runs without one count as seeds of their own."""
    seed = config.get("seed")
    return seed if isinstance(seed, int) else default
