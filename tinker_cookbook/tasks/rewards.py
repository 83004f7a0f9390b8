"""Reward functions of a solution text, and specs that mix them: `compression:0.5,rouge:0.3` is their weighted mean.

Each function takes (solution, question, reference) and returns a number in [0, 1]. Lengths are in characters.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from tinker_cookbook.exceptions import ConfigurationError

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


@dataclass(frozen=True)
class RewardSpec:
    """A weighted mean of reward functions."""

    weights: tuple[tuple[str, float], ...]

    @classmethod
    def parse(cls, text: str) -> RewardSpec:
        """From `name`, or `name:weight,name:weight`. Raises ConfigurationError naming the known functions."""
        weights: list[tuple[str, float]] = []
        for part in text.split(","):
            name, separator, number = part.strip().partition(":")
            if name not in REWARDS:
                raise ConfigurationError(f"reward_fn={text!r}: {name!r} is unknown; use {', '.join(REWARDS)}")
            try:
                weight = float(number) if separator else 1.0
            except ValueError:
                raise ConfigurationError(f"reward_fn={text!r}: {number!r} is not a weight; write {name}:0.5") from None
            if not 0 < weight < float("inf"):
                raise ConfigurationError(f"reward_fn={text!r}: the weight of {name} must be positive, got {weight}")
            weights.append((name, weight))
        if len({name for name, _ in weights}) < len(weights):
            raise ConfigurationError(f"reward_fn={text!r} names a function twice")
        return cls(tuple(weights))

    def __call__(self, solution: str | None, question: str, reference: str) -> tuple[float, dict[str, float]]:
        """The mixed reward and each function's own value; all 0 without a solution."""
        scores = {name: REWARDS[name](solution, question, reference) if solution else 0.0 for name, _ in self.weights}
        total = sum(weight for _, weight in self.weights)
        return sum(weight * scores[name] for name, weight in self.weights) / total, scores
