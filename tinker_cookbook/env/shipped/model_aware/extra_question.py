"""Add a question to the prompts of another environment, and extract the ids of the answer that this environment then
gets.

Both work on token ids, so they fit every environment over tokens, whatever its messages are.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.renderers import Renderer
from tinker_cookbook.renderers.decoding import decode_tokens, encode_text

_STAND_INS = ("a7a", "b7b")
"""Message contents whose last token does not merge with the text that either format appends."""
_CONTEXT = 64
"""Number of tokens that always covers the characters that a format puts between a message and a reply."""


def add_text(renderer: Renderer, prompt: Sequence[int], text: str) -> list[int]:
    """The prompt with `text` appended to its last message. No other id changes.

    Raises ConfigurationError for a prompt that does not end as the renderer ends one: with a message and a reply
    header.
    """
    after, ids = _after_message(renderer)
    same = 0
    while same < min(len(ids), len(prompt)) and prompt[-1 - same] == ids[-1 - same]:
        same += 1
    before, tail = list(prompt[: len(prompt) - same]), list(prompt[len(prompt) - same :])
    # The last token of a message may contain the start of what follows: "?\n\n" where the format says
    # "\n\nAssistant:".
    merged = after.removesuffix(decode_tokens(renderer.tokenizer, tail))
    if not tail or len(merged) == len(after) or not _ends_with(renderer, before, merged):
        end = decode_tokens(renderer.tokenizer, list(prompt[-_CONTEXT:]))
        raise ConfigurationError(
            f"a question can only be added to a prompt that ends in a message and then {after!r}; this one ends in {end!r}"
        )
    return [*before, *encode_text(renderer.tokenizer, text.removeprefix(merged) + merged), *tail]


def _after_message(renderer: Renderer) -> tuple[str, list[int]]:
    """The end of a prompt after its last message: its text, and its ids that do not depend on the message."""
    one, other = (
        renderer.build_generation_prompt([{"role": "user", "content": content}]).to_ints() for content in _STAND_INS
    )
    same = 0
    while one[-1 - same] == other[-1 - same]:
        same += 1
    return decode_tokens(renderer.tokenizer, one).rpartition(_STAND_INS[0])[2], one[len(one) - same :]


def _ends_with(renderer: Renderer, ids: list[int], text: str) -> bool:
    return decode_tokens(renderer.tokenizer, ids[-_CONTEXT:]).endswith(text)


def ids_from(renderer: Renderer, ids: Sequence[int], start: int) -> list[int]:
    """The ids after the first `start` characters of the text of `ids`, unchanged except for a token that spans this
    position.

    The rest of such a token is encoded again.
    """
    tokenizer, known = renderer.tokenizer, list(ids)
    count = bisect.bisect_left(range(len(known) + 1), start, key=lambda n: len(decode_tokens(tokenizer, known[:n])))
    before = decode_tokens(tokenizer, known[:count])
    while before.endswith("\ufffd") and count < len(known):  # a character whose bytes span tokens
        count += 1
        before = decode_tokens(tokenizer, known[:count])
    rest = before[start:]
    return [*(encode_text(tokenizer, rest) if rest else []), *known[count:]]
