"""Judges: who won a debate. A, B and TIE are verdicts; INVALID means that none could be had. Nobody is favoured on a tie."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from tinker_cookbook.completers import MessageCompleter, TokenCompleter, TokensWithLogprobs
from tinker_cookbook.debate.prompts import JUDGE_SYSTEM, judge_user_prompt
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.renderers import Message, Renderer, get_text_content
from tinker_cookbook.renderers.replies import decode_reply
from tinker_cookbook.utils.seeds import derive_seed

_VERDICT = re.compile(r"<VERDICT>\s*(A|B|TIE)\s*</VERDICT>")
_REASONING = re.compile(r"<REASONING>(.*?)</REASONING>", re.DOTALL)


class Winner(StrEnum):
    A = "A"
    B = "B"
    TIE = "TIE"
    INVALID = "INVALID"


@dataclass(frozen=True)
class JudgeCall:
    """What was asked of a token-level judge and what it sampled, for the record."""

    prompt_tokens: list[int]
    completion_tokens: list[int]
    completion_logprobs: list[float] | None


@dataclass(frozen=True)
class Verdict:
    winner: Winner
    reasoning: str = ""
    raw_response: str = ""
    call: JudgeCall | None = None
    retries: int = 0


@dataclass(frozen=True)
class DebateView:
    """All that a judge may look at. `reward_*` is the task's reward, for judges that know the truth (baselines, tests)."""

    context: str
    rounds_a: list[str]
    rounds_b: list[str]
    confidence_a: float | None
    confidence_b: float | None
    reward_a: float
    reward_b: float
    key: tuple[int, ...]


class Judge(ABC):
    @abstractmethod
    async def __call__(self, view: DebateView) -> Verdict: ...


@dataclass(frozen=True)
class ScriptedJudge(Judge):
    """Decides by a function of the view. SCRIPTS holds the named ones. Pickles when the function does."""

    decide: Callable[[DebateView], Winner]

    async def __call__(self, view: DebateView) -> Verdict:
        return Verdict(self.decide(view), reasoning="scripted")


@dataclass(frozen=True)
class MockJudge(Judge):
    """A coin toss that depends on the seed and on which debate it is, not on who asks first."""

    seed: int

    async def __call__(self, view: DebateView) -> Verdict:
        toss = derive_seed(self.seed, "mock judge", *view.key) & 1
        return Verdict(Winner.B if toss else Winner.A, reasoning="coin toss")


@dataclass(frozen=True)
class ConfidenceJudge(Judge):
    """The seat that stated more confidence wins; equal ones tie; INVALID when one cannot be read."""

    async def __call__(self, view: DebateView) -> Verdict:
        a, b = view.confidence_a, view.confidence_b
        if a is None or b is None:
            return Verdict(Winner.INVALID, reasoning="no readable confidence")
        return Verdict(_compare(a, b), reasoning=f"confidence {a:g} against {b:g}")


class LMJudge(Judge):
    """Asks a language model. A MessageCompleter takes messages; a TokenCompleter needs the renderer of its model.

    An unreadable reply is asked for again up to `max_retries` times, then INVALID. With a TokenCompleter, a debate whose
    prompt is longer than `max_prompt_tokens` is INVALID too.
    """

    def __init__(
        self,
        completer: MessageCompleter | TokenCompleter,
        renderer: Renderer | None = None,
        system_prompt: str = JUDGE_SYSTEM,
        max_retries: int = 1,
        max_prompt_tokens: int | None = None,
    ):
        if isinstance(completer, TokenCompleter) and renderer is None:
            raise ConfigurationError("an LMJudge over a TokenCompleter needs the renderer of its model")
        self._completer = completer
        self._renderer = renderer
        self._system_prompt = system_prompt
        self._max_retries = max_retries
        self._max_prompt_tokens = max_prompt_tokens

    async def __call__(self, view: DebateView) -> Verdict:
        messages: list[Message] = [
            {"role": "system", "content": self._system_prompt},
            {"role": "user", "content": judge_user_prompt(view.context, view.rounds_a, view.rounds_b)},
        ]
        if not self._fits(messages):
            return Verdict(Winner.INVALID, reasoning="the debate is too long for the judge's context")
        for attempt in range(self._max_retries + 1):
            text, call = await self._ask(messages, (*view.key, attempt))
            winner = parse_verdict(text)
            if winner is not None or attempt == self._max_retries:
                reasoning = _REASONING.search(text)
                return Verdict(
                    winner or Winner.INVALID, reasoning.group(1).strip() if reasoning else "", text, call, attempt
                )
        raise AssertionError("unreachable: the last attempt returns")

    def _fits(self, messages: list[Message]) -> bool:
        if self._max_prompt_tokens is None or self._renderer is None:
            return True
        return self._renderer.build_generation_prompt(messages).length <= self._max_prompt_tokens

    async def _ask(self, messages: list[Message], key: tuple[int, ...]) -> tuple[str, JudgeCall | None]:
        if isinstance(self._completer, MessageCompleter):
            return get_text_content(await self._completer(messages)), None
        assert self._renderer is not None
        prompt = self._renderer.build_generation_prompt(messages)
        completer = self._completer.fork("judge", *key)
        reply: TokensWithLogprobs = await completer(prompt, self._renderer.get_stop_sequences())
        call = JudgeCall(prompt.to_ints(), reply.tokens, reply.maybe_logprobs)
        return decode_reply(self._renderer, reply.tokens), call


def parse_verdict(text: str) -> Winner | None:
    """The verdict between the tags; None when there is none or several that differ."""
    found = set(_VERDICT.findall(text))
    return Winner(found.pop()) if len(found) == 1 else None


def _compare(a: float, b: float) -> Winner:
    return Winner.TIE if a == b else Winner.A if a > b else Winner.B


def _always_a(view: DebateView) -> Winner:
    return Winner.A


def _always_b(view: DebateView) -> Winner:
    return Winner.B


def _always_tie(view: DebateView) -> Winner:
    return Winner.TIE


def _higher_reward(view: DebateView) -> Winner:
    return _compare(view.reward_a, view.reward_b)


def _said_more(view: DebateView) -> Winner:
    return _compare(len(" ".join(view.rounds_a)), len(" ".join(view.rounds_b)))


SCRIPTS: dict[str, Callable[[DebateView], Winner]] = {
    "A": _always_a,
    "B": _always_b,
    "TIE": _always_tie,
    "truth": _higher_reward,
    "longer": _said_more,
}
"""Scripted judges by name: always one side, the higher task reward (an oracle), or whoever said more."""
