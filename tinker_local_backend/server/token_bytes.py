"""The bytes of a token. For a token with part of a character they differ from the text that a tokenizer decodes it to."""

from __future__ import annotations

import re
from functools import cache

from transformers import PreTrainedTokenizerBase

_FALLBACK = re.compile(r"<0x([0-9A-F]{2})>")
"""A byte in tokenizers with byte fallback (SentencePiece)."""

UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""What a decoder writes for an incomplete character."""


def token_bytes(tokenizer: PreTrainedTokenizerBase, token: int) -> bytes:
    """The bytes that a token adds to a text."""
    text = str(tokenizer.decode([token]))
    name = tokenizer.convert_ids_to_tokens(token) if UNFINISHED in text else None
    if not isinstance(name, str):
        return text.encode()
    if fallback := _FALLBACK.fullmatch(name):
        return bytes([int(fallback[1], 16)])
    known = _byte_of_letter()
    return bytes(known[letter] for letter in name) if known.keys() >= set(name) else text.encode()


@cache
def _byte_of_letter() -> dict[str, int]:
    """The alphabet of byte-level BPE (GPT-2): printable bytes of Latin-1 are themselves, the others letters from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("\u00a1"), ord("\u00ac") + 1), *range(ord("\u00ae"), 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
