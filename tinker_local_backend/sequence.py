"""A sampled sequence, with the fields that only this engine reports."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import tinker


@dataclass(frozen=True)
class LocalSequence(tinker.SampledSequence):
    """The SDK's sequence, with more fields. As in all samples, `logprobs` are those of the whole distribution."""

    constrained_logprobs: list[float] | None = None
    """per token, under softmax(logits / temperature) over the tokens that the constraint allowed there, before top-k, top-p and
    min-p; None without a constraint"""
    weight_versions_np: np.ndarray | None = None
    """int32 (num_tokens,): version of the published weights that sampled each token; None for samples of a snapshot"""
