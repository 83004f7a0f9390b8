"""Check prompts and turn them into token ids."""

from __future__ import annotations

from collections.abc import Sequence

import tinker

from tinker_local_backend.engine.model.base_model import BaseModel
from tinker_local_backend.errors import RequestError


def prompt_tokens(prompt: tinker.ModelInput, model: BaseModel) -> tuple[int, ...]:
    """Token ids of a ModelInput. Raises RequestError unless it is text, not empty, and within vocabulary and context."""
    tokens: list[int] = []
    for i, chunk in enumerate(prompt.chunks):
        if not isinstance(chunk, tinker.EncodedTextChunk):
            raise RequestError(
                f"prompt.chunks[{i}] is a {type(chunk).__name__}; the local engine takes text only. "
                "Use EncodedTextChunk, or backend=tinker for images and audio"
            )
        if len(chunk.tokens) == 0:
            raise RequestError(f"prompt.chunks[{i}] is empty; leave empty chunks out")
        tokens.extend(chunk.tokens)
    if not tokens:
        raise RequestError("the prompt is empty; give at least one token")
    check_vocabulary(tokens, model.vocab_size, "prompt")
    if len(tokens) > model.context_length:
        raise RequestError(
            f"prompt of {len(tokens)} tokens exceeds the context length {model.context_length}; shorten it"
        )
    return tuple(tokens)


def check_vocabulary(tokens: Sequence[int], vocab_size: int, where: str) -> None:
    if not tokens or (min(tokens) >= 0 and max(tokens) < vocab_size):
        return
    for position, token in enumerate(tokens):
        if not 0 <= token < vocab_size:
            raise RequestError(
                f"{where}[{position}] is {token}, outside the vocabulary of {vocab_size} ids; "
                "was it encoded with another model's tokenizer?"
            )
