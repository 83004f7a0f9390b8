"""Sampling parameters that the engine supports beyond the SDK's."""

from collections.abc import Mapping

import tinker


class SamplingParams(tinker.SamplingParams):
    """The SDK's parameters, and those of vLLM and OpenAI that the SDK's class silently drops.

    Logprobs stay those of softmax(logits / temperature), before any of these.

    Args:
        min_p: sample from the tokens with at least this share of the most likely token's probability at the sampling
            temperature; in 0..1, and 0 samples from all (Nguyen et al., arXiv 2407.01082). top_p is then a share of the
            rest.
        presence_penalty: subtracted from the logit of each token that the sample has so far; in -2..2.
        frequency_penalty: subtracted once for each time that the sample has the token; in -2..2.
        repetition_penalty: in 0.01..100; positive logits of tokens in the prompt or the sample are divided by it, and negative
            ones multiplied (Keskar et al., arXiv 1909.05858).
        logit_bias: token id -> number in -100..100 that is added to its logit, before the penalties.
        min_tokens: no stop token is sampled before a sample has this many tokens; not with stop strings or constraints.
    """

    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = {}
    min_tokens: int = 0
