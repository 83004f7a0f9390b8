"""The token ids between two turns of a seat: end of turn, the user's words, and the others' ids verbatim.

A conversation with placeholders is rendered once, [user][assistant: X][user: text with Y], and split at X and Y, two
special tokens that occur nowhere else. Sampled text is never decoded and encoded again; only our own template text is
encoded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tinker_cookbook.debate.prompts import OPPONENT
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.renderers import Message, Renderer
from tinker_cookbook.renderers.decoding import decode_tokens, encode_text
from tinker_cookbook.renderers.replies import decode_reply, reply_text, strip_stop
from tinker_cookbook.tokenizer_utils import typed


@dataclass(frozen=True)
class TurnInjection:
    """What follows the seat's reply: `after_stop` or `after_cut`, then the first of the others' replies, and after
    each of them its element of `suffixes`.

    `after_stop` continues a reply that ended with its stop, `after_cut` a truncated one, which must be closed first.
    """

    after_stop: tuple[int, ...]
    after_cut: tuple[int, ...]
    suffixes: tuple[tuple[int, ...], ...]

    def next_prompt(
        self, renderer: Renderer, prompt: list[int], own_reply: list[int], *heard: Sequence[int]
    ) -> list[int]:
        """prompt + own_reply + (end of turn, user text up to the placeholder) + others' ids + (rest, assistant header)."""
        stopped = len(strip_stop(renderer, own_reply)) < len(own_reply)
        before = self.after_stop if stopped else self.after_cut
        return [*prompt, *own_reply, *before, *_fill(renderer, self.suffixes, heard)]

    @property
    def longest(self) -> int:
        """Number of tokens without the replies."""
        return len(self.after_cut) + sum(map(len, self.suffixes))


def repeated(template: str, names: Sequence[str]) -> str:
    """The template with a placeholder for each turn that is heard, preceded by its speaker's name in `names` unless
    empty.
    """
    marks = [f"{name}\n{OPPONENT}" if name else OPPONENT for name in names]
    return template.replace(OPPONENT, "\n\n".join(marks))


def make_injection(renderer: Renderer, template: str) -> TurnInjection:
    """Split `template`, a user turn with one `{opponent}` for every turn that is heard, for this renderer.

    Raises:
        ConfigurationError: the tokenizer has no two unused special tokens to use as placeholders.
    """
    (own_text, own_id), (opponent_text, opponent_id) = _placeholders(renderer, template)
    tokens = renderer.build_generation_prompt(
        [
            {"role": "user", "content": "."},
            {"role": "assistant", "content": own_text},
            {"role": "user", "content": template.replace(OPPONENT, opponent_text)},
        ]
    ).to_ints()
    if tokens.count(own_id) != 1 or tokens.count(opponent_id) != template.count(OPPONENT):
        raise _placeholders_lost(renderer)
    after_cut, *suffixes = _split(tokens[tokens.index(own_id) + 1 :], opponent_id)
    return TurnInjection(
        after_stop=tuple(_without_leading_stop(renderer, after_cut)),
        after_cut=tuple(after_cut),
        # Without a placeholder nothing is inserted.
        suffixes=tuple(tuple(part) for part in suffixes),
    )


def opening_prompt(renderer: Renderer, messages: list[Message], heard: Sequence[Sequence[int]]) -> list[int]:
    """A first prompt whose last message has one `{opponent}` for every turn that is heard; the turns' ids replace them."""
    if not heard:
        return renderer.build_generation_prompt(messages).to_ints()
    last = messages[-1]
    assert isinstance(last["content"], str)
    _, (text, token) = _placeholders(renderer, last["content"])
    marked: Message = {"role": last["role"], "content": last["content"].replace(OPPONENT, text)}
    tokens = renderer.build_generation_prompt([*messages[:-1], marked]).to_ints()
    if tokens.count(token) != len(heard):
        raise _placeholders_lost(renderer)
    first, *suffixes = _split(tokens, token)
    return [*first, *_fill(renderer, suffixes, heard)]


def _fill(renderer: Renderer, suffixes: Sequence[Sequence[int]], heard: Sequence[Sequence[int]]) -> list[int]:
    tokens: list[int] = []
    for reply, suffix in zip(heard, suffixes, strict=True):
        tokens += [*_visible_part(renderer, reply), *suffix]
    return tokens


def _visible_part(renderer: Renderer, reply: Sequence[int]) -> list[int]:
    """The reply's ids without the stop and without reasoning that the renderer separates; judges do not see it either."""
    tokens = strip_stop(renderer, reply)
    text = reply_text(renderer, reply).strip()
    if not text or text == decode_reply(renderer, reply).strip():
        return tokens
    for start in range(len(tokens) - 1, -1, -1):
        if decode_tokens(renderer.tokenizer, tokens[start:]).strip() == text:
            return tokens[start:]
    return tokens


def _split(tokens: Sequence[int], mark: int) -> list[list[int]]:
    parts: list[list[int]] = [[]]
    for token in tokens:
        if token == mark:
            parts.append([])
        else:
            parts[-1].append(token)
    return parts


def _placeholders_lost(renderer: Renderer) -> ConfigurationError:
    return ConfigurationError(
        f"renderer {type(renderer).__name__} does not keep the placeholders of a debate turn; choose another renderer"
    )


def _without_leading_stop(renderer: Renderer, tokens: list[int]) -> list[int]:
    for stop in renderer.get_stop_sequences():
        if isinstance(stop, int):
            if tokens[:1] == [stop]:
                return tokens[1:]
            continue
        text = decode_tokens(renderer.tokenizer, tokens)
        if text.startswith(stop):
            return renderer.encode_text(text[len(stop) :])
    raise ConfigurationError(
        f"renderer {type(renderer).__name__} does not end an assistant turn with its stop sequence; it cannot carry a debate"
    )


def _placeholders(renderer: Renderer, template: str) -> tuple[tuple[str, int], tuple[str, int]]:
    tokenizer = renderer.tokenizer
    plain = renderer.build_generation_prompt(
        [{"role": "user", "content": "."}, {"role": "assistant", "content": "."}, {"role": "user", "content": template}]
    ).to_ints()
    spare = [
        (text, token)
        for token, text in sorted(((t, str(a)) for t, a in tokenizer.added_tokens_decoder.items()), reverse=True)
        if token not in plain
        and token not in renderer.control_ids
        and encode_text(tokenizer, text) == [token]
        # Tags that a renderer itself parses (thinking, tools) would change the rendering.
        and not any(word in text for word in ("think", "tool"))
    ]
    if len(spare) < 2:
        raise ConfigurationError(
            f"the tokenizer {typed(tokenizer).name_or_path!r} has {len(spare)} spare special tokens; a debate needs two to mark "
            "where turns are inserted. Use a model whose tokenizer has reserved tokens"
        )
    return spare[0], spare[1]
