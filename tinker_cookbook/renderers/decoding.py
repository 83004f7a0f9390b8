"""Token ids to text: in one go, and incrementally without ever emitting half a character."""

from tinker_cookbook.exceptions import RendererError
from tinker_cookbook.tokenizer_utils import Tokenizer


def encode_text(tokenizer: Tokenizer, text: str) -> list[int]:
    """Token ids of `text`, special tokens in it included, nothing added around it."""
    return tokenizer.encode(text, add_special_tokens=False)


def decode_tokens(tokenizer: Tokenizer, tokens: list[int]) -> str:
    """Exact text of `tokens`: special tokens are kept, spaces are not tidied."""
    text = tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)  # a flat list of ids decodes to one string
    return text


def is_encodable(text: str) -> bool:
    """False for text with half of a surrogate pair (JSON can spell one), which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def special_token_id(tokenizer: Tokenizer, token: str) -> int:
    """The single id of a special token. Raises RendererError naming the token when the tokenizer splits it."""
    ids = encode_text(tokenizer, token)
    if len(ids) != 1:
        raise RendererError(
            f"the tokenizer {tokenizer.name_or_path!r} has no single id for the special token {token!r} "
            f"(it encodes as {ids}); choose the renderer of the model's own family"
        )
    return ids[0]


class Utf8TokenDecoder:
    """Decodes a stream of token ids. A character whose bytes span tokens is held back until it is whole.

    Text is the difference of two decodes that share a start, so tokenizers whose decoding depends on the previous
    token (leading spaces) come out right too. The concatenation of all outputs and `flush()` equals the full decode.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._context: list[int] = []
        self._pending: list[int] = []

    def decode(self, tokens: list[int]) -> str:
        """Text that `tokens` complete; empty while a character is still open."""
        self._pending += tokens
        text = self._pending_text()
        # An incomplete UTF-8 sequence decodes to U+FFFD at the end.
        if not text or text.endswith("\ufffd"):
            return ""
        self._context, self._pending = self._pending, []
        return text

    def flush(self) -> str:
        """Whatever is still held back, with U+FFFD for bytes that never became a character."""
        text = self._pending_text()
        self._context, self._pending = self._pending, []
        return text

    def _pending_text(self) -> str:
        if not self._pending:
            return ""
        known = decode_tokens(self._tokenizer, self._context) if self._context else ""
        return decode_tokens(self._tokenizer, self._context + self._pending)[len(known) :]
