"""Sampling parameters with what the engine knows beyond the SDK."""

import tinker


class SamplingParams(tinker.SamplingParams):
    """The SDK's parameters and `min_p`, which the SDK's own class drops without a word.

    Args:
        min_p: draw from the tokens with at least this share of the likeliest token's probability at the sampling
            temperature; in 0..1, and 0 draws from all (Nguyen et al., arXiv 2407.01082). top_p is then a share of what is
            left. Logprobs stay those before any limit.
    """

    min_p: float = 0.0
