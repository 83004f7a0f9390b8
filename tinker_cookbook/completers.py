"""Policies as functions: tokens to tokens (TokenCompleter), or messages to a message (MessageCompleter)."""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import inspect
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self, cast

from tinker_cookbook import local_sampling
from tinker_cookbook.clients import SamplingClient
from tinker_cookbook.exceptions import ConfigurationError, DataValidationError
from tinker_cookbook.renderers import Message, Renderer
from tinker_cookbook.utils.lazy import tinker
from tinker_cookbook.utils.seeds import derive_seed

if TYPE_CHECKING:
    from tinker.types import SampleResponse

StopCondition = list[str] | list[int]


@dataclass
class TokensWithLogprobs:
    """A completion. If the model emitted a stop token, that token and its logprob are the last ones."""

    tokens: list[int]
    maybe_logprobs: list[float] | None
    stop_reason: tinker.StopReason = "stop"
    sequence_id: str | None = None
    """the engine's id of the sample, for provenance; None: the completer has none"""
    prompt_cache_hit_tokens: int = 0
    """prompt tokens found in the sampler's cache; 0 also if it does not report them"""
    weight_versions: list[int] | None = None
    """with in-flight weights: the published version that sampled each token"""

    @property
    def logprobs(self) -> list[float]:
        """Raises ValueError if the completer returned none."""
        if self.maybe_logprobs is None:
            raise ValueError("this completion has no logprobs: its completer does not report them")
        return self.maybe_logprobs


class TokenCompleter(ABC):
    """A policy over token ids."""

    @abstractmethod
    async def __call__(
        self, model_input: tinker.ModelInput, stop: StopCondition, *, max_tokens: int | None = None
    ) -> TokensWithLogprobs: ...

    def fork(self, *key: int | str) -> Self:
        """The completer for one rollout. A seeded one returns a copy with its own seed; others return themselves."""
        return self


class MessageCompleter(ABC):
    """A policy over chat messages."""

    @abstractmethod
    async def __call__(self, messages: list[Message]) -> Message: ...

    def fork(self, *key: int | str) -> Self:
        """As in TokenCompleter."""
        return self

    def usage(self) -> dict[str, float]:
        """Usage of its calls so far, as metrics; empty if nothing is counted. A fork counts its own calls."""
        return {}


@dataclass
class TinkerTokenCompleter(TokenCompleter):
    """A TokenCompleter over a sampling client.

    Args:
        max_tokens: longest completion; a call may ask for less.
        context_window: if set, completions are limited so that prompt + completion fits, and a prompt that leaves no
            room raises ConfigurationError.
        seed: None: random; otherwise call i of this completer always uses the same derived seed.
        top_k, top_p: sample from the k likeliest tokens (-1: all), from the likeliest with this total probability (1:
            all). Logprobs are those of the full distribution.
        min_p: sample from tokens with at least this fraction of the likeliest one's probability (0: all); local engine
            only.
        constraint: a tinker_local_backend.Constraint on the texts of completions; local engine only. Logprobs ignore it.
    """

    sampling_client: SamplingClient
    max_tokens: int
    temperature: float = 1.0
    context_window: int | None = None
    seed: int | None = None
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    constraint: Any = None
    _calls: int = field(default=0, init=False, repr=False)

    async def __call__(
        self, model_input: tinker.ModelInput, stop: StopCondition, *, max_tokens: int | None = None
    ) -> TokensWithLogprobs:
        limit = self.max_tokens if max_tokens is None else min(max_tokens, self.max_tokens)
        if self.context_window is not None:
            limit = min(limit, self.context_window - model_input.length)
            if limit < 1:
                raise ConfigurationError(
                    f"a prompt of {model_input.length} tokens leaves no room in context_window={self.context_window}"
                )
        seed = None if self.seed is None else derive_seed(self.seed, self._calls)
        self._calls += 1
        params = local_sampling.sampling_params(
            self.sampling_client,
            self.min_p,
            max_tokens=limit,
            temperature=self.temperature,
            stop=stop,
            seed=seed,
            top_k=self.top_k,
            top_p=self.top_p,
        )
        response = await _sample(self.sampling_client, model_input, params, self.constraint)
        sequence = response.sequences[0]
        logprobs = sequence.logprobs
        if logprobs is None or len(logprobs) != len(sequence.tokens):
            raise DataValidationError(
                f"the sampler returned {len(sequence.tokens)} tokens and "
                f"{'no' if logprobs is None else len(logprobs)} logprobs; each token needs one"
            )
        cached = getattr(response, "prompt_cache_hit_tokens", None) or 0  # not every client reports it
        name = getattr(sequence, "sequence_id", None) or None
        versions = getattr(sequence, "weight_versions_np", None)
        return TokensWithLogprobs(
            list(sequence.tokens),
            list(logprobs),
            sequence.stop_reason,
            name,
            cached,
            weight_versions=None if versions is None else versions.tolist(),
        )

    def fork(self, *key: int | str) -> Self:
        if self.seed is None:
            return self
        return dataclasses.replace(self, seed=derive_seed(self.seed, *key))


async def _sample(
    client: SamplingClient, prompt: tinker.ModelInput, params: tinker.SamplingParams, constraint: Any
) -> SampleResponse:
    """One completion, from `sample` or `sample_async`, whichever the client has.

    The result is awaited until it is no longer awaitable: a future of the SDK, a concurrent one, or a nested one.
    """
    call = getattr(client, "sample", None) or getattr(client, "sample_async", None)
    if call is None:
        raise ConfigurationError(f"sampling_client {type(client).__name__} has neither sample nor sample_async")
    if constraint is None:
        pending: Any = call(prompt=prompt, num_samples=1, sampling_params=params)
    else:
        local_sampling.check_constraint(client)
        pending = call(prompt=prompt, num_samples=1, sampling_params=params, constraint=constraint)
    while not hasattr(pending, "sequences"):
        if inspect.isawaitable(pending):
            pending = await pending
        elif isinstance(pending, concurrent.futures.Future):
            pending = await asyncio.wrap_future(cast("concurrent.futures.Future[Any]", pending))
        else:
            pending = await pending.result_async()
    return pending


class TinkerMessageCompleter(MessageCompleter):
    """A MessageCompleter over a sampling client and a renderer. The reply keeps tool calls as the renderer parsed them.

    Args:
        stop_condition: None: the renderer's stop sequences.
        seed, constraint: as in TinkerTokenCompleter.
    """

    def __init__(
        self,
        sampling_client: SamplingClient,
        renderer: Renderer,
        max_tokens: int,
        stop_condition: StopCondition | None = None,
        temperature: float = 1.0,
        seed: int | None = None,
        constraint: Any = None,
    ):
        self._tokens = TinkerTokenCompleter(sampling_client, max_tokens, temperature, seed=seed, constraint=constraint)
        self._renderer = renderer
        self._stop = stop_condition if stop_condition is not None else renderer.get_stop_sequences()

    async def __call__(self, messages: list[Message]) -> Message:
        completion = await self._tokens(self._renderer.build_generation_prompt(messages), self._stop)
        message, _ = self._renderer.parse_response(completion.tokens)
        return message
