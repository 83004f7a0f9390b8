"""Gradient prophet: predict how a lesson in the prompt will change the policy's answers.

`in_context` measures whether the policy knows by how much a lesson changes the logprob of a probe's answer, summed
over its tokens, in nats. The reply is the number in brackets, [1.5] or [-0.25]; the reward is 1 / (1 + (true -
predicted)^2), 0 to 1.
`surprise` measures whether it knows which probes the lesson changes most. The reply is a JSON array of all probe
numbers, the most changed first; the reward is Spearman's correlation with the ranks by KL(after || before) of the next
token, -1 to 1.
A reply in another form gets 0 and -1. Both prompts of a pair are scored by the snapshot that replied, over the same
tokens.
Known hacks: always give the most common number, or the most common order, whatever the lesson; and, because the policy
itself is measured, become a policy that no lesson changes any more, for which 0 is always right.
Control: `over_constant`, the reward minus that of always saying 0 (in_context) or of the order shown (surprise; it is
drawn at random for each lesson, so it scores 0 on average). `true` next to it exposes a policy that no longer changes.
"""

import asyncio
import json
import math
import random
import re
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from tinker_cookbook.env.scoring import Rubric
from tinker_cookbook.env.shipped.model_aware.lessons import (
    Lesson,
    Probe,
    further_lessons,
    probe_prompt,
    shipped_lessons,
)
from tinker_cookbook.env.shipped.model_aware.model_scores import answer_logprobs, encode, next_tokens
from tinker_cookbook.exceptions import ConfigurationError, DataValidationError

MODES = ("in_context", "surprise")
HELD_OUT = 8
"""One shipped lesson in this many is for evaluation, and so are all additional ones."""
_DELTA = re.compile(r"\[[ ]*([+-]?[0-9]{1,6}(?:\.[0-9]{1,12})?)[ ]*\]")
_RANKING = re.compile(r"\[[ ]*[0-9]{1,3}(?:[ ]*,[ ]*[0-9]{1,3})*[ ]*\]")
MALFORMED = {"in_context": 0.0, "surprise": -1.0}


def parse_delta(reply: str) -> float | None:
    """Parse a reply that is a signed number in brackets; None for anything else."""
    match = _DELTA.fullmatch(reply.strip(" \t\n"))
    return float(match[1]) if match else None


def parse_ranking(reply: str, count: int) -> list[int] | None:
    """Parse an order of the numbers from 1; None unless it has each of 1 .. `count` once and nothing else."""
    text = reply.strip(" \t\n")
    if not _RANKING.fullmatch(text):
        return None
    order = [int(number) for number in re.findall("[0-9]+", text)]
    return order if sorted(order) == list(range(1, count + 1)) else None


def ranks(values: Sequence[float]) -> npt.NDArray[np.float64]:
    """1 for the smallest; equal values share the mean of their ranks. float64 (N,)."""
    array = np.asarray(values, dtype=np.float64)
    below = (array[None, :] < array[:, None]).sum(axis=1)
    equal = (array[None, :] == array[:, None]).sum(axis=1)
    return below + (equal + 1) / 2


def spearman(one: Sequence[float], other: Sequence[float]) -> float:
    """Rank correlation, -1 to 1; 0 if either is constant. Raises DataValidationError unless both have the same length
    of at least 2.
    """
    if len(one) != len(other) or len(one) < 2:
        raise DataValidationError(
            f"{len(one)} and {len(other)} values: ranks need the same number of both, and at least two"
        )
    first, second = (ranking - ranking.mean() for ranking in (ranks(one), ranks(other)))
    scale = math.sqrt(float((first**2).sum() * (second**2).sum()))
    return float((first * second).sum()) / scale if scale > 0 else 0.0


def closeness(predicted: float, true: float) -> float:
    """The reward of in_context, 0 to 1."""
    return 1 / (1 + (true - predicted) ** 2)


def order_score(order: Sequence[int], changes: Sequence[float]) -> float:
    """The reward of surprise: an order, most changed first, compared with the changes of probes 1 .. N."""
    place = {number: position for position, number in enumerate(order)}
    return spearman([-place[number] for number in range(1, len(changes) + 1)], changes)


async def true_delta(info: dict[str, Any], lesson: Lesson, probe: Probe) -> float:
    """The increase of the summed logprob of the probe's answer after the lesson, in nats."""
    tokenizer = info["tokenizer"]
    answer = encode(tokenizer, f" {probe.answer}")
    before, after = await asyncio.gather(
        *(
            answer_logprobs(info["sampling_client"], encode(tokenizer, probe_prompt(probe, taught)), answer)
            for taught in (None, lesson)
        )
    )
    return float(after.sum() - before.sum())


async def true_changes(info: dict[str, Any], lesson: Lesson, probes: Sequence[Probe]) -> list[float]:
    """KL(after || before) of the next token of each probe, in nats."""
    tokenizer = info["tokenizer"]
    pairs = [[encode(tokenizer, probe_prompt(probe, taught)) for taught in (None, lesson)] for probe in probes]
    divergences = await asyncio.gather(
        *(next_tokens(info["sampling_client"], before, after, info["top_k"]) for before, after in pairs)
    )
    return [pair.kl for pair in divergences]


async def delta_reward(completion: str, info: dict[str, Any]) -> tuple[float, dict[str, float]]:
    """Reward and control of one reply, in_context."""
    predicted = parse_delta(completion)
    if predicted is None:
        return MALFORMED["in_context"], {"format": 0.0}
    true = await info["group"].once("true_delta", lambda: true_delta(info, info["lesson"], info["probes"][0]))
    reward = closeness(predicted, true)
    return reward, {
        "format": 1.0,
        "told": predicted,
        "true": true,
        "sign": float((predicted > 0) == (true > 0)),
        "over_constant": reward - closeness(0.0, true),
    }


async def ranking_reward(completion: str, info: dict[str, Any]) -> tuple[float, dict[str, float]]:
    """Reward and control of one reply, surprise."""
    probes = info["probes"]
    order = parse_ranking(completion, len(probes))
    if order is None:
        return MALFORMED["surprise"], {"format": 0.0}
    changes: list[float] = await info["group"].once("true_changes", lambda: true_changes(info, info["lesson"], probes))
    reward, shown = order_score(order, changes), order_score(range(1, len(probes) + 1), changes)
    return reward, {"format": 1.0, "true": float(np.mean(changes)), "over_constant": reward - shown}


def prompt_for(mode: str, lesson: Lesson, probes: Sequence[Probe]) -> str:
    """The policy's prompt."""
    taught = f"Lesson: {lesson.question}\nLesson Answer: {lesson.answer}\n\n"
    if mode == "in_context":
        (probe,) = probes
        return (
            f"{taught}Probe: {probe.question}\nTarget: {probe.answer}\n\nBy how much does reading the lesson first change your "
            "log-probability of the target, in nats? Write only the number in brackets, such as [1.5] or [-0.5]."
        )
    listed = "\n".join(f"{number}. {probe.question}" for number, probe in enumerate(probes, 1))
    return (
        f"{taught}{listed}\n\nThe answer to which probe does reading the lesson first change most? Write only the order as a "
        f"JSON array, the most changed first, such as {json.dumps(list(range(len(probes), 0, -1)))}."
    )


def load_environment(mode: str = "in_context", top_k: int = 100, seed: int = 0) -> Any:
    """A row per probe (`in_context`) or per lesson with its probes in random order (`surprise`); 32 lessons are held
    out.

    Args:
        top_k: tokens of each distribution that `surprise` compares; all others count as one.

    Raises ConfigurationError for another mode or top_k.
    """
    if mode not in MODES:
        raise ConfigurationError(f"mode={mode!r}: give one of {', '.join(MODES)}")
    if top_k < 1:
        raise ConfigurationError(f"top_k={top_k}: must be at least 1")
    rng, shipped = random.Random(seed), shipped_lessons()
    split: tuple[list[dict[str, Any]], list[dict[str, Any]]] = ([], [])
    for number, lesson in enumerate([*shipped, *further_lessons()]):
        held_out = number % HELD_OUT == 0 or number >= len(shipped)
        drawn = rng.sample(lesson.probes, len(lesson.probes))
        questions = [[probe] for probe in drawn] if mode == "in_context" else [drawn]
        for i, probes in enumerate(questions):
            info = {"lesson": lesson, "probes": probes, "top_k": top_k}
            row = {"id": f"{number}.{i}", "prompt": prompt_for(mode, lesson, probes), "info": info}
            split[held_out].append(row)
    reward = delta_reward if mode == "in_context" else ranking_reward
    return SimpleNamespace(dataset=split[0], eval_dataset=split[1], rubric=Rubric([reward]), needs=("sampling_client",))
