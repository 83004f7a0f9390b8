"""The bytes of each token id, stored in the run's folder, so that its records can be read without the tokenizer.

`vocabulary.parquet` has one column, `bytes`; row i is what id i adds to the text. Characters may span tokens, so join
bytes before decoding.
"""

from __future__ import annotations

from collections.abc import Sequence

from tinker_cookbook.renderers.decoding import decode_tokens, encode_text
from tinker_cookbook.stores.training_store import VOCABULARY_BASE_NAME, TrainingRunStore
from tinker_cookbook.tokenizer_utils import Tokenizer

_PROBES = (
    "Plain words, 12 + 34 = 46.",
    "  two  spaces\nand\tlines\n\n",
    "naïve Ωμέγα 漢字 🙂 e\u0301",
    "def f(x):\n    return x",
)
"""Texts whose tokens must join to what the tokenizer says of them, before the joining is trusted."""


def token_bytes(tokenizer: Tokenizer) -> list[bytes]:
    """The bytes that each id adds to a text, by id.

    Byte-level vocabularies and those with byte fallback define the bytes of a token. If these do not reproduce the
    tokenizer's output, each id gets what it decodes to after another id; part of a character then becomes U+FFFD.
    """
    special = {id_: token.content.encode() for id_, token in tokenizer.added_tokens_decoder.items()}
    names = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    for spell in (_byte_level, _byte_fallback):
        pieces = [special[i] if i in special else spell(str(name)) for i, name in enumerate(names)]
        whole = [piece for piece in pieces if piece is not None]
        if len(whole) == len(pieces) and all(_gives_back(tokenizer, whole, text) for text in _PROBES):
            return whole
    before = encode_text(tokenizer, "a")[:1]
    known = decode_tokens(tokenizer, before)
    return [
        special[i] if i in special else decode_tokens(tokenizer, [*before, i])[len(known) :].encode()
        for i in range(len(names))
    ]


def write_vocabulary(store: TrainingRunStore, tokenizer: Tokenizer) -> None:
    """Write the file, unless it exists."""
    if not store.has(VOCABULARY_BASE_NAME):
        store.write_vocabulary(token_bytes(tokenizer))


def split_text(pieces: Sequence[bytes]) -> list[str]:
    """The text of tokens, one string each. A character that spans tokens belongs to the first one; the others are
    empty.

    Bytes that are not UTF-8 become U+FFFD.
    """
    joined = b"".join(pieces)
    text = joined.decode("utf-8", errors="replace")
    if "\ufffd" not in text and all(not piece or piece[0] & 0xC0 != 0x80 for piece in pieces):
        return [piece.decode("utf-8") for piece in pieces]
    starts: list[int] = []
    offset = 0
    for piece in pieces:
        starts.append(offset)
        offset += len(piece)
    texts = [""] * len(pieces)
    at, token = 0, 0
    for character, size in _characters(joined):
        while token + 1 < len(pieces) and starts[token + 1] <= at:
            token += 1
        texts[token] += character
        at += size
    return texts


def _characters(joined: bytes) -> list[tuple[str, int]]:
    """Each character with its number of bytes."""
    characters: list[tuple[str, int]] = []
    at = 0
    while at < len(joined):
        for size in (1, 2, 3, 4):
            try:
                characters.append((joined[at : at + size].decode("utf-8"), size))
                break
            except UnicodeDecodeError:
                continue
        else:
            characters.append(("\ufffd", 1))
        at += characters[-1][1]
    return characters


def _gives_back(tokenizer: Tokenizer, pieces: Sequence[bytes], text: str) -> bool:
    ids = encode_text(tokenizer, text)
    joined = b"".join(pieces[i] for i in ids).decode("utf-8", errors="replace")
    # A tokenizer with a dummy prefix strips the space of the first token when it decodes.
    return joined.removeprefix(" ") == decode_tokens(tokenizer, ids).removeprefix(" ")


def _byte_alphabet() -> dict[str, int]:
    """The printable substitutes of byte-level vocabularies (GPT-2): printable bytes represent themselves, others
    follow after them.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_ALPHABET = _byte_alphabet()


def _byte_level(name: str) -> bytes | None:
    if any(character not in _ALPHABET for character in name):
        return None
    return bytes(_ALPHABET[character] for character in name)


def _byte_fallback(name: str) -> bytes | None:
    if len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
        return bytes([int(name[3:5], 16)])
    return name.replace("▁", " ").encode()
