"""Reward functions of a solution text, and specs that mix them: `compression:0.5,rouge:0.3` is their weighted mean.

Each function here takes (solution, question, reference) and returns a number in [0, 1]. Lengths are in characters. A function
of one's own takes (question, reply, answer) and mixes with them: `my_rewards.py:score:2,rouge:0.5`.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from tinker_cookbook.exceptions import ConfigurationError, DataValidationError
from tinker_cookbook.own_failures import naming_what_was_given
from tinker_cookbook.own_parts import Kind, Registry, parameter_problem, takes_keyword
from tinker_cookbook.utils.extras import install_command
from tinker_cookbook.utils.reward_threads import call_reward

if TYPE_CHECKING:
    from nltk.stem.porter import PorterStemmer
    from rouge_score.rouge_scorer import RougeScorer
    from sentence_transformers import SentenceTransformer  # pyright: ignore[reportMissingImports]

RewardFn = Callable[[str, str, str], float]

COMPRESSION_TARGET = 0.1
LENGTH_BOUNDS = (50, 500)
EMBEDDING_MODEL = "sentence-transformers/all-MiniLM-L6-v2"

# A run of letters and digits; a character alone where words are written without spaces.
_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\u0e00-\u0e7f]|[^\W_\u3040-\u30ff\u3400-\u9fff\u0e00-\u0e7f]+")
_SENTENCE_END = re.compile(r"(?<![.!?])[.!?]+(?:\s+|$)")


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
    """ROUGE-L F1 against the reference, with stemming of English words (Lin 2004). Words of any script count."""
    return float(_rouge_scorer().score(reference, solution)["rougeL"].fmeasure)


def tfidf(solution: str, question: str, reference: str) -> float:
    """Cosine of the tf-idf vectors of solution and question, with ln(3 / (1 + df)) + 1 over these two texts."""
    counts = [Counter(_words(text)) for text in (solution, question)]
    if not all(counts):
        return 0.0
    weights = {
        word: math.log(3 / (1 + sum(word in count for count in counts))) + 1 for word in {*counts[0], *counts[1]}
    }
    a, b = ({word: n * weights[word] for word, n in count.items()} for count in counts)
    dot = sum(value * b.get(word, 0.0) for word, value in a.items())
    return min(1.0, dot / math.sqrt(_squares(a) * _squares(b)))


def embedding(solution: str, question: str, reference: str) -> float:
    """Cosine of the sentence embeddings of solution and question (EMBEDDING_MODEL), 0 where it is negative."""
    a, b = _embedding_model().encode([solution, question], normalize_embeddings=True)
    return max(0.0, min(1.0, float(sum(x * y for x, y in zip(a.tolist(), b.tolist(), strict=True)))))


def length_penalty(solution: str, question: str, reference: str) -> float:
    """1 between 50 and 500 characters, falling linearly to 0 at 0 and at 1000."""
    low, high = LENGTH_BOUNDS
    if len(solution) < low:
        return len(solution) / low
    return max(0.0, min(1.0, 1 - (len(solution) - high) / high))


def fluency(solution: str, question: str, reference: str) -> float:
    """A rough shape check: half for 2 to 5 sentences, half for 10 to 40 words per sentence on average."""
    sentences = [part for part in _SENTENCE_END.split(solution) if part.strip()]
    if not sentences:
        return 0.0
    words = len(solution.split()) / len(sentences)
    return 0.5 * (2 <= len(sentences) <= 5) + 0.5 * (10 <= words <= 40)


REWARDS: dict[str, RewardFn] = {
    "exact_match": exact_match,
    "compression": compression,
    "rouge": rouge,
    "tfidf": tfidf,
    "embedding": embedding,
    "length_penalty": length_penalty,
    "fluency": fluency,
}


def _words(text: str) -> list[str]:
    return _WORD.findall(text.casefold())


def _squares(vector: Mapping[str, float]) -> float:
    return sum(value * value for value in vector.values())


class _Words:
    """A tokenizer for ROUGE. Of ASCII text it makes what rouge-score's own makes, which drops all other letters."""

    def __init__(self) -> None:
        from nltk.stem.porter import PorterStemmer

        self._stemmer: PorterStemmer = PorterStemmer()

    def tokenize(self, text: str) -> list[str]:
        return [self._stemmer.stem(word) if len(word) > 3 and word.isascii() else word for word in _words(text)]


@cache
def _rouge_scorer() -> RougeScorer:
    from rouge_score.rouge_scorer import RougeScorer  # imports nltk and numpy

    return RougeScorer(["rougeL"], tokenizer=_Words())


@cache
def _embedding_model() -> SentenceTransformer:
    from sentence_transformers import SentenceTransformer  # pyright: ignore[reportMissingImports]

    return SentenceTransformer(EMBEDDING_MODEL)


def _check_package(name: str) -> None:
    """Raise ConfigurationError, before a run begins, when the reward needs a package that is not installed."""
    if name == "embedding" and find_spec("sentence_transformers") is None:
        raise ConfigurationError(
            f"reward_fn=embedding needs the package sentence-transformers: {install_command('embedding')}"
        )


OwnRewardFn = Callable[..., Any]
"""(question, reply, answer) -> reward or (reward, metrics), or an awaitable of either. `reply` is all of the reply's text,
tags included; `answer` is the reference. One with a parameter `solution` gets besides what the task reads as the reply's answer
(as a rule what stands between the tags), None where there is none."""
_NAMES, _SOLUTION = ("question", "reply", "answer"), "solution"

REWARD_KIND = Kind(
    key="reward_fn",
    wanted="def score(question: str, reply: str, answer: str) -> float, sync or async; it may also return (reward, metrics), and "
    "take solution: str | None besides, what stands between the tags of the reply",
    example='''
def score(question: str, reply: str, answer: str) -> float:
    """1 when the reply names the answer, less 0.001 for each character."""
    named = answer.lower() in reply.lower()
    return float(named) - 0.001 * len(reply)
''',
    problem=partial(parameter_problem, names=_NAMES, keyword=_SOLUTION),
)
_OWN: Registry[OwnRewardFn] = Registry(REWARD_KIND, {})


def register_reward(name: str, function: OwnRewardFn) -> None:
    """Make a reward of one's own known under a name. Raises ConfigurationError for a name that is taken."""
    if name in REWARDS:
        raise ConfigurationError(f"reward_fn: the name {name!r} is taken; choose another")
    _OWN.register(name, function)


@dataclass(frozen=True)
class WeightedReward:
    """A reward function in a mixture: one of the library's, which reads the solution, or the user's own, which reads it all.

    Without either, `label` names one of REWARDS.
    """

    label: str
    weight: float = 1.0
    function: OwnRewardFn | None = None
    of_task: RewardFn | None = None
    """one that only this task has"""


@dataclass(frozen=True)
class RewardSpec:
    """A weighted mean of reward functions."""

    rewards: tuple[WeightedReward, ...]

    @classmethod
    def parse(cls, said: str | OwnRewardFn, of_task: Mapping[str, RewardFn] = MappingProxyType({})) -> RewardSpec:
        """From a function, or from `name:weight,name:weight` (a weight left out is 1).

        A name is one of REWARDS, of `of_task`, a registered one, `package.module:function` or `path/file.py:function`.

        Raises ConfigurationError: an unknown name, a function that takes something else, a bad weight, a name given twice, a
        package that is missing.
        """
        texts = [part.strip() for part in said.split(",")] if isinstance(said, str) else [said]
        rewards = tuple(_weighted(part, of_task) for part in texts)
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
                function = reward.of_task or REWARDS[reward.label]
                value = function(solution, question, reference) if solution else 0.0
            else:
                value, own = await _ask(reward.label, reward.function, (question, reply, reference), solution)
                metrics |= own
            metrics[reward.label] = value
            total += reward.weight * value
        return total / sum(reward.weight for reward in self.rewards), metrics


def _weighted(part: str | OwnRewardFn, of_task: Mapping[str, RewardFn]) -> WeightedReward:
    if not isinstance(part, str):
        return WeightedReward(getattr(part, "__name__", type(part).__name__), function=_OWN.resolve(part))
    name, colon, number = part.rpartition(":")
    weight = _number(number) if colon else None
    if weight is None:
        if name in REWARDS or name in of_task or name in _OWN:
            raise ConfigurationError(f"reward_fn={part!r}: {number!r} is not a weight; write {name}:0.5")
        name, weight = part, 1.0  # a colon in it is that of module:function
    if not 0 < weight < float("inf"):
        raise ConfigurationError(f"reward_fn={part!r}: the weight of {name} must be positive, got {weight}")
    if name in of_task:
        return WeightedReward(name, weight, of_task=of_task[name])
    if name in REWARDS:
        _check_package(name)
        return WeightedReward(name, weight)
    return WeightedReward(name.rpartition(":")[2], weight, _OWN.resolve(name, also=[*of_task, *REWARDS]))


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


async def _ask(
    label: str, function: OwnRewardFn, arguments: tuple[str, str, str], solution: str | None
) -> tuple[float, dict[str, float]]:
    """Value and metrics `<label>/<key>` of a function of one's own.

    Raises RewardError where it fails, DataValidationError for anything but numbers.
    """
    given: dict[str, Any] = dict(zip(_NAMES, arguments, strict=True))
    call = function
    if takes_keyword(function, _NAMES, _SOLUTION):
        given[_SOLUTION], call = solution, partial(function, **{_SOLUTION: solution})
    with naming_what_was_given(f"reward_fn {label}", function, given):
        returned = await call_reward(call, *arguments)
    value, metrics = returned if isinstance(returned, tuple) else (returned, {})
    found = {label: value} | {f"{label}/{key}": number for key, number in dict(metrics).items()}
    for key, number in found.items():
        if not isinstance(number, int | float) or not math.isfinite(number):
            raise DataValidationError(f"reward_fn {key}={number!r}: a reward and its metrics must be finite numbers")
    return float(found.pop(label)), {key: float(number) for key, number in found.items()}
