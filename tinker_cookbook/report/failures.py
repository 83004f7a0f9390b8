"""The failing rollouts of a run: the worst, the flagged, and the groups that were given up, each with its reason.

Here are the reasons and the order; the page and the terminal show the same.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape

from tinker_cookbook.report.tables import print_table
from tinker_cookbook.rl.monitors import INFO_KEY

Index = Mapping[str, Sequence[Any]]
"""As `rollouts.index_step` returns it, of one step or several."""

ONLY_REWARD = "only its reward"
SIGNS = {
    "timeout": "timeout",
    "parse_error": "a reply cannot be read",
    "unparsed_tool_calls": "a tool call cannot be read",
    "tool_exceptions": "a tool failed",
    "max_tokens_reached": "a reply was cut off",
    "context_overflow": "the prompt was too long",
    "compile_error": "does not compile",
    "runtime_error": "fails as it runs",
    "score_failed": "could not be scored",
    "unreadable": "the grader's reply cannot be read",
}
"""Metrics of turns that say what went wrong when they are above 0 -> words."""
_TIMEOUT_STOPS = ("rollout_timeout",)
WORST = 10


@dataclass(frozen=True)
class Latency:
    """Seconds that environments took to answer a reply, over the slowest turn of each rollout."""

    median: float
    high: float
    """the 95th percentile"""
    longest: float


def why(turns: Sequence[Mapping[str, Any]]) -> tuple[str, int, str]:
    """What went wrong in a rollout, in words; its timeouts; and the monitors that flag it, by name.

    Args:
        turns: rows of its turns, with `metrics`, `info`, `stop_reason` and `rollout_stop_reason` as they are in the file.
    """
    flags: dict[str, str] = {}
    if f'"{INFO_KEY}"' in turns[0]["info"]:
        flags = json.loads(turns[0]["info"]).get(INFO_KEY, {})
    found = [f"{name}: {reason}" for name, reason in flags.items()]
    ended, timeouts = turns[-1]["rollout_stop_reason"], 0
    if ended not in (None, "completed", "tool_stopped"):
        found.append(f"ended by {ended}")
        timeouts += ended in _TIMEOUT_STOPS
    signs: dict[str, None] = {}
    for turn in turns:
        metrics: Mapping[str, float] = json.loads(turn["metrics"])
        signs |= {words: None for key, words in SIGNS.items() if metrics.get(key, 0) > 0}
        timeouts += int(metrics.get("timeout", 0))
        if turn["stop_reason"] == "length":
            signs[SIGNS["max_tokens_reached"]] = None
    return "; ".join([*found, *signs]) or ONLY_REWARD, timeouts, ", ".join(flags)


def worst(index: Index, count: int = WORST) -> list[int]:
    """The places of the rollouts with the lowest reward, those without one first, of equal ones the newest first."""

    def order(i: int) -> tuple[bool, float, int]:
        reward = index["reward"][i]
        return reward is not None, reward or 0.0, -index["step"][i]

    return sorted(range(len(index["step"])), key=order)[:count]


def flagged(index: Index) -> list[int]:
    """The places of the rollouts that a monitor holds to be hacks, the newest first."""
    return [i for i in reversed(range(len(index["step"]))) if index["flags"][i]]


def latency(index: Index) -> Latency | None:
    """None: no environment was timed, as in runs of earlier versions."""
    seconds = [value for value in index["slowest_s"] if value is not None]
    if not seconds:
        return None
    return Latency(float(np.median(seconds)), float(np.percentile(seconds, 95)), max(seconds))


def sentence(index: Index) -> str:
    """What failed, in numbers."""
    count, given_up = len(index["step"]), len(index["failed"])
    timeouts, flags = sum(index["timeouts"]), len(flagged(index))
    parts = [f"{count} rollouts, {given_up} groups given up, {timeouts} timeouts, {flags} flagged by monitors"]
    if (times := latency(index)) is not None:
        parts.append(
            f"environments took {times.median:.3g} s to answer (median of each rollout's slowest turn), {times.high:.3g} s at "
            f"the 95th percentile, {times.longest:.3g} s at most"
        )
    return "; ".join(parts)


def show(index: Index, label: str, count: int = WORST) -> None:
    """Print the worst rollouts, those that monitors flag, and the groups that were given up, at most `count` of each."""
    Console(soft_wrap=True).print(f"{label}: {sentence(index)}", highlight=False, markup=False)
    for title, places in (("The worst rollouts", worst(index, count)), ("Flagged by monitors", flagged(index)[:count])):
        if places:
            print_table(
                title, ("rollout", "reward", "why", "env seconds", "it begins"), [_row(index, i) for i in places]
            )
    if failed := index["failed"][-count:]:
        errors = [_as_it_is("; ".join(": ".join(error) for error in one["errors"])) for one in failed]
        rows = [[f"{one['step']}-{one['group']}", said] for one, said in zip(failed, errors, strict=True)]
        print_table("Groups that were given up", ("group", "errors"), rows)


def _as_it_is(text: str) -> str:
    """A text for a table: nothing in it is markup or moves the cursor."""
    return escape("".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text))


def _row(index: Index, i: int) -> list[str]:
    reward, seconds = index["reward"][i], index["env_s"][i]
    return [
        "-".join(str(index[name][i]) for name in ("step", "group", "member")),
        "none" if reward is None else f"{reward:.4g}",
        _as_it_is(index["why"][i]),
        "" if seconds is None else f"{seconds:.3g}",
        _as_it_is(index["text"][i][:60]),
    ]
