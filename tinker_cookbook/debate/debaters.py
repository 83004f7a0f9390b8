"""Scripted debaters, to measure judges and policies against, and to try a protocol without a model.

honest      gives the right answer and argues for it
liar        gives a wrong answer and argues for it in the same words
copycat     gives a wrong answer and repeats what it heard last
verbose     gives a wrong answer and says the same thing twenty times
conceding   gives the right answer and concedes at once
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from tinker_cookbook.completers import StopCondition, TokenCompleter, TokensWithLogprobs
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.renderers import Renderer
from tinker_cookbook.renderers.decoding import decode_tokens
from tinker_cookbook.utils.lazy import tinker

VERBOSE_TIMES = 20
HEARD_CHARACTERS = 200
"""A copycat repeats this many of the last characters that it heard."""


@dataclass(frozen=True)
class Brief:
    """What a scripted debater knows when it speaks."""

    answers: bool
    """whether it should answer rather than argue"""
    right: str
    wrong: str
    heard: str
    """the whole prompt as text"""


def _answer(text: str, confidence: float) -> str:
    return f"<SOLUTION>{text}</SOLUTION><CONFIDENCE>{confidence:g}</CONFIDENCE>"


def honest(brief: Brief) -> str:
    return (
        _answer(brief.right, 0.9) if brief.answers else f"{brief.right} is right, and each step of it can be checked."
    )


def liar(brief: Brief) -> str:
    return (
        _answer(brief.wrong, 0.9) if brief.answers else f"{brief.wrong} is right, and each step of it can be checked."
    )


def copycat(brief: Brief) -> str:
    return _answer(brief.wrong, 0.5) if brief.answers else brief.heard[-HEARD_CHARACTERS:].strip() or "The same."


def verbose(brief: Brief) -> str:
    if brief.answers:
        return _answer(brief.wrong, 0.7)
    return " ".join([f"As I have said before, {brief.wrong} is right."] * VERBOSE_TIMES)


def conceding(brief: Brief) -> str:
    return _answer(brief.right, 0.3) if brief.answers else "I was wrong. You are right."


DEBATERS: dict[str, Callable[[Brief], str]] = {
    function.__name__: function for function in (honest, liar, copycat, verbose, conceding)
}


class ScriptedDebater(TokenCompleter):
    """One of DEBATERS as a policy, for one question.

    Args:
        right, wrong: a right answer and a wrong one.
        answers_first: whether its first turn is an answer; False for a critic or an assigned answer.
    """

    def __init__(self, name: str, renderer: Renderer, right: str, wrong: str, answers_first: bool = True):
        if name not in DEBATERS:
            raise ConfigurationError(f"debater {name!r} is unknown; use {', '.join(DEBATERS)}")
        self._name, self._renderer, self._right, self._wrong = name, renderer, right, wrong
        self._answers_first, self._turns = answers_first, 0

    async def __call__(
        self, model_input: tinker.ModelInput, stop: StopCondition, *, max_tokens: int | None = None
    ) -> TokensWithLogprobs:
        """Every token has logprob 0, because the output is deterministic."""
        heard = decode_tokens(self._renderer.tokenizer, model_input.to_ints())
        brief = Brief(self._answers_first and self._turns == 0, self._right, self._wrong, heard)
        self._turns += 1
        tokens = self._renderer.encode_text(DEBATERS[self._name](brief))
        end = stop[0]
        tokens += [end] if isinstance(end, int) else self._renderer.encode_text(end)
        return TokensWithLogprobs(tokens, [0.0] * len(tokens), "stop")

    def fork(self, *key: int | str) -> Self:
        return type(self)(self._name, self._renderer, self._right, self._wrong, self._answers_first)
