"""Reward functions for a solution text, and specs that mix them: `compression:0.5,rouge:0.3` is their weighted mean.

Each function here takes (solution, question, reference) and returns a number in [0, 1]. Lengths are in characters. A
custom function takes (question, reply, answer) and can be mixed with them: `my_rewards.py:score:2,rouge:0.5`.
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

from tinker_cookbook.env.rewards import Call, Weighted, parse_weighted, read_value, weighted_mean
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.plugins import Kind, Registry, parameter_problem, takes_keyword
from tinker_cookbook.utils.extras import install_command

if TYPE_CHECKING:
    from nltk.stem.porter import PorterStemmer
    from rouge_score.rouge_scorer import RougeScorer
    from sentence_transformers import SentenceTransformer  # pyright: ignore[reportMissingModuleSource]

RewardFn = Callable[[str, str, str], float]

COMPRESSION_TARGET = 0.1
LENGTH_BOUNDS = (50, 500)
EMBEDDING_MODEL = "sentence-transformers/all-MiniLM-L6-v2"

# A run of letters and digits; a single character in scripts without spaces between words.
_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\u0e00-\u0e7f]|[^\W_\u3040-\u30ff\u3400-\u9fff\u0e00-\u0e7f]+")
_SENTENCE_END = re.compile(r"(?<![.!?])[.!?]+(?:\s+|$)")


def exact_match(solution: str, question: str, reference: str) -> float:
    """1 when the solution equals the reference, ignoring case and surrounding space."""
    return float(solution.strip().casefold() == reference.strip().casefold())


def compression(solution: str, question: str, reference: str) -> float:
    """Best at a tenth of the question's length: r / 0.1 below, 0.1 / r above, 0 when empty."""
    ratio = len(solution) / max(1, len(question))
    if ratio <= COMPRESSION_TARGET:
        return ratio / COMPRESSION_TARGET
    return COMPRESSION_TARGET / ratio


def rouge(solution: str, question: str, reference: str) -> float:
    """ROUGE-L F1 against the reference, with stemming of English words (Lin 2004). Works for words of any script."""
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
    """Cosine of the sentence embeddings of solution and question (EMBEDDING_MODEL), 0 if negative."""
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
    """A tokenizer for ROUGE. For ASCII text it equals that of rouge-score, which drops all other letters."""

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
    from sentence_transformers import SentenceTransformer  # pyright: ignore[reportMissingModuleSource]

    return SentenceTransformer(EMBEDDING_MODEL)


def _check_package(name: str) -> None:
    """Raise ConfigurationError, before a run begins, when the reward needs a package that is not installed."""
    if name == "embedding" and find_spec("sentence_transformers") is None:
        raise ConfigurationError(
            f"reward_fn=embedding needs the package sentence-transformers: {install_command('embedding')}"
        )


OwnRewardFn = Callable[..., Any]
"""(question, reply, answer) -> reward or (reward, metrics), or an awaitable of either. `reply` is all of the reply's text,
tags included; `answer` is the reference. A function with a parameter `solution` also gets the
answer that the task reads from the reply (usually the text between the tags), or None."""
_NAMES, _SOLUTION = ("question", "reply", "answer"), "solution"

REWARD_KIND = Kind(
    key="reward_fn",
    wanted="def score(question: str, reply: str, answer: str) -> float, sync or async; it may also return (reward, metrics), and "
    "also take solution: str | None, the text between the tags of the reply",
    example='''
def score(question: str, reply: str, answer: str) -> float:
    """1 when the reply names the answer, less 0.001 for each character."""
    named = answer.lower() in reply.lower()
    return float(named) - 0.001 * len(reply)
''',
    problem=partial(parameter_problem, names=_NAMES, keyword=_SOLUTION),
)


@dataclass(frozen=True)
class OfSolution:
    """A reward of the library or of a task. It reads the solution; without a solution it is 0."""

    function: RewardFn

    async def __call__(self, question: str, reply: str, answer: str, *, solution: str | None) -> float:
        return self.function(solution, question, answer) if solution else 0.0


_REGISTRY: Registry[OwnRewardFn] = Registry(
    REWARD_KIND, {name: OfSolution(function) for name, function in REWARDS.items()}
)


def register_reward(name: str, function: OwnRewardFn) -> None:
    """Register a custom reward under a name. Raises ConfigurationError for a name that is taken."""
    _REGISTRY.register(name, function)


@dataclass(frozen=True)
class RewardSpec:
    """A weighted mean of reward functions: OfSolution, or custom ones, which read the whole reply."""

    rewards: tuple[Weighted[OwnRewardFn], ...]

    @classmethod
    def parse(cls, spec: str | OwnRewardFn, of_task: Mapping[str, RewardFn] = MappingProxyType({})) -> RewardSpec:
        """Parse a function, or `name:weight,name:weight` (the default weight is 1).

        A name is one of REWARDS, of `of_task`, a registered one, `package.module:function` or `path/file.py:function`.

        Raises ConfigurationError: an unknown name, a function with other parameters, a bad weight, a duplicate name, a
        missing package.
        """
        if not isinstance(spec, str):
            return cls((Weighted(getattr(spec, "__name__", type(spec).__name__), 1.0, _REGISTRY.resolve(spec)),))
        rewards = parse_weighted(spec, _REGISTRY, {name: OfSolution(function) for name, function in of_task.items()})
        for reward in rewards:  # a task's or user's function may have the name of a shipped one
            if isinstance(reward.function, OfSolution) and reward.function.function is REWARDS.get(reward.name):
                _check_package(reward.name)
        return cls(rewards)

    async def __call__(
        self, solution: str | None, question: str, reference: str, reply: str
    ) -> tuple[float, dict[str, float]]:
        """The mixed reward, and each function's value with the metrics that it returned.

        Args:
            solution: the answer in the reply; without one the functions of REWARDS give 0.
            reply: the whole text of the reply, for custom functions.

        Raises RewardError for a function that fails, DataValidationError for a result other than finite numbers.
        """
        values: list[tuple[float, float]] = []
        metrics: dict[str, float] = {}
        given = dict(zip((*_NAMES, _SOLUTION), (question, reply, reference, solution), strict=True))
        for reward in self.rewards:
            what, by_name = f"reward_fn {reward.name}", takes_keyword(reward.function, _NAMES, _SOLUTION)
            call = Call(reward.function, _NAMES, (_SOLUTION,) if by_name else ())
            value, extra = read_value(what, reward.name, await call(what, given))
            values.append((reward.weight, value))
            metrics |= extra
        return weighted_mean(values), metrics
