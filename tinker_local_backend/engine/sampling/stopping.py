"""When a completion ends: one rule for every sampler."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from tinker_local_backend.engine.sampling.requests import SamplingRequest
from tinker_local_backend.engine.sampling.tickets import SampledSequence


def append_token(
    sequence: SampledSequence, token: int, logprob: float, request: SamplingRequest, tokenizer: PreTrainedTokenizerBase
) -> bool:
    """Add a sampled token. Returns whether the sequence ends with it: a stop token or the end of a stop string, or its length."""
    sequence.tokens.append(token)
    sequence.logprobs.append(logprob)
    stop = request.stop
    if token in stop.token_ids or (stop.texts and ends_with_stop_text(sequence.tokens, stop.texts, tokenizer)):
        sequence.stop_reason = "stop"
        return True
    return len(sequence.tokens) >= request.max_tokens


def ends_with_stop_text(tokens: list[int], texts: tuple[str, ...], tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the newest token completed a stop string, also across token borders.

    Only the tail can hold a new match: every token adds at least one byte, so as many tokens as the longest stop string
    has bytes (plus a few that decode to nothing by themselves) are enough.
    """
    if not texts:
        return False
    window = max(len(text.encode()) for text in texts) + 8
    tail = tokenizer.decode(tokens[-window:], skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return any(text in tail for text in texts)
