"""Encode text to token ids, optionally so that text never becomes a control token; and decode ids, at once or
incrementally without ever emitting part of a character.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from tinker_cookbook.exceptions import RendererError
from tinker_cookbook.tokenizer_utils import Tokenizer, TypedTokenizer, encode_without_special_tokens
from tinker_cookbook.utils.lazy import torch


def encode_text(tokenizer: TypedTokenizer, text: str) -> list[int]:
    """Token ids of `text`. Special tokens in it are encoded as such; none are added around it."""
    return encode_without_special_tokens(tokenizer, text)


def decode_tokens(tokenizer: TypedTokenizer, tokens: list[int]) -> str:
    """Exact text of `tokens`: special tokens are kept, spaces are not tidied."""
    text = tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)  # a flat list of ids decodes to one string
    return text


def special_token_id(tokenizer: TypedTokenizer, token: str) -> int:
    """The single id of a special token. Raises RendererError naming the token when the tokenizer splits it."""
    ids = encode_text(tokenizer, token)
    if len(ids) != 1:
        raise RendererError(
            f"the tokenizer {tokenizer.name_or_path!r} has no single id for the special token {token!r} "
            f"(it encodes as {ids}); choose the renderer of the model's family"
        )
    return ids[0]


class TextEncoder:
    """Encodes text so that nothing in it becomes one of the `control` tokens (name -> id).

    If the text spells a control token, it is split after its first characters and encoded in two pieces, which decode
    to the same text; with the usual tokenizers these are the tokens that the text would have without the control
    token.
    """

    def __init__(self, tokenizer: Tokenizer, control: Mapping[str, int]) -> None:
        self._tokenizer = tokenizer
        self.control_ids = frozenset(control.values())
        cuts = [re.match(r"\W+(?=\w)|.", name, re.DOTALL) for name in control]
        inside = [f"(?<={re.escape(cut.group())})(?={re.escape(cut.string[cut.end() :])})" for cut in cuts if cut]
        self._inside_control = re.compile("|".join(inside)) if inside else None

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, without additional tokens. Raises RendererError for a character that is a control token."""
        pieces = self._inside_control.split(text) if self._inside_control else [text]
        return [token for piece in pieces for token in self._encode(piece)]

    def _encode(self, text: str) -> list[int]:
        tokens = encode_text(self._tokenizer, text)
        if self.control_ids.isdisjoint(tokens):
            return tokens
        # The tokenizer's normalization turned other text into a control token.
        half = len(text) // 2
        if not half:
            raise RendererError(f"the tokenizer makes a control token of the text {text!r}; leave it out")
        return self._encode(text[:half]) + self._encode(text[half:])


class Utf8TokenDecoder:
    """Decodes a stream of token ids. A character whose bytes span tokens is held back until it is whole.

    The text is the difference between two decodes with the same start, so it is also correct for tokenizers whose
    decoding depends on the previous token (leading spaces). The concatenation of all outputs and `flush()` equals the
    full decode.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._context: list[int] = []
        self._pending: list[int] = []

    def decode(self, tokens: list[int]) -> str:
        """The text completed by `tokens`; empty while a character is incomplete."""
        self._pending += tokens
        text = self._pending_text()
        # An incomplete UTF-8 sequence decodes to U+FFFD at the end.
        if not text or text.endswith("\ufffd"):
            return ""
        self._context, self._pending = self._pending, []
        return text

    def flush(self) -> str:
        """The remaining text, with U+FFFD for bytes that never became a character."""
        text = self._pending_text()
        self._context, self._pending = self._pending, []
        return text

    def _pending_text(self) -> str:
        if not self._pending:
            return ""
        known = decode_tokens(self._tokenizer, self._context) if self._context else ""
        return decode_tokens(self._tokenizer, self._context + self._pending)[len(known) :]


def tokens_weights_from_strings_weights(
    strings_weights: list[tuple[str, float]], tokenizer: TypedTokenizer
) -> tuple[torch.Tensor, torch.Tensor]:
    """(token ids int64 (N,), weights float32 (N,)) of texts that are encoded separately, each with its weight.

    The first is encoded with the tokens that the tokenizer adds to a text, such as BOS.
    """
    tokens: list[int] = []
    weights: list[float] = []
    for i, (string, weight) in enumerate(strings_weights):
        encoded = tokenizer.encode(string, add_special_tokens=i == 0)
        tokens += encoded
        weights += [weight] * len(encoded)
    return torch.tensor(tokens, dtype=torch.int64), torch.tensor(weights, dtype=torch.float32)
