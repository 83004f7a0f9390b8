"""The interface of a sampler: submitted requests (`Ticket`), results, statistics, and the methods that the engine calls.

The engine's sampler is generation.py; samplers/ has those that run another program.
"""

from __future__ import annotations

import math
import time
from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerBase

from tinker_local_backend.engine.model.base_model import BaseModel
from tinker_local_backend.engine.sampling.requests import SamplerLimits, SamplingRequest
from tinker_local_backend.errors import RequestError

TopK = tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]
"""(ids, logprobs) of the most likely tokens, most likely first."""


@dataclass
class SampledSequence:
    """One completion: ids with a logprob each. The stop token, when the model emitted one, is the last of them."""

    tokens: list[int] = field(default_factory=list)
    logprobs: array[float] = field(default_factory=lambda: array("f"))
    """float32"""
    stop_reason: Literal["stop", "length"] = "length"
    topk: list[TopK] = field(default_factory=list)
    """per token, if requested: arrays of shape (k,)"""
    versions: list[int] = field(default_factory=list)
    """per token, with in-flight weights: the version that drew it"""
    constrained_logprobs: array[float] = field(default_factory=lambda: array("f"))
    """per token, among the tokens that the request's constraint allowed; empty without one"""
    routes: list[npt.NDArray[np.int16]] = field(default_factory=list)
    """per token but the last, if requested: its chosen experts, (layers, k)"""


@dataclass
class PromptScores:
    """Scores of a prompt of N tokens at temperature 1; None if not requested, NaN where not computed."""

    logprobs: npt.NDArray[np.float32] | None = None
    """(N,)"""
    topk: TopK | None = None
    """(N, k) each; logprobs are NaN in rows that were not computed"""
    targets: npt.NDArray[np.float32] | None = None
    """(N - 1, K), 0 where the request says -1"""
    alternatives: TopK | None = None
    """(N - 1, k) each: tokens drawn at the request's temperature, and their logprobs"""
    constrained: npt.NDArray[np.float32] | None = None
    """(N - start,): logprobs under a constraint that begins at position `start`"""


@dataclass
class SamplingResult:
    """The result of a request: completions, prompt scores, and the number of prompt tokens that were cached."""

    sequences: list[SampledSequence]
    prompt: PromptScores
    cached_tokens: int


OnProgress = Callable[[Sequence[SampledSequence]], None]
"""Called on the worker after every step with the samples so far. A preempted sample draws the same tokens again."""


@dataclass(eq=False)
class Ticket:
    """A submitted request. `complete` gets the result or the error; `cancelled` is called before every step."""

    request: SamplingRequest
    complete: Callable[[SamplingResult | BaseException], None]
    cancelled: Callable[[], bool]
    on_done: Callable[[Callable[[object], object]], None] | None = None
    """registers a callback for when the request is resolved or cancelled, called on any thread"""
    sequences: list[SampledSequence] = field(init=False)
    prompt: PromptScores | None = None
    seed: int | None = None
    todo: list[int] = field(init=False)
    """indices of the samples still to start; the next one is at the end"""
    done: int = 0
    cached_tokens: int | None = None
    """of the prompt, when its first sample was admitted; later samples reuse that prefill"""
    finished: bool = False
    order: int = 0
    """of arrival"""
    arrived: float = 0.0
    """seconds of the monotonic clock"""
    served: bool = False
    """has its first token or its scores"""
    queued: bool = False
    """is in the queue, with all or some of its samples"""

    def __post_init__(self) -> None:
        self.restart()

    @property
    def dropped(self) -> bool:
        """Whether its result is no longer needed."""
        return self.finished or self.cancelled()

    @property
    def wants_scores(self) -> bool:
        """Whether the prompt has yet to be scored."""
        return self.prompt is None and self.request.scoring.requested

    def restart(self) -> None:
        """Drop what was sampled so far. The seed stays, so the same tokens are drawn again."""
        count = self.request.num_samples
        self.sequences, self.prompt = [SampledSequence() for _ in range(count)], None
        self.todo = list(reversed(range(count)))
        self.done, self.cached_tokens = 0, None

    def take_samples(self, count: int) -> list[int]:
        return [self.todo.pop() for _ in range(count)]

    def return_samples(self, samples: Sequence[int]) -> None:
        """Put preempted samples back; they draw the same tokens again."""
        for index in samples:
            self.sequences[index] = SampledSequence()
        self.todo = sorted([*self.todo, *samples], reverse=True)

    def finish(self, outcome: SamplingResult | BaseException) -> None:
        """Report the outcome; only the first one counts."""
        if not self.finished:
            self.finished = True
            self.complete(outcome)

    def succeed(self) -> None:
        self.finish(SamplingResult(self.sequences, self.prompt or PromptScores(), self.cached_tokens or 0))

    def sample_done(self) -> None:
        """Count a finished sample; the last one reports the result."""
        self.done += 1
        if self.done == self.request.num_samples:
            self.succeed()


def diverged(where: str) -> RequestError:
    """The error of a request whose logits are NaN."""
    return RequestError(
        f"the model gave no valid distribution {where} (logits with NaN or infinity): the adapter's weights have diverged; "
        "lower the learning rate or go back to an earlier checkpoint"
    )


BIN_RATIO = 1.1
"""Ratio of the bounds of neighbouring bins, and thus the largest relative error of a quantile."""

MIN_SECONDS = 1e-4
BINS = 200


class SamplerStats(NamedTuple):
    """Statistics of a sampler. Waits are from submission to the first token (or score), in seconds, since the engine started."""

    waiting: int
    running: int
    pages: int
    """allocated for the KV cache"""
    pages_read: int
    """in use by running sequences"""
    pages_idle: int
    """cached for later prompts"""
    restarts: int
    """preemptions"""
    out_of_memory: int
    longest_wait: float
    wait_p50: float
    wait_p99: float
    states: int = 0
    """recurrent states in use by sequences; 0 in a model without"""
    states_idle: int = 0
    """cached for later prompts"""
    state_bytes: int = 0
    """of one state"""


class WaitTimes:
    """A histogram of waits, with bins of geometrically growing width."""

    def __init__(self) -> None:
        self._counts = [0] * BINS
        self._total = 0
        self.longest = 0.0

    def end(self, ticket: Ticket) -> None:
        """End the wait of a ticket, at its first token or scores."""
        if not ticket.served:
            ticket.served = True
            self.add(time.monotonic() - ticket.arrived)

    def add(self, seconds: float) -> None:
        index = math.ceil(math.log(seconds / MIN_SECONDS, BIN_RATIO)) if seconds > MIN_SECONDS else 0
        self._counts[min(index, BINS - 1)] += 1
        self._total += 1
        self.longest = max(self.longest, seconds)

    def quantile(self, share: float) -> float:
        """A quantile of the waits, in seconds; 0 without any."""
        counted = 0
        for index, count in enumerate(self._counts):
            counted += count
            if count and counted >= share * self._total:
                return min(MIN_SECONDS * BIN_RATIO**index, self.longest)
        return 0.0


class Sampler(Protocol):
    """Runs the requests on one base model. All methods are called on the engine's worker; `stats` on any thread."""

    @property
    def limits(self) -> SamplerLimits: ...

    @property
    def busy(self) -> bool:
        """Whether `step` has work to do."""
        ...

    @property
    def stats(self) -> SamplerStats: ...

    def add(self, ticket: Ticket) -> None: ...

    @property
    def tenants(self) -> Collection[str]:
        """Tenants with work for `step` on the engine's worker."""
        ...

    def step(self) -> Mapping[str, int]:
        """Sample a token for every running sequence. Returns the tokens computed on the worker for each tenant."""
        ...

    def evict_prefixes(self, tenant: str = "") -> None:
        """Evict the cached prefixes of a tenant ("": of all), so that later samples do not depend on them."""

    def fail_all(self, error: BaseException) -> None:
        """Fail all requests, on shutdown."""


Post = Callable[[Callable[[], None]], object]
"""Schedules a function on the engine's worker. May be called on any thread."""

MakeSampler = Callable[[BaseModel, int, Callable[[], int], Post], Sampler]
"""(model, bound on the tokens of the engine's KV cache, source of seeds, post) -> the model's sampler."""


def append_token(
    sequence: SampledSequence, token: int, logprob: float, request: SamplingRequest, tokenizer: PreTrainedTokenizerBase
) -> bool:
    """Add a sampled token. Returns whether the sequence ends with it: a stop token or the end of a stop string, or its length."""
    sequence.tokens.append(token)
    sequence.logprobs.append(logprob)
    if (version := request.version) is not None:
        sequence.versions.append(version)
    stop = request.stop
    if token in stop.token_ids or (stop.texts and ends_with_stop_text(sequence.tokens, stop.texts, tokenizer)):
        sequence.stop_reason = "stop"
        return True
    return len(sequence.tokens) >= request.max_tokens


def ends_with_stop_text(tokens: list[int], texts: tuple[str, ...], tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the newest token completed a stop string, which may span several tokens.

    Only the tail can hold a new match: every token adds at least one byte, so the last tokens, as many as the longest stop
    string has bytes (plus a few that decode to nothing by themselves), suffice.
    """
    window = max(len(text.encode()) for text in texts) + 8
    tail = tokenizer.decode(tokens[-window:], skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return any(text in tail for text in texts)
