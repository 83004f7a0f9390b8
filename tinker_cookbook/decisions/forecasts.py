"""Yes-or-no questions with a date, held out by date, and the verification of forecasts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from functools import partial
from typing import Any

import chz

from tinker_cookbook.data.rows import BadRows, Row
from tinker_cookbook.decisions.data import Decision, DecisionBatches, DecisionRows, load_rows
from tinker_cookbook.decisions.rules import bins, decision_metrics
from tinker_cookbook.decisions.shipped import rain
from tinker_cookbook.exceptions import ConfigurationError, DataFormatError
from tinker_cookbook.plugins import Kind, Registry, parameter_problem
from tinker_cookbook.renderers import Message
from tinker_cookbook.supervised.types import SupervisedDataset
from tinker_cookbook.utils.fields import FieldGroup, docs
from tinker_cookbook.utils.intervals import student_mean, wilson

YES, NO = "yes", "no"
HELD_OUT_SHARE = 0.2
"""Fraction of the dates that is held out, the last ones, if no cutoff is given."""
EXPECTED = '{"question": "...", "date": "2025-03-01", "outcome": true}'
FORECASTS: Registry[Callable[[], Any]] = Registry(
    Kind(
        key="dataset",
        wanted="a function without arguments that returns rows",
        example='''
def rows():
    """Rows of forecasts."""
    return [{"question": "Will it rain?", "date": "2025-03-01", "outcome": True}]
''',
        problem=partial(parameter_problem, names=()),
    ),
    {"rain": rain},
)


@dataclass(frozen=True)
class Forecast:
    """A question asked on a date, and its outcome."""

    question: str
    asked: date
    outcome: bool
    probability: float | None = None
    """of yes, if it is known"""
    place: str = ""

    @property
    def messages(self) -> tuple[Message, ...]:
        return (Message(role="user", content=self.question),)

    @property
    def decision(self) -> Decision:
        """The choices yes and no, with the outcome as the target."""
        return Decision(self.messages, (YES, NO), (float(self.outcome), float(not self.outcome)), self.place)


def read_forecast(row: Row) -> Forecast:
    """The forecast of a row: `question`, `date`, `outcome` (true or false, yes or no, 1 or 0), and perhaps `probability`.

    Raises DataFormatError.
    """
    outcome, known = row.content.get("outcome"), row.content.get("probability")
    text = str(outcome).strip().lower()
    if text not in ("true", "false", YES, NO, "1", "0"):
        raise DataFormatError(f"'outcome' must be true or false, got {outcome!r}")
    try:
        asked = date.fromisoformat(row.text("date")[:10])
    except ValueError:
        raise DataFormatError(f"'date' must be as 2025-03-01, got {row.content.get('date')!r}") from None
    if known is not None and not (isinstance(known, int | float) and 0 <= known <= 1):
        raise DataFormatError(f"'probability' must be from 0 to 1, got {known!r}")
    return Forecast(row.text("question"), asked, text in ("true", YES, "1"), known, row.place)


def split_by_date(rows: Sequence[Forecast], cutoff: date | None) -> tuple[list[Forecast], list[Forecast]]:
    """The questions before the cutoff, and those from it on; None: the last HELD_OUT_SHARE of the dates are held out.

    Raises ConfigurationError when one side is empty.
    """
    if cutoff is None:
        dates = sorted({row.asked for row in rows})
        cutoff = dates[min(len(dates) - 1, round((1 - HELD_OUT_SHARE) * len(dates)))]
    train = [row for row in rows if row.asked < cutoff]
    test = [row for row in rows if row.asked >= cutoff]
    if not train or not test:
        raise ConfigurationError(
            f"cutoff={cutoff.isoformat()}: {len(train)} questions are before it and {len(test)} from it on; choose a date "
            f"between {min(row.asked for row in rows)} and {max(row.asked for row in rows)}"
        )
    return train, test


@chz.chz(typecheck=True)
class ForecastRows(DecisionRows, FieldGroup):
    """Where forecasts come from, and which are held out."""

    DOCS = docs(
        dataset=f"{', '.join(FORECASTS.names())} (shipped); a .jsonl, .csv or .parquet file; or path/file.py:function",
        test_dataset="held-out questions; None: those from the cutoff on",
    )

    cutoff: str | None = chz.field(
        default=None, doc="first date of the held-out questions, as 2025-06-01; None: the last fifth of the dates"
    )


@chz.chz(typecheck=True)
class ForecastDatasetBuilder(ForecastRows, DecisionBatches):
    """Batches of forecasts, held out by date."""

    @chz.validate
    def _check_cutoff(self) -> None:
        self.first_held_out()

    def first_held_out(self) -> date | None:
        """The cutoff. Raises ConfigurationError."""
        if self.cutoff is None:
            return None
        if self.test_dataset is not None:
            raise ConfigurationError("cutoff and test_dataset are both given: give one of them")
        try:
            return date.fromisoformat(self.cutoff)
        except ValueError:
            raise ConfigurationError(f"cutoff={self.cutoff}: must be a date as 2025-06-01") from None

    def sides(self, bad: BadRows | None = None) -> tuple[list[Forecast], list[Forecast]]:
        """Training and held-out questions."""
        rows, held_out = load_rows(self.dataset, read_forecast, EXPECTED, FORECASTS, bad)
        if self.test_dataset is not None:
            return rows, load_rows(self.test_dataset, read_forecast, EXPECTED, FORECASTS, bad)[0]
        return (rows, held_out) if held_out else split_by_date(rows, self.first_held_out())

    def __call__(self) -> tuple[SupervisedDataset, SupervisedDataset | None]:
        bad = BadRows(self.common_config.on_bad_row)
        train, test = self.sides(bad)
        return self.batches([row.decision for row in train], [row.decision for row in test], bad)


def verification(forecasts: Sequence[float], rows: Sequence[Forecast], base_rate: float) -> dict[str, float]:
    """Verification scores of forecasts.

    Args:
        forecasts: the probability of yes for each row.
        base_rate: the fraction of yes among the training questions: the forecast of a constant baseline.

    Returns:
        `decision_metrics` of the outcomes; `reference_brier`, the Brier score of `base_rate`; `skill`, 1 - brier /
        reference_brier; `gain`, reference_brier - brier, with `gain_low` and `gain_high`, its 95 % interval over questions; and,
        if probabilities are known, `distance_to_known`, the mean of |forecast - probability|, and `known_brier`, their score.
    """
    targets = [row.decision.target for row in rows]
    metrics = decision_metrics([(p, 1 - p) for p in forecasts], targets)
    scores = [_brier(p, row.outcome) for p, row in zip(forecasts, rows, strict=True)]
    reference = [_brier(base_rate, row.outcome) for row in rows]
    gain = student_mean([theirs - ours for theirs, ours in zip(reference, scores, strict=True)])
    mean_reference = sum(reference) / len(reference)
    metrics |= {
        "reference_brier": mean_reference,
        "skill": 1 - metrics["brier"] / mean_reference if mean_reference else 0.0,
        "gain": gain.mean,
        "gain_low": gain.low,
        "gain_high": gain.high,
    }
    known = [(p, row) for p, row in zip(forecasts, rows, strict=True) if row.probability is not None]
    if known:
        metrics["distance_to_known"] = sum(abs(p - (row.probability or 0.0)) for p, row in known) / len(known)
        metrics["known_brier"] = sum(_brier(row.probability or 0.0, row.outcome) for _, row in known) / len(known)
    return metrics


def _brier(probability: float, outcome: bool) -> float:
    """Summed over both choices, as in `rules.score`: 0 to 2."""
    return 2 * (probability - outcome) ** 2


def reliability(forecasts: Sequence[float], rows: Sequence[Forecast]) -> list[list[str]]:
    """For each bin of forecasts: its range, count, mean, and the fraction of yes with its 95 % interval."""
    table: list[list[str]] = []
    for low, members in bins(forecasts).items():
        came = sum(rows[i].outcome for i in members)
        mean = sum(forecasts[i] for i in members) / len(members)
        table.append(
            [f"{low:.1f} to {low + 0.1:.1f}", str(len(members)), f"{mean:.2f}", str(wilson(came, len(members)))]
        )
    return table


def forecast_rows(forecasts: Sequence[float], rows: Sequence[Forecast]) -> list[dict[str, Any]]:
    """Forecasts with their questions and outcomes, as lines of a file."""
    return [
        {"question": row.question, "date": row.asked.isoformat(), "outcome": row.outcome, "forecast": forecast}
        | ({} if row.probability is None else {"probability": row.probability})
        for forecast, row in zip(forecasts, rows, strict=True)
    ]
