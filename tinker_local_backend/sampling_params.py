"""Sampling parameters that the engine supports beyond the SDK's."""

import tinker


class SamplingParams(tinker.SamplingParams):
    """The SDK's parameters and `min_p`, which the SDK's class silently drops.

    Args:
        min_p: sample from the tokens with at least this share of the most likely token's probability at the sampling
            temperature; in 0..1, and 0 samples from all (Nguyen et al., arXiv 2407.01082). top_p is then a share of the
            rest. Logprobs stay those before any limit.
    """

    min_p: float = 0.0
