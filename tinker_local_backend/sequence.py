"""A sampled sequence, with what only this engine reports."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import tinker


@dataclass(frozen=True)
class LocalSequence(tinker.SampledSequence):
    """The SDK's sequence and more. As in all samples, `logprobs` are those of the whole distribution."""

    constrained_logprobs: list[float] | None = None
    """per token, under softmax(logits / temperature) over the tokens that the constraint allowed there, before top-k, top-p and
    min-p; None without a constraint"""
    weight_versions_np: np.ndarray | None = None
    """int32 (num_tokens,): which published weights drew each token; None for samples of a snapshot"""
