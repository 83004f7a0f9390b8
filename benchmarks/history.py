"""Compares results with earlier ones: the effect of a change, and the variation of ratios between days."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from benchmarks.harness import Measurement, paired_ratio
from benchmarks.report import Report, Table, number


def compare_with_earlier(earlier: Sequence[Report], now: Report) -> list[Table]:
    """One table for each comparison of `now` that an earlier report of the same benchmark also has.

    A row is a contender: its median speed in each report, oldest first, and for each contender of ours its speed divided by the
    row's. Ratios are taken within rounds. An empty cell was not measured.
    """
    if not earlier:
        return []
    reports = sorted([*earlier, now], key=_moment)
    comparisons = [_comparisons(report) for report in reports]
    tables = []
    for title, today in _comparisons(now).items():
        history = [(report, c[title]) for report, c in zip(reports, comparisons, strict=True) if title in c]
        if len(history) > 1:
            per_token = "tokens/s" in next(table.columns for table in now.tables if table.title == title)
            tables.append(_table(title, today, history, per_token))
    return tables


def _table(
    title: str, today: dict[str, Measurement], history: list[tuple[Report, dict[str, Measurement]]], per_token: bool
) -> Table:
    dates = _dates([report for report, _ in history])
    days = [measured for _, measured in history]
    ours = [name for name, measurement in today.items() if measurement.is_ours]
    unit = "tokens/s" if per_token else "seconds"
    columns = ["contender", *(f"{unit}, {date}" for date in dates)]
    columns += [f"{name} / it, {date}" for name in ours for date in dates]
    rows = [
        [name, *(_speed(day.get(name), per_token) for day in days)]
        + [_ratio(day.get(own), day.get(name), per_token) for own in ours for day in days]
        for name in today
    ]
    return Table(title, columns, rows)


def _speed(measurement: Measurement | None, per_token: bool) -> str:
    if measurement is None:
        return ""
    return number((measurement.tokens_per_second if per_token else measurement.seconds).median)


def _ratio(ours: Measurement | None, other: Measurement | None, per_token: bool) -> str:
    if ours is None or other is None or ours is other:
        return ""
    return f"{number(paired_ratio(ours, other, per_token).median)}x"


def _comparisons(report: Report) -> dict[str, dict[str, Measurement]]:
    """The measured contenders, by title and name. Other measurements of a report are not lists."""
    return {
        title: {m.name: m for m in map(Measurement.from_json, values) if m.repetitions}
        for title, values in report.measurements.items()
        if isinstance(values, list)
    }


def _moment(report: Report) -> datetime:
    return datetime.strptime(report.facts["date"], "%Y-%m-%d %H:%M UTC")


def _dates(reports: Sequence[Report]) -> list[str]:
    """The date of each report; with the time if two have the same day."""
    moments = [_moment(report) for report in reports]
    form = "%m-%d" if len({m.date() for m in moments}) == len(moments) else "%m-%d %H:%M"
    return [m.strftime(form) for m in moments]
