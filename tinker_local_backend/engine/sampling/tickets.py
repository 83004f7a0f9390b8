"""A sampling request on its way through the generator, and what comes back from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from tinker_local_backend.engine.sampling.requests import SamplingRequest
from tinker_local_backend.errors import RequestError

TopK = tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]
"""(ids, logprobs) of the most likely tokens, most likely first."""


@dataclass
class SampledSequence:
    """One completion: ids with a logprob each. The stop token, when the model emitted one, is the last of them."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    stop_reason: Literal["stop", "length"] = "length"
    topk: list[TopK] = field(default_factory=list)
    """per token, when the request asks for it: arrays of shape (k,)"""


@dataclass
class PromptScores:
    """Scores of a prompt of N tokens at temperature 1; arrays are None when not asked for, NaN where not computed."""

    logprobs: npt.NDArray[np.float32] | None = None
    """(N,)"""
    topk: TopK | None = None
    """(N, k) each; rows that were not computed hold logprob NaN"""
    targets: npt.NDArray[np.float32] | None = None
    """(N - 1, K), 0 where the request says -1"""
    alternatives: TopK | None = None
    """(N - 1, k) each: tokens drawn at the request's temperature, and their logprobs"""


@dataclass
class SamplingResult:
    """What a request gets: its completions, the scores of its prompt, and how much of the prompt was already in the cache."""

    sequences: list[SampledSequence]
    prompt: PromptScores = field(default_factory=PromptScores)
    cached_tokens: int = 0


OnProgress = Callable[[Sequence[SampledSequence]], None]
"""Told on the worker, after every step, what there is of each sample. One that has to begin again draws the same tokens."""


@dataclass(eq=False)
class Ticket:
    """A request on its way. `complete` is told the result or the error; `cancelled` is asked before every step."""

    request: SamplingRequest
    complete: Callable[[SamplingResult | BaseException], None]
    cancelled: Callable[[], bool]
    on_done: Callable[[Callable[[object], None]], None] | None = None
    """has a function called, on any thread, when it is answered or cancelled"""
    sequences: list[SampledSequence] = field(init=False)
    prompt: PromptScores | None = None
    seed: int | None = None
    todo: list[int] = field(init=False)
    """indices of the samples that have no pages; the next one is last"""
    done: int = 0
    cached_tokens: int | None = None
    """of the prompt, when its first sample began; later ones find what that one prefilled"""
    finished: bool = False
    order: int = 0
    """of arrival"""
    arrived: float = 0.0
    """seconds of the monotonic clock"""
    served: bool = False
    """has its first token or its scores"""
    queued: bool = False
    """stands in the line of those that wait, with some or all of its samples"""

    def __post_init__(self) -> None:
        self.begin_again()

    @property
    def dropped(self) -> bool:
        """Nobody waits for it any more: its pages are free to go."""
        return self.finished or self.cancelled()

    @property
    def wants_scores(self) -> bool:
        """Whether the prompt is still to be scored."""
        return self.prompt is None and self.request.scoring.wanted

    def begin_again(self) -> None:
        """Forget what was sampled so far; the seed stays, so the same tokens come again."""
        count = self.request.num_samples
        self.sequences, self.prompt = [SampledSequence() for _ in range(count)], None
        self.todo = list(reversed(range(count)))
        self.done, self.cached_tokens = 0, None

    def take_samples(self, count: int) -> list[int]:
        """Indices of the next samples to begin."""
        return [self.todo.pop() for _ in range(count)]

    def give_back(self, samples: Sequence[int]) -> None:
        """These samples begin again later, and draw the same tokens."""
        for index in samples:
            self.sequences[index] = SampledSequence()
        self.todo = sorted([*self.todo, *samples], reverse=True)

    def finish(self, outcome: SamplingResult | BaseException) -> None:
        """Report the outcome; only the first one counts."""
        if not self.finished:
            self.finished = True
            self.complete(outcome)

    def succeed(self) -> None:
        """Report what there is."""
        self.finish(SamplingResult(self.sequences, self.prompt or PromptScores(), self.cached_tokens or 0))

    def sample_done(self) -> None:
        """One more sample has ended; after the last one the result goes out."""
        self.done += 1
        if self.done == self.request.num_samples:
            self.succeed()


def diverged(where: str) -> RequestError:
    """What a request gets for which the model gives NaN."""
    return RequestError(
        f"the model gave no valid distribution {where} (logits with NaN or infinity): the adapter's weights have diverged; "
        "lower the learning rate or go back to an earlier checkpoint"
    )
