"""What recipes.debate_study measures, and the tables and the sentence that it makes of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

from tinker_cookbook.debate.signals import SIGNALS
from tinker_cookbook.report.tables import markdown_table
from tinker_cookbook.utils.intervals import DIFFERENCE_OF_RATES, RATE, Estimate, bootstrap_mean, nested_mean
from tinker_cookbook.utils.lazy import pandas

BEFORE = "before"
REACHES_TRUTH = ("truth",)
"""Signals that use the truth: nothing is said to beat them."""


@dataclass(frozen=True)
class Measured:
    """A policy on the held-out items, under one protocol. Lists are per item."""

    correct_I: list[float]
    """share of its answers that are right"""
    accepted_I: list[float]
    """share that the judge accepts"""
    judge_right_I: list[float]
    """share on which judge and truth agree"""
    pairs_I: list[float]
    """of pairs of a right and a wrong answer, where the judge prefers the right one; items that have such pairs"""
    tokens_per_rollout: float
    items_I: list[str] = field(default_factory=list[str])
    """names of the items; empty in a study of before they were kept"""
    parts_I: list[str] = field(default_factory=list[str])
    """of the test set, `part:cluster` or `part`; items of one cluster count together in intervals"""


@dataclass(frozen=True)
class Run:
    """One protocol, one seed, one base model."""

    protocol: str
    seed: int
    steps: int
    tokens: int
    """sampled in training"""
    seconds: float
    before: Measured
    after: Measured
    base: str = ""
    """the base model's folder; "": the study's only one"""
    read_tokens: int = 0
    """of all prompts in training, cached ones included"""
    checks: int = 0
    """steps that the judge checked in training"""
    cpu_seconds: float = 0.0
    """of its process, training and measuring"""


def by_base(runs: Sequence[Run]) -> list[list[Run]]:
    """The runs of each base model, in order."""
    found: dict[str, list[Run]] = {}
    for run in runs:
        found.setdefault(run.base, []).append(run)
    return list(found.values())


def part_of(name: str) -> str:
    """The part of the test set, without its cluster."""
    return name.partition(":")[0]


def parts(runs: Sequence[Run]) -> list[str]:
    """The parts of the test set, in order; empty if it has none."""
    return [part for part in dict.fromkeys(map(part_of, runs[0].after.parts_I)) if part]


def estimate_of(values_B_R_I: list[list[list[float]]], parts_I: Sequence[str], low: float, high: float) -> Estimate:
    """Over base models, runs and items; over runs and items where there is one base model and no cluster."""
    clustered = any(":" in part for part in parts_I)
    if len(values_B_R_I) == 1 and not clustered:
        return bootstrap_mean(values_B_R_I[0])
    clusters = [part if ":" in part else i for i, part in enumerate(parts_I)] if clustered else None
    return nested_mean(values_B_R_I, clusters, low, high)


def estimate(runs: Sequence[Run], values: str, part: str | None = None) -> Estimate:
    """Of a list of `Measured` after training, over base models, runs and the items of a part (None: of all)."""
    kept = _items(runs, part)
    nested = [[[getattr(run.after, values)[i] for i in kept] for run in of_base] for of_base in by_base(runs)]
    return estimate_of(nested, _parts_of(runs, kept), *RATE)


def gap(runs: Sequence[Run]) -> Estimate:
    """How much more of the trained policy's answers the judge accepts than are right."""
    nested = [
        [[a - c for a, c in zip(run.after.accepted_I, run.after.correct_I, strict=True)] for run in of_base]
        for of_base in by_base(runs)
    ]
    return estimate_of(nested, _parts_of(runs, _items(runs, None)), *DIFFERENCE_OF_RATES)


def lead(runs: Sequence[Run], others: Sequence[Run], part: str | None = None) -> Estimate:
    """Accuracy of one protocol's policies minus another's, on the same items, over the base models and seeds that both have."""
    other = {(run.base, run.seed): run.after.correct_I for run in others}
    both = [run for run in runs if (run.base, run.seed) in other]
    kept = _items(both, part)
    nested = [
        [[run.after.correct_I[i] - other[run.base, run.seed][i] for i in kept] for run in of_base]
        for of_base in by_base(both)
    ]
    return estimate_of(nested, _parts_of(both, kept), *DIFFERENCE_OF_RATES)


def _items(runs: Sequence[Run], part: str | None) -> list[int]:
    measured = runs[0].after
    every = range(len(measured.correct_I))
    return list(every) if part is None else [i for i in every if part_of(measured.parts_I[i]) == part]


def _parts_of(runs: Sequence[Run], kept: Sequence[int]) -> list[str]:
    named = runs[0].after.parts_I
    return [named[i] for i in kept] if named else []


COLUMNS = (
    "signal",
    "steps",
    "sampled tokens",
    "all tokens",
    "judge checks",
    "CPU s",
    "judge right, before",
    "prefers the right one",
    "policy right",
    "debate minus this",
    "judge right, after",
    "hacking gap",
)
SHOWN = ("signal", "prefers the right one", "policy right", "debate minus this", "hacking gap")


def columns(runs: Sequence[Run]) -> list[str]:
    """Those of the table: with what is right in each part of the test set, and the difference there."""
    return [*COLUMNS, *(name for part in parts(runs) for name in (f"right, {part}", f"debate minus this, {part}"))]


def table_rows(runs: Sequence[Run]) -> list[list[str]]:
    by_protocol: dict[str, list[Run]] = {}
    for run in runs:
        by_protocol.setdefault(run.protocol, []).append(run)
    first, debate = next(iter(by_protocol.values())), by_protocol.get("debate")
    rows = [_row_before(first)]
    for protocol, of_protocol in by_protocol.items():
        pairs = [pair for of_base in by_base(of_protocol) for pair in of_base[0].before.pairs_I]
        rival = of_protocol if debate and protocol != "debate" else None
        judged = [[of_base[0].before.judge_right_I] for of_base in by_base(of_protocol)]
        kept = _parts_of(of_protocol, _items(of_protocol, None))
        row = [
            protocol,
            f"{fmean(run.steps for run in of_protocol):.0f}",
            f"{fmean(run.tokens for run in of_protocol):.0f}",
            f"{fmean(run.tokens + run.read_tokens for run in of_protocol):.0f}",
            f"{fmean(run.checks for run in of_protocol):.0f}",
            f"{fmean(run.cpu_seconds for run in of_protocol):.0f}",
            str(estimate_of(judged, kept, *RATE)),
            str(bootstrap_mean([pairs])) if pairs else "",
            str(estimate(of_protocol, "correct_I")),
            str(lead(debate, rival)) if debate and rival else "",
            str(estimate(of_protocol, "judge_right_I")),
            str(gap(of_protocol)),
        ]
        for part in parts(runs):
            row += [
                str(estimate(of_protocol, "correct_I", part)),
                str(lead(debate, rival, part)) if debate and rival else "",
            ]
        rows.append(row)
    return rows


def _row_before(runs: Sequence[Run]) -> list[str]:
    """Of the base models."""

    def right(part: str | None) -> str:
        kept = _items(runs, part)
        nested = [[[of_base[0].before.correct_I[i] for i in kept]] for of_base in by_base(runs)]
        return str(estimate_of(nested, _parts_of(runs, kept), *RATE))

    row = [BEFORE, *["0"] * 5, "", "", right(None), "", "", ""]
    return [*row, *(cell for part in parts(runs) for cell in (right(part), ""))]


def rivals(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Of signals without the truth, other than debate and its own controls."""
    names = [n for n, one in SIGNALS.items() if one.protocol != "debate" and n not in REACHES_TRUTH]
    found = {name: [run for run in runs if run.protocol == name] for name in names}
    return {name: of_name for name, of_name in found.items() if of_name}


def sentence(runs: Sequence[Run]) -> str:
    """The result in one sentence, with its scope."""
    debates, others = [run for run in runs if run.protocol == "debate"], rivals(runs)
    if not debates or not others:
        return "Nothing to compare: the sentence needs debate and another protocol without the truth."
    best = max(others, key=lambda name: estimate(others[name], "correct_I").mean)
    difference, accuracy = lead(debates, others[best]), estimate(debates, "correct_I")
    how = "beats" if difference.low > 0 else "loses to" if difference.high < 0 else "cannot be told apart from"
    tokens, bases = fmean(run.tokens for run in debates), len(by_base(debates))
    seeds = len({run.seed for run in debates})
    scope = "On this one base model" if bases == 1 else f"Over {bases} base models"
    over = [*(["base models"] if bases > 1 else []), *(["seeds"] if seeds > 1 else []), "questions"]
    beyond = ", not over base models" if bases == 1 else ""
    return (
        f"{scope}, at about {tokens:.0f} sampled tokens and {seeds} seed{'s' if seeds > 1 else ''}, the policy trained by debate "
        f"is right on {accuracy} of the held-out answers and {how} the best other signal without the truth, {best} "
        f"({estimate(others[best], 'correct_I')}): difference {difference}, over {' and '.join(over)}{beyond}."
    )


def markdown(runs: Sequence[Run]) -> str:
    """The table and the sentence."""
    return "\n".join([markdown_table(columns(runs), table_rows(runs)), "", sentence(runs)])


def raw_rows(runs: Sequence[Run]) -> pandas.DataFrame:
    """A row for each run and held-out item."""
    rows: list[dict[str, object]] = []
    for run in runs:
        of_run = {
            "base": run.base,
            "protocol": run.protocol,
            "seed": run.seed,
            "steps": run.steps,
            "tokens": run.tokens,
        }
        of_run |= {"read_tokens": run.read_tokens, "checks": run.checks, "cpu_seconds": run.cpu_seconds}
        for i in range(len(run.after.correct_I)):
            row: dict[str, object] = {**of_run, "item": run.after.items_I[i] if run.after.items_I else str(i)}
            row["part"] = run.after.parts_I[i] if run.after.parts_I else ""
            for when, measured in (("before", run.before), ("after", run.after)):
                for name in ("correct", "accepted", "judge_right"):
                    row[f"{name}_{when}"] = getattr(measured, f"{name}_I")[i]
            rows.append(row)
    return pandas.DataFrame(rows)


def label_of(base: str) -> str:
    """The folder of a base model's runs below the study's."""
    return Path(base).name
