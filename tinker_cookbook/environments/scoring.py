"""Rubrics of the `load_environment` contract: reward functions with weights, called by the names of their parameters.

A function takes any of prompt, completion, answer, state and info, and says what one reply is worth. One that takes the plural
names (prompts, completions, answers, states, infos) is called once per group, when all of its replies are there.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from tinker_cookbook.exceptions import ConfigurationError, DataValidationError
from tinker_cookbook.rl.types import Metrics
from tinker_cookbook.utils.reward_threads import call_reward

FIELDS = ("prompt", "completion", "answer", "state", "info")
"""What a function of one reply may take."""
GROUP_FIELDS = tuple(f"{name}s" for name in FIELDS)
"""What a function of a whole group may take: lists, in the order of the members."""


@dataclass(frozen=True)
class Rubric:
    """Reward functions and their weights; the reward is the weighted sum.

    Args:
        funcs: sync or async; each returns a number, or (number, metrics). A function of a group returns a list of these.
        weights: of the same length; None: 1 each. With weight 0 a function is only a metric.
    """

    funcs: Sequence[Callable[..., Any]]
    weights: Sequence[float] | None = None


@dataclass(frozen=True)
class _Scorer:
    name: str
    function: Callable[..., Any]
    weight: float
    takes: tuple[str, ...]


@dataclass(frozen=True)
class Scoring:
    """A checked rubric."""

    of_reply: tuple[_Scorer, ...]
    of_group: tuple[_Scorer, ...]

    @classmethod
    def of(cls, rubric: Any, owner: str) -> Scoring:
        """From an object with `funcs` and `weights`, or a mapping. Raises ConfigurationError, which begins with `owner`."""
        has = rubric.get if isinstance(rubric, Mapping) else partial(getattr, rubric)
        funcs, weights = has("funcs", None), has("weights", None)
        if not funcs:
            raise ConfigurationError(
                f"{owner}.rubric, a {type(rubric).__name__}, has no funcs: give at least one function, as Rubric([function])"
            )
        funcs, weights = list(funcs), [1.0] * len(funcs) if weights is None else list(weights)
        if len(weights) != len(funcs):
            raise ConfigurationError(f"{owner}.rubric: {len(funcs)} funcs need as many weights, got {len(weights)}")
        scorers = [_scorer(function, weight, owner) for function, weight in zip(funcs, weights, strict=True)]
        if twice := {scorer.name for scorer in scorers if [s.name for s in scorers].count(scorer.name) > 1}:
            raise ConfigurationError(f"{owner}.rubric has two funcs called {min(twice)}, whose metrics would be one")
        of_group = tuple(scorer for scorer in scorers if set(scorer.takes) & set(GROUP_FIELDS))
        return cls(tuple(scorer for scorer in scorers if scorer not in of_group), of_group)

    async def score(self, fields: Mapping[str, Any]) -> tuple[float, Metrics]:
        """The reward of one reply, with each function's own value as the metric reward/<name>.

        Raises DataValidationError for a function that returns something else than finite numbers.
        """
        total, metrics = 0.0, {}
        for scorer in self.of_reply:
            value, own = _value(scorer, await _call(scorer, fields))
            total, metrics = total + scorer.weight * value, metrics | own
        return total, metrics

    async def score_group(self, fields_G: Sequence[Mapping[str, Any]]) -> list[tuple[float, Metrics]]:
        """What the functions of a whole group add to each member's reward."""
        plural = {f"{name}s": [fields[name] for fields in fields_G] for name in FIELDS}
        scores: list[tuple[float, Metrics]] = [(0.0, {}) for _ in fields_G]
        for scorer in self.of_group:
            returned = await _call(scorer, plural)
            if not isinstance(returned, Sequence) or isinstance(returned, str) or len(returned) != len(fields_G):
                raise DataValidationError(
                    f"rubric function {scorer.name} gave {returned!r:.200}; a function of a group gives a list of one number "
                    f"for each of its {len(fields_G)} members"
                )
            values = [_value(scorer, value) for value in returned]
            scores = [
                (total + scorer.weight * value, metrics | own)
                for (total, metrics), (value, own) in zip(scores, values, strict=True)
            ]
        return scores


def _scorer(function: Any, weight: Any, owner: str) -> _Scorer:
    name = getattr(function, "__name__", type(function).__name__)
    if not callable(function):
        raise ConfigurationError(f"{owner}.rubric: {function!r} in funcs is no function")
    if not isinstance(weight, int | float) or not math.isfinite(weight):
        raise ConfigurationError(f"{owner}.rubric: the weight of {name} must be a finite number, got {weight!r}")
    parameters = inspect.signature(function).parameters.values()
    known = FIELDS + GROUP_FIELDS
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    takes = tuple(p.name for p in named if p.name in known)
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        takes = FIELDS
    positional = [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY]
    unknown = positional + [p.name for p in named if p.name not in known and p.default is p.empty]
    if unknown:
        raise ConfigurationError(
            f"{owner}.rubric: {name} takes {unknown[0]}, which nothing gives; parameters are called {', '.join(FIELDS)}, or, "
            f"for a function of a whole group, {', '.join(GROUP_FIELDS)}"
        )
    if set(takes) & set(FIELDS) and set(takes) & set(GROUP_FIELDS):
        raise ConfigurationError(
            f"{owner}.rubric: {name} takes {', '.join(takes)}: either one reply's fields or those of a group"
        )
    return _Scorer(name, function, float(weight), takes)


async def _call(scorer: _Scorer, fields: Mapping[str, Any]) -> Any:
    return await call_reward(partial(scorer.function, **{name: fields[name] for name in scorer.takes}))


def _value(scorer: _Scorer, returned: Any) -> tuple[float, Metrics]:
    value, metrics = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, {})
    found = {f"reward/{scorer.name}": value} | {
        f"reward/{scorer.name}/{key}": own for key, own in dict(metrics).items()
    }
    numbers = {key: finite_number(own, f"rubric function {scorer.name}: {key}") for key, own in found.items()}
    return numbers[f"reward/{scorer.name}"], numbers


def finite_number(value: Any, what: str) -> float:
    """As float. Raises DataValidationError for a text, nothing, or what is not finite."""
    try:
        number = math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise DataValidationError(f"{what} is {value!r:.200}; it must be a finite number")
    return number
