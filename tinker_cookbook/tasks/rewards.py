"""Reward functions of a solution text, and specs that mix them: `compression:0.5,rouge:0.3` is their weighted mean.

Each function here takes (solution, question, reference) and returns a number in [0, 1]. Lengths are in characters. A function
of one's own takes (question, reply, answer) and mixes with them: `my_rewards.py:score:2,rouge:0.5`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from tinker_cookbook.exceptions import ConfigurationError, DataValidationError
from tinker_cookbook.own_parts import Kind, Registry, parameter_problem
from tinker_cookbook.utils.reward_threads import call_reward

if TYPE_CHECKING:
    from rouge_score.rouge_scorer import RougeScorer

RewardFn = Callable[[str, str, str], float]

COMPRESSION_TARGET = 0.1
LENGTH_BOUNDS = (50, 500)


def exact_match(solution: str, question: str, reference: str) -> float:
    """1 when the solution is the reference, ignoring case and surrounding space."""
    return float(solution.strip().casefold() == reference.strip().casefold())


def compression(solution: str, question: str, reference: str) -> float:
    """Best at a tenth of the question's length: r / 0.1 below, 0.1 / r above, 0 when empty."""
    ratio = len(solution) / max(1, len(question))
    if ratio <= COMPRESSION_TARGET:
        return ratio / COMPRESSION_TARGET
    return COMPRESSION_TARGET / ratio


def rouge(solution: str, question: str, reference: str) -> float:
    """ROUGE-L F1 against the reference, with stemming (Lin 2004)."""
    return float(_rouge_scorer().score(reference, solution)["rougeL"].fmeasure)


def length_penalty(solution: str, question: str, reference: str) -> float:
    """1 between 50 and 500 characters, falling linearly to 0 at 0 and at 1000."""
    low, high = LENGTH_BOUNDS
    if len(solution) < low:
        return len(solution) / low
    return max(0.0, min(1.0, 1 - (len(solution) - high) / high))


def fluency(solution: str, question: str, reference: str) -> float:
    """A rough shape check: half for 2 to 5 sentences, half for 10 to 40 words per sentence on average."""
    sentences = [part for part in re.split(r"[.!?]+(?:\s+|$)", solution) if part.strip()]
    if not sentences:
        return 0.0
    words = len(solution.split()) / len(sentences)
    return 0.5 * (2 <= len(sentences) <= 5) + 0.5 * (10 <= words <= 40)


REWARDS: dict[str, RewardFn] = {
    "exact_match": exact_match,
    "compression": compression,
    "rouge": rouge,
    "length_penalty": length_penalty,
    "fluency": fluency,
}


@cache
def _rouge_scorer() -> RougeScorer:
    from rouge_score.rouge_scorer import RougeScorer  # imports nltk and numpy

    return RougeScorer(["rougeL"], use_stemmer=True)


OwnRewardFn = Callable[[str, str, str], Any]
"""(question, reply, answer) -> reward or (reward, metrics), or an awaitable of either. `reply` is all of the reply's text,
tags included; `answer` is the reference."""

REWARD_KIND = Kind(
    key="reward_fn",
    wanted="def score(question: str, reply: str, answer: str) -> float, sync or async; it may also return (reward, metrics)",
    example='''
def score(question: str, reply: str, answer: str) -> float:
    """1 when the reply names the answer, less 0.001 for each character."""
    named = answer.lower() in reply.lower()
    return float(named) - 0.001 * len(reply)
''',
    problem=partial(parameter_problem, names=("question", "reply", "answer")),
)
_OWN: Registry[OwnRewardFn] = Registry(REWARD_KIND, {})


def register_reward(name: str, function: OwnRewardFn) -> None:
    """Make a reward of one's own known under a name. Raises ConfigurationError for a name that is taken."""
    if name in REWARDS:
        raise ConfigurationError(f"reward_fn: the name {name!r} is taken; choose another")
    _OWN.register(name, function)


@dataclass(frozen=True)
class WeightedReward:
    """A reward function in a mixture. `function` is None for one of REWARDS, which `label` names."""

    label: str
    weight: float = 1.0
    function: OwnRewardFn | None = None


@dataclass(frozen=True)
class RewardSpec:
    """A weighted mean of reward functions."""

    rewards: tuple[WeightedReward, ...]

    @classmethod
    def parse(cls, said: str | OwnRewardFn) -> RewardSpec:
        """From a function, or from `name:weight,name:weight` (a weight left out is 1).

        A name is one of REWARDS, a registered one, `package.module:function` or `path/file.py:function`.

        Raises ConfigurationError: an unknown name, a function that takes something else, a bad weight, a name given twice.
        """
        texts = [part.strip() for part in said.split(",")] if isinstance(said, str) else [said]
        rewards = tuple(_weighted(part) for part in texts)
        if len({reward.label for reward in rewards}) < len(rewards):
            raise ConfigurationError(f"reward_fn={said!r} names a function twice")
        return cls(rewards)

    async def __call__(
        self, solution: str | None, question: str, reference: str, reply: str
    ) -> tuple[float, dict[str, float]]:
        """The mixed reward, and each function's own value with the metrics that it returned.

        Args:
            solution: what stands in the reply as its answer; without one the functions of REWARDS give 0.
            reply: all of the reply's text, for functions of one's own.
        """
        total, metrics = 0.0, {}
        for reward in self.rewards:
            if reward.function is None:
                value = REWARDS[reward.label](solution, question, reference) if solution else 0.0
            else:
                value, own = await _ask(reward.label, reward.function, question, reply, reference)
                metrics |= own
            metrics[reward.label] = value
            total += reward.weight * value
        return total / sum(reward.weight for reward in self.rewards), metrics


def _weighted(part: str | OwnRewardFn) -> WeightedReward:
    if not isinstance(part, str):
        return WeightedReward(getattr(part, "__name__", type(part).__name__), function=_OWN.resolve(part))
    name, colon, number = part.rpartition(":")
    weight = _number(number) if colon else None
    if weight is None:
        if name in REWARDS or name in _OWN:
            raise ConfigurationError(f"reward_fn={part!r}: {number!r} is not a weight; write {name}:0.5")
        name, weight = part, 1.0  # a colon in it is that of module:function
    if not 0 < weight < float("inf"):
        raise ConfigurationError(f"reward_fn={part!r}: the weight of {name} must be positive, got {weight}")
    if name in REWARDS:
        return WeightedReward(name, weight)
    return WeightedReward(name.rpartition(":")[2], weight, _OWN.resolve(name, also=REWARDS))


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


async def _ask(
    label: str, function: OwnRewardFn, question: str, reply: str, answer: str
) -> tuple[float, dict[str, float]]:
    """Value and metrics `<label>/<key>` of a function of one's own. Raises DataValidationError for anything but numbers."""
    returned = await call_reward(function, question, reply, answer)
    value, metrics = returned if isinstance(returned, tuple) else (returned, {})
    found = {label: value} | {f"{label}/{key}": number for key, number in dict(metrics).items()}
    for key, number in found.items():
        if not isinstance(number, int | float) or not math.isfinite(number):
            raise DataValidationError(f"reward_fn {key}={number!r}: a reward and its metrics must be finite numbers")
    return float(found.pop(label)), {key: float(number) for key, number in found.items()}
