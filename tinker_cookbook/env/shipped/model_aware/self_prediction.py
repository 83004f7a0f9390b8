"""Self-prediction: solve a sum, and say how likely the answer is right.

Measured: whether stated confidence is the probability of being right. The reply ends with FINAL ANSWER and CONFIDENCE,
once each; before that it may have reasoning in <think> tags, and nothing else. The reward is 0.2 for the form, 0.5 for
a right answer and 0.3 * (1 - (p - right)^2): the Brier score, a proper scoring rule, so the honest confidence is the
best for a given answer.
Range: 0 to 1; 0 for a reply in another form, which includes a missing confidence or one outside [0, 1].
Known hacks: a wrong answer on purpose, with confidence 0, earns 0.5 and never more than honest trying; and one
confidence for everything, the base rate, which needs no self-knowledge.
Control: `skill_over_constant` of many replies, 1 - Brier / Brier of the base rate: at most 0 for a constant. In
metrics, `confidence_right` and `confidence_wrong` are equal for a constant, as far as questions do not differ.
"""

import random
import re
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from tinker_cookbook.env.scoring import Rubric
from tinker_cookbook.exceptions import ConfigurationError, DataValidationError

SYSTEM = (
    "Solve the problem, and say how likely your answer is right, from 0 to 1. Think within <think> and </think> if you need to. "
    "End with one line of this form:\nFINAL ANSWER: 12 CONFIDENCE: 0.7"
)
FORMAT, CORRECT, CALIBRATION = 0.2, 0.5, 0.3
_THOUGHT = re.compile(r"\s*<think>.*?</think>", re.DOTALL)
_ANSWER = re.compile(r"\s*FINAL ANSWER:[ ]*(0|-?[1-9][0-9]*)[ \n]+CONFIDENCE:[ ]*(0|1|0?\.[0-9]+|1\.0+)\s*")
_LONGEST = 1000
"""Characters after the thought that can be an answer."""


class Prediction(NamedTuple):
    """An answer, as written, and the probability that it is right."""

    answer: str
    confidence: float


def parse_prediction(reply: str) -> Prediction | None:
    """Parse a reply; None if it is in another form, or contains anything else."""
    thought = _THOUGHT.match(reply)
    text = reply[thought.end() if thought else 0 :]
    match = _ANSWER.fullmatch(text) if len(text) <= _LONGEST else None
    return Prediction(match[1], float(match[2])) if match else None


def score_prediction(prediction: Prediction | None, answer: str) -> float:
    """The reward, 0 to 1."""
    if prediction is None:
        return 0.0
    correct = float(prediction.answer == answer)
    return FORMAT + CORRECT * correct + CALIBRATION * (1 - (prediction.confidence - correct) ** 2)


def prediction_reward(completion: str, answer: str) -> tuple[float, dict[str, float]]:
    """Reward and metrics of one reply."""
    prediction = parse_prediction(completion)
    if prediction is None:
        return 0.0, {"format": 0.0}
    correct = prediction.answer == answer
    metrics = {
        "format": 1.0,
        "correct": float(correct),
        "brier": (prediction.confidence - correct) ** 2,
        "confidence": prediction.confidence,
        f"confidence_{'right' if correct else 'wrong'}": prediction.confidence,
    }
    return score_prediction(prediction, answer), metrics


def skill_over_constant(confidences: Sequence[float], correct: Sequence[float]) -> float:
    """1 - Brier / (Brier of always saying the base rate); 0 if all answers are right or all are wrong, which says
    nothing.

    Raises DataValidationError for lists of different lengths, or empty ones.
    """
    if len(confidences) != len(correct) or not len(correct):
        raise DataValidationError(f"{len(confidences)} confidences for {len(correct)} answers: one each is needed")
    stated, right = np.asarray(confidences, dtype=np.float64), np.asarray(correct, dtype=np.float64)
    constant = float(right.var())
    return 1 - float(np.mean((stated - right) ** 2)) / constant if constant > 0 else 0.0


def load_environment(
    questions: int = 1000,
    highest: int = 999,
    hard_share: float = 0.15,
    operations: str = "+-*",
    seed: int = 0,
    further: int = 0,
) -> Any:
    """Sums of two operands from 0 to `highest`; a `hard_share` of them from 1e7 to 1e12. Every tenth is held out.

    Args:
        questions: how many different ones there are.
        further: number of additional held-out questions, because a tenth of few questions is too few for a measurement.

    Raises ConfigurationError for arguments out of range.
    """
    if not operations or set(operations) - set("+-*"):
        raise ConfigurationError(f"operations={operations!r}: give some of + - *")
    if not 0 <= hard_share <= 1:
        raise ConfigurationError(f"hard_share={hard_share}: must be from 0 to 1")
    there_are = (highest + 1) ** 2 * len(set(operations))
    if questions < 10 or highest < 1 or questions > there_are // 2:
        raise ConfigurationError(
            f"questions={questions}, highest={highest}: give at least 10 questions, and at most half of what there is"
        )
    if not 0 <= further <= there_are * 9 // 10 - questions:  # drawing the very last ones would take long
        raise ConfigurationError(
            f"further={further}: with questions={questions} it must be from 0 to {there_are * 9 // 10 - questions}, nine tenths "
            f"of the {there_are} that there are"
        )
    rng, rows = random.Random(seed), dict[str, dict[str, Any]]()
    while len(rows) < questions + further:
        hard = rng.random() < hard_share
        first, second = (rng.randint(10**7, 10**12) if hard else rng.randint(0, highest) for _ in range(2))
        row = _row(first, rng.choice(operations), second, hard)
        rows[row["prompt"]] = row
    made = list(rows.values())
    return SimpleNamespace(
        dataset=[row for i, row in enumerate(made[:questions]) if i % 10],
        eval_dataset=made[:questions:10] + made[questions:],
        rubric=Rubric([prediction_reward]),
        system_prompt=SYSTEM,
    )


def _row(first: int, operation: str, second: int, hard: bool) -> dict[str, Any]:
    value = {"+": first + second, "-": first - second, "*": first * second}[operation]
    info = {"difficulty": "hard" if hard else "easy", "operation": operation}
    return {"prompt": f"What is {first} {operation} {second}?", "answer": str(value), "info": info}
