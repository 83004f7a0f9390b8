"""Language-model judges: they read the debate and write a verdict, or return the probability of each verdict."""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from tinker_cookbook import local_sampling
from tinker_cookbook.clients import SamplingClient
from tinker_cookbook.completers import MessageCompleter, TinkerTokenCompleter, TokenCompleter, TokensWithLogprobs
from tinker_cookbook.debate.prompts import judge_system_prompt, judge_user_prompt
from tinker_cookbook.debate.views import DebateView, JudgeCall, Verdict, Winner
from tinker_cookbook.endpoints import EndpointCompleter, LikelyToken
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.renderers import Message, Renderer, get_text_content
from tinker_cookbook.renderers.replies import decode_reply
from tinker_cookbook.utils.lazy import np, tinker

_VERDICT = re.compile(r"<VERDICT>\s*([A-H]|TIE|RIGHT|WRONG)\s*</VERDICT>")
_VERDICT_BEGINS = re.compile(r"<VERDICT>\s*")
TOP_LOGPROBS = 20
"""Likeliest tokens whose logprobs are requested from an endpoint; most allow no more."""
_REASONING = re.compile(r"<REASONING>(.*?)</REASONING>", re.DOTALL)
TOO_LONG = "the debate is too long for the judge's context"


class Judge(ABC):
    """Decides a debate. Picklable, unless it uses a client."""

    @abstractmethod
    async def __call__(self, view: DebateView) -> Verdict: ...

    def of_policy(self, policy: TokenCompleter | None, renderer: Renderer) -> Judge:
        """The judge for debates of this policy: itself, unless it uses the policy (`LiveJudge`)."""
        return self


@dataclass(frozen=True)
class LMJudge(Judge):
    """Asks a language model. A MessageCompleter takes messages; a TokenCompleter needs the renderer of its model.

    An unparsable reply is retried up to `max_retries` times, then the verdict is INVALID. With a TokenCompleter, a
    debate with a prompt longer than `max_prompt_tokens` is INVALID too. The default `system_prompt` is the protocol's.
    `constrained` restricts the reply of a TinkerTokenCompleter to one of the protocol's verdicts.
    """

    completer: MessageCompleter | TokenCompleter
    renderer: Renderer | None = None
    system_prompt: str | None = None
    max_retries: int = 1
    max_prompt_tokens: int | None = None
    constrained: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.completer, TokenCompleter) and self.renderer is None:
            raise ConfigurationError("an LMJudge over a TokenCompleter needs the renderer of its model")
        if self.constrained and not isinstance(self.completer, TinkerTokenCompleter):
            raise ConfigurationError(
                f"constrained=True: {type(self.completer).__name__} takes no constraint; leave it out"
            )

    async def __call__(self, view: DebateView) -> Verdict:
        messages = judge_messages(view, self.system_prompt)
        if self.is_too_long(messages):
            return Verdict(Winner.INVALID, reasoning=TOO_LONG)
        attempt, winner, text, call, usage = 0, None, "", None, Counter[str]()
        while winner is None and attempt <= self.max_retries:
            text, call, spent = await self.ask(messages, (*view.key, attempt), view.labels)
            winner, attempt = parse_verdict(text, view.labels), attempt + 1
            usage.update(spent)
        reasoning = _REASONING.search(text)
        explanation = reasoning.group(1).strip() if reasoning else ""
        return Verdict(winner or Winner.INVALID, explanation, text, call, retries=attempt - 1, usage=dict(usage))

    def is_too_long(self, messages: list[Message]) -> bool:
        """Whether the prompt of these messages is longer than `max_prompt_tokens`."""
        if self.max_prompt_tokens is None or self.renderer is None:
            return False
        return self.renderer.build_generation_prompt(messages).length > self.max_prompt_tokens

    async def ask(
        self, messages: list[Message], key: tuple[int, ...], labels: Iterable[str]
    ) -> tuple[str, JudgeCall | None, Mapping[str, float]]:
        """One reply, its prompt and sample if the completer works on tokens, and the usage."""
        if isinstance(self.completer, MessageCompleter):
            forked = self.completer.fork("judge", *key)
            return get_text_content(await forked(messages)), None, forked.usage()
        assert self.renderer is not None
        prompt = self.renderer.build_generation_prompt(messages)
        completer = self.completer.fork("judge", *key)
        if self.constrained and isinstance(completer, TinkerTokenCompleter):
            verdicts = [f"<VERDICT>{label}</VERDICT>" for label in labels]
            constraint = local_sampling.constraint(completer.sampling_client, choices=verdicts)
            completer = replace(completer, constraint=constraint)
        reply: TokensWithLogprobs = await completer(prompt, self.renderer.get_stop_sequences())
        call = JudgeCall(prompt.to_ints(), reply.tokens, reply.maybe_logprobs)
        return decode_reply(self.renderer, reply.tokens), call, {}


@dataclass(frozen=True)
class LiveJudge(Judge):
    """The debating policy judges itself, with its current weights. Opt-in: the policy can learn to please itself."""

    system_prompt: str | None = None
    max_retries: int = 1
    soft: bool = False

    async def __call__(self, view: DebateView) -> Verdict:
        raise ConfigurationError("judge=live is the policy that debates; a debate without a policy has no such judge")

    def of_policy(self, policy: TokenCompleter | None, renderer: Renderer) -> Judge:
        if policy is None:
            return self
        if not self.soft:
            return LMJudge(policy, renderer, self.system_prompt, self.max_retries)
        if not isinstance(policy, TinkerTokenCompleter):
            raise ConfigurationError(
                f"judge.soft=true with judge=live: {type(policy).__name__} does not score given tokens; use judge.soft=false"
            )
        limit = None if policy.context_window is None else policy.context_window - policy.max_tokens
        return SoftJudge(policy.sampling_client, renderer, self.system_prompt, limit)


@dataclass(frozen=True)
class SoftJudge(Judge):
    """Scores the possible verdicts and samples none: the model's probabilities of the labels, normalised to sum to 1.

    The probability of TIE is divided evenly. The likeliest label wins; equally likely ones are a TIE. One pass per
    label.
    """

    client: SamplingClient
    renderer: Renderer
    system_prompt: str | None = None
    max_prompt_tokens: int | None = None

    async def __call__(self, view: DebateView) -> Verdict:
        prompt = self.renderer.build_generation_prompt(judge_messages(view, self.system_prompt)).to_ints()
        if self.max_prompt_tokens is not None and len(prompt) > self.max_prompt_tokens:
            return Verdict(Winner.INVALID, reasoning=TOO_LONG)
        # Submitted together, so that the engine may batch them.
        pending = [self._logprob(prompt, label) for label in view.labels]
        logprobs = [await one for one in pending]
        return soft_verdict(logprobs, view.num_options)

    async def _logprob(self, prompt: list[int], label: str) -> float:
        verdict_ids = self.renderer.encode_text(f"<VERDICT>{label}</VERDICT>")
        logprobs = await self.client.compute_logprobs(tinker.ModelInput.from_ints([*prompt, *verdict_ids]))
        return math.fsum(logprob for logprob in logprobs[-len(verdict_ids) :] if logprob is not None)


@dataclass(frozen=True)
class SoftEndpointJudge(Judge):
    """Reads the probabilities of the verdicts from an endpoint's reply: those of the labels at the position where it
    wrote one, normalised to sum to 1. A label that is not among the likeliest tokens there has probability 0.

    The endpoint is asked once, greedily: otherwise some endpoints do not return the model's own probabilities. A reply
    without a verdict is INVALID.
    """

    completer: EndpointCompleter
    system_prompt: str | None = None

    async def __call__(self, view: DebateView) -> Verdict:
        completer = self.completer.fork("judge", *view.key)
        reply, tokens = await completer.with_logprobs(judge_messages(view, self.system_prompt), TOP_LOGPROBS)
        text, usage = get_text_content(reply), completer.usage()
        logprobs = label_logprobs(tokens, list(view.labels))
        if logprobs is None:
            return Verdict(Winner.INVALID, raw_response=text, usage=usage)
        return replace(soft_verdict(logprobs, view.num_options), raw_response=text, usage=usage)


def label_logprobs(tokens: Sequence[LikelyToken], labels: Sequence[str]) -> list[float] | None:
    """The logprob of each label after the reply's only <VERDICT>, -inf if not among the likeliest; None if none of
    them is.
    """
    text = "".join(token.text for token in tokens)
    matches = list(_VERDICT_BEGINS.finditer(text))
    if len(matches) != 1 or matches[0].end() == len(text):
        return None
    ends = list(accumulate(len(token.text) for token in tokens))
    index = bisect_right(ends, matches[0].end())
    token = tokens[index]
    before = token.text[: matches[0].end() - (ends[index] - len(token.text))].strip()
    logprobs = [-math.inf] * len(labels)
    for other, logprob in token.logprobs.items():
        token_text = other.strip()
        rest = token_text.removeprefix(before).lstrip() if token_text.startswith(before) else ""
        for i, label in enumerate(labels):
            # A token may be part of a label, or end after it; no label is a prefix of another.
            if rest and (label.startswith(rest) or re.match(rf"{label}(?![A-Za-z])", rest)):
                logprobs[i] = float(np.logaddexp(logprobs[i], logprob))
    return None if max(logprobs) == -math.inf else logprobs


def soft_verdict(logprobs: Sequence[float], num_options: int = 2) -> Verdict:
    """The verdict for the options' logprobs, followed by that of TIE if it is allowed."""
    highest = max(logprobs)
    weights = [math.exp(logprob - highest) for logprob in logprobs]
    shares = [weight / math.fsum(weights) for weight in weights]
    options, tie = shares[:num_options], math.fsum(shares[num_options:])
    shares = tuple(option + tie / len(options) for option in options)
    words = " ".join(f"{name}={share:.3f}" for name, share in zip("ABCDEFGH", options, strict=False))
    return replace(from_shares(shares), reasoning=f"{words} TIE={tie:.3f}")


def from_shares(shares: Sequence[float]) -> Verdict:
    """The seat with the largest share wins; TIE if several have it, up to rounding."""
    best = max(range(len(shares)), key=shares.__getitem__)
    tied = sum(math.isclose(share, shares[best], abs_tol=1e-9) for share in shares) > 1
    return Verdict(Winner.TIE if tied else Winner("ABCDEFGH"[best]), shares=tuple(shares))


def judge_messages(view: DebateView, system_prompt: str | None = None) -> list[Message]:
    """The prompt of a language model that judges a debate."""
    return [
        {"role": "system", "content": system_prompt or judge_system_prompt(view)},
        {"role": "user", "content": judge_user_prompt(view)},
    ]


def parse_verdict(text: str, labels: Mapping[str, Winner]) -> Winner | None:
    """The verdict between the tags; None if there is none, several that differ, or one that is not a label
    (`view.labels`).
    """
    verdicts = set(_VERDICT.findall(text))
    return labels.get(verdicts.pop()) if len(verdicts) == 1 else None
