"""Judges that are language models: they read the debate and write a verdict, or tell how likely each verdict is."""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tinker_cookbook.clients import SamplingClient
from tinker_cookbook.completers import MessageCompleter, TokenCompleter, TokensWithLogprobs
from tinker_cookbook.debate.prompts import judge_system_prompt, judge_user_prompt
from tinker_cookbook.debate.views import DebateView, JudgeCall, Verdict, Winner
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.renderers import Message, Renderer, get_text_content
from tinker_cookbook.renderers.replies import decode_reply
from tinker_cookbook.utils.lazy import tinker

_VERDICT = re.compile(r"<VERDICT>\s*([A-H]|TIE)\s*</VERDICT>")
_REASONING = re.compile(r"<REASONING>(.*?)</REASONING>", re.DOTALL)
TOO_LONG = "the debate is too long for the judge's context"


class Judge(ABC):
    """Decides a debate. Picklable, unless it asks a client."""

    @abstractmethod
    async def __call__(self, view: DebateView) -> Verdict: ...

    def of_policy(self, policy: TokenCompleter | None, renderer: Renderer) -> Judge:
        """The judge for debates of this policy: itself, unless it is the policy (`LiveJudge`)."""
        return self


@dataclass(frozen=True)
class LMJudge(Judge):
    """Asks a language model. A MessageCompleter takes messages; a TokenCompleter needs the renderer of its model.

    An unreadable reply is asked for again up to `max_retries` times, then INVALID. With a TokenCompleter, a debate whose
    prompt is longer than `max_prompt_tokens` is INVALID too. Without `system_prompt` the protocol's own is used.
    """

    completer: MessageCompleter | TokenCompleter
    renderer: Renderer | None = None
    system_prompt: str | None = None
    max_retries: int = 1
    max_prompt_tokens: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.completer, TokenCompleter) and self.renderer is None:
            raise ConfigurationError("an LMJudge over a TokenCompleter needs the renderer of its model")

    async def __call__(self, view: DebateView) -> Verdict:
        messages = judge_messages(view, self.system_prompt)
        if (
            self.max_prompt_tokens is not None
            and self.renderer is not None
            and self.renderer.build_generation_prompt(messages).length > self.max_prompt_tokens
        ):
            return Verdict(Winner.INVALID, reasoning=TOO_LONG)
        attempt, winner, text, call, usage = 0, None, "", None, Counter[str]()
        while winner is None and attempt <= self.max_retries:
            text, call, spent = await self._ask(messages, (*view.key, attempt))
            winner, attempt = parse_verdict(text, view.options), attempt + 1
            usage.update(spent)
        reasoning = _REASONING.search(text)
        told = reasoning.group(1).strip() if reasoning else ""
        return Verdict(winner or Winner.INVALID, told, text, call, retries=attempt - 1, usage=dict(usage))

    async def _ask(
        self, messages: list[Message], key: tuple[int, ...]
    ) -> tuple[str, JudgeCall | None, Mapping[str, float]]:
        if isinstance(self.completer, MessageCompleter):
            asked = self.completer.fork("judge", *key)
            return get_text_content(await asked(messages)), None, asked.usage()
        assert self.renderer is not None
        prompt = self.renderer.build_generation_prompt(messages)
        completer = self.completer.fork("judge", *key)
        reply: TokensWithLogprobs = await completer(prompt, self.renderer.get_stop_sequences())
        call = JudgeCall(prompt.to_ints(), reply.tokens, reply.maybe_logprobs)
        return decode_reply(self.renderer, reply.tokens), call, {}


@dataclass(frozen=True)
class LiveJudge(Judge):
    """The policy that debates is its own judge, as it is while it trains. Only when asked for: it can learn to please itself."""

    system_prompt: str | None = None
    max_retries: int = 1

    async def __call__(self, view: DebateView) -> Verdict:
        raise ConfigurationError("judge=live is the policy that debates; a debate without a policy has no such judge")

    def of_policy(self, policy: TokenCompleter | None, renderer: Renderer) -> Judge:
        return self if policy is None else LMJudge(policy, renderer, self.system_prompt, self.max_retries)


@dataclass(frozen=True)
class SoftJudge(Judge):
    """Scores the verdicts that the model could write, and samples none: its probabilities of the labels, made to sum to 1.

    That of TIE is divided evenly. The winner is the likeliest label; of equally likely ones none (TIE). One pass per label.
    """

    client: SamplingClient
    renderer: Renderer
    system_prompt: str | None = None
    max_prompt_tokens: int | None = None

    async def __call__(self, view: DebateView) -> Verdict:
        prompt = self.renderer.build_generation_prompt(judge_messages(view, self.system_prompt)).to_ints()
        if self.max_prompt_tokens is not None and len(prompt) > self.max_prompt_tokens:
            return Verdict(Winner.INVALID, reasoning=TOO_LONG)
        labels = [*view.options, Winner.TIE]
        # Submitted at once, so that the engine may put them into one pass.
        pending = [self._logprob(prompt, label) for label in labels]
        logprobs = [await one for one in pending]
        return soft_verdict(logprobs)

    async def _logprob(self, prompt: list[int], label: Winner) -> float:
        said = self.renderer.encode_text(f"<VERDICT>{label}</VERDICT>")
        logprobs = await self.client.compute_logprobs(tinker.ModelInput.from_ints([*prompt, *said]))
        return math.fsum(logprob for logprob in logprobs[-len(said) :] if logprob is not None)


def soft_verdict(logprobs: Sequence[float]) -> Verdict:
    """The verdict of the options' logprobs, that of TIE behind them."""
    highest = max(logprobs)
    weights = [math.exp(logprob - highest) for logprob in logprobs]
    *options, tie = (weight / math.fsum(weights) for weight in weights)
    shares = tuple(option + tie / len(options) for option in options)
    words = " ".join(f"{name}={share:.3f}" for name, share in zip("ABCDEFGH", options, strict=False))
    return replace(from_shares(shares), reasoning=f"{words} TIE={tie:.3f}")


def from_shares(shares: Sequence[float]) -> Verdict:
    """Whoever has the largest share wins; TIE where several have it, up to rounding."""
    best = max(range(len(shares)), key=shares.__getitem__)
    tied = sum(math.isclose(share, shares[best], abs_tol=1e-9) for share in shares) > 1
    return Verdict(Winner.TIE if tied else Winner("ABCDEFGH"[best]), shares=tuple(shares))


def judge_messages(view: DebateView, system_prompt: str | None = None) -> list[Message]:
    """What a language model is shown of a debate."""
    return [
        {"role": "system", "content": system_prompt or judge_system_prompt(view)},
        {"role": "user", "content": judge_user_prompt(view)},
    ]


def parse_verdict(text: str, options: Sequence[Winner] = (Winner.A, Winner.B)) -> Winner | None:
    """The verdict between the tags; None when there is none, several that differ, or one that is no option."""
    found = set(_VERDICT.findall(text))
    winner = Winner(found.pop()) if len(found) == 1 else None
    return winner if winner in (*options, Winner.TIE) else None
