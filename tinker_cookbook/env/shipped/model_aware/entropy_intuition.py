"""Entropy intuition: predict how uncertain the next reply is.

Measured: whether the policy knows the entropy of its own choice. It picks one of a few numbers, names a word for how
sure it feels, and predicts the entropy, in three lines: NUMBER, FEELING and ENTROPY. The true entropy is that of the
snapshot's distribution over the first line. The outcomes are "NUMBER: n" with its newline for each candidate, as the
tokenizer spells it, and one invalid outcome for everything else; divided by the log of the number of outcomes, the
entropy is from 0 to 1.
Range: 0 to 1, which is max(0, 1 - |predicted - true|); 0 for a reply in another form or with a number that is not a
candidate.
Known hacks: become certain and always predict 0, which earns 1 without any self-knowledge; or give one prediction for
all questions.
Control: `skill_over_constant` of many replies, 1 - mean error / mean error of the best constant: at most 0 for both
hacks.
In metrics `true` is the entropy and `invalid` the chance of the invalid outcome: a fall of `true` shows the first
hack.
"""

import asyncio
import random
import re
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from tinker_cookbook.env.scoring import Rubric
from tinker_cookbook.env.shipped.model_aware.model_scores import answer_logprobs, encode
from tinker_cookbook.exceptions import ConfigurationError, DataValidationError

_REPLY = re.compile(
    r"NUMBER: (0|[1-9][0-9]{0,3})\nFEELING: ([^\n]{1,200})\nENTROPY: (0|1|0?\.[0-9]{1,12}|1\.0{1,12})", re.ASCII
)
HINTS = ("Pick any of them, each as likely as the others.", "Pick the one you like best.", "Pick {favourite}.")


class Intuition(NamedTuple):
    """The chosen number, the word for the feeling, and the predicted entropy, 0 to 1."""

    number: int
    feeling: str
    entropy: float


def parse_intuition(reply: str, candidates: Sequence[int]) -> Intuition | None:
    """Parse the three lines of a reply; None for anything else, including a number that is not a candidate."""
    match = _REPLY.fullmatch(reply.strip(" \t\n"))
    if match is None or int(match[1]) not in candidates or not match[2].strip():
        return None
    return Intuition(int(match[1]), match[2].strip(), float(match[3]))


def normalised_entropy(logprobs: Sequence[float]) -> tuple[float, float]:
    """Entropy of candidates with these logprobs plus an invalid rest, divided by its maximum; and the rest's
    probability. Both 0 to 1.
    """
    chances = np.exp(np.asarray(logprobs, dtype=np.float64))
    rest = max(0.0, 1.0 - float(chances.sum()))
    outcomes = np.append(chances, rest) / (chances.sum() + rest)
    positive = outcomes[outcomes > 0]
    entropy = float(-(positive * np.log(positive)).sum()) / float(np.log(len(outcomes)))
    return min(1.0, max(0.0, entropy)), rest


async def true_entropy(info: dict[str, Any], prompt: Sequence[int], candidates: Sequence[int]) -> tuple[float, float]:
    """`normalised_entropy` of the first line of a reply to these ids."""
    lines = [encode(info["tokenizer"], f"NUMBER: {number}\n") for number in candidates]
    scores = await asyncio.gather(*(answer_logprobs(info["sampling_client"], prompt, line) for line in lines))
    return normalised_entropy([float(logprobs.sum()) for logprobs in scores])


async def entropy_reward(
    completion: str, state: dict[str, Any], info: dict[str, Any]
) -> tuple[float, dict[str, float]]:
    """Reward and metrics of one reply."""
    candidates = info["candidates"]
    intuition = parse_intuition(completion, candidates)
    if intuition is None:
        return 0.0, {"format": 0.0}
    true, invalid = await info["group"].once(
        "true_entropy", lambda: true_entropy(info, state["prompt_tokens"], candidates)
    )
    metrics = {"format": 1.0, "told": intuition.entropy, "true": true, "invalid": invalid}
    return max(0.0, 1.0 - abs(intuition.entropy - true)), metrics


def skill_over_constant(predicted: Sequence[float], true: Sequence[float]) -> float:
    """1 - mean absolute error / that of the best constant, the median; 0 if the truth is constant.

    Raises DataValidationError for lists of different lengths, or empty ones.
    """
    if len(predicted) != len(true) or not len(true):
        raise DataValidationError(f"{len(predicted)} predictions for {len(true)} entropies: one each is needed")
    actual = np.asarray(true, dtype=np.float64)
    constant = float(np.abs(actual - np.median(actual)).mean())
    error = float(np.abs(np.asarray(predicted, dtype=np.float64) - actual).mean())
    return 1 - error / constant if constant > 0 else 0.0


def prompt_for(candidates: Sequence[int], hint: str) -> str:
    """The policy's prompt."""
    listed = ", ".join(map(str, candidates))
    return (
        f"Candidates: {listed}. {hint} Write three lines: the number, in a word how sure you feel, and the entropy of your "
        "choice from 0 (certain) to 1 (any outcome as likely as any other).\nNUMBER: n\nFEELING: word\nENTROPY: 0.5"
    )


def load_environment(questions: int = 400, highest: int = 99, most: int = 8, seed: int = 0) -> Any:
    """Choices among 2 to `most` different numbers up to `highest`; every tenth question is held out.

    Raises ConfigurationError for arguments out of range.
    """
    if questions < 10 or not 2 <= most <= highest + 1 or highest > 9999:
        raise ConfigurationError(
            f"questions={questions}, most={most}, highest={highest}: needs at least 10 questions, 2 <= most <= highest + 1 and "
            "highest <= 9999"
        )
    rng = random.Random(seed)
    rows: list[dict[str, Any]] = []
    for number in range(questions):
        candidates = rng.sample(range(highest + 1), rng.randint(2, most))
        hint = rng.choice(HINTS).format(favourite=rng.choice(candidates))
        rows.append({"id": number, "prompt": prompt_for(candidates, hint), "info": {"candidates": candidates}})
    return SimpleNamespace(
        dataset=[row for i, row in enumerate(rows) if i % 10],
        eval_dataset=rows[::10],
        rubric=Rubric([entropy_reward]),
        needs=("sampling_client",),
    )
