"""The probabilities of choices under frozen weights."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass

from tinker_cookbook.clients import SamplingClient
from tinker_cookbook.decisions.data import choice_tokens
from tinker_cookbook.decisions.rules import decision
from tinker_cookbook.renderers import Message, Renderer
from tinker_cookbook.utils.lazy import torch
from tinker_cookbook.utils.narrowing import to_list


@dataclass(frozen=True)
class DecisionPolicy:
    """A snapshot of weights as a policy over choices. It scores given tokens and samples none."""

    client: SamplingClient
    renderer: Renderer

    async def probabilities(self, messages: Sequence[Message], choices: Sequence[str]) -> list[float]:
        """The probability of each choice, adding up to 1. One pass per choice, submitted together.

        Raises DataValidationError for fewer than two choices.
        """
        pending: list[tuple[Awaitable[list[float | None]], torch.Tensor]] = []
        for choice in choices:
            model_input, weights = choice_tokens(messages, choice, self.renderer)
            pending.append((self.client.compute_logprobs(model_input), weights))
        scores = [_sum(await logprobs, weights) for logprobs, weights in pending]
        return to_list(decision(torch.tensor(scores, dtype=torch.float64)).exp())


def _sum(logprobs: Sequence[float | None], weights: torch.Tensor) -> float:
    chosen = zip(logprobs, to_list(weights), strict=True)
    return math.fsum(logprob for logprob, weight in chosen if weight and logprob is not None)
