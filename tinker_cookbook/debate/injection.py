"""The token ids between one's own turn and one's next: end of turn, the user's words, and the opponent's ids verbatim.

A conversation with placeholders is rendered once, [user][assistant: X][user: text with Y], and cut at X and Y, two special
tokens that occur nowhere else. What a model sampled is never decoded and encoded again; only our own template text is encoded.
"""

from __future__ import annotations

from dataclasses import dataclass

from tinker_cookbook.debate.prompts import OPPONENT
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.renderers import Renderer
from tinker_cookbook.renderers.decoding import decode_tokens, encode_text
from tinker_cookbook.renderers.replies import strip_stop


@dataclass(frozen=True)
class TurnInjection:
    """What follows one's own reply: `after_stop` or `after_cut`, then the opponent's reply, then `suffix`.

    `after_stop` continues a reply that ended with its stop, `after_cut` one that was truncated and must be closed first.
    """

    after_stop: tuple[int, ...]
    after_cut: tuple[int, ...]
    suffix: tuple[int, ...]

    def next_prompt(
        self, renderer: Renderer, prompt: list[int], own_reply: list[int], opponent_reply: list[int]
    ) -> list[int]:
        """prompt + own_reply + (end of turn, user text up to the placeholder) + opponent's ids + (rest, assistant header)."""
        stopped = len(strip_stop(renderer, own_reply)) < len(own_reply)
        before = self.after_stop if stopped else self.after_cut
        return [*prompt, *own_reply, *before, *strip_stop(renderer, opponent_reply), *self.suffix]


def make_injection(renderer: Renderer, template: str) -> TurnInjection:
    """Cut `template`, a user turn that holds `{opponent}` once or not at all, for this renderer.

    Raises:
        ConfigurationError: the tokenizer has no two spare special tokens to mark the places with.
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
        raise ConfigurationError(
            f"renderer {type(renderer).__name__} does not keep the placeholders of a debate turn; choose another renderer"
        )
    own_at = tokens.index(own_id)
    opponent_at = tokens.index(opponent_id) if OPPONENT in template else len(tokens)
    after_cut = tokens[own_at + 1 : opponent_at]
    return TurnInjection(
        after_stop=tuple(_without_leading_stop(renderer, after_cut)),
        after_cut=tuple(after_cut),
        suffix=tuple(tokens[opponent_at + 1 :]),
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
        # Tags that a renderer itself reads (thinking, tools) would change the rendering.
        and not any(word in text for word in ("think", "tool"))
    ]
    if len(spare) < 2:
        raise ConfigurationError(
            f"the tokenizer {tokenizer.name_or_path!r} has {len(spare)} spare special tokens; a debate needs two to mark "
            "where turns are inserted. Use a model whose tokenizer has reserved tokens"
        )
    return spare[0], spare[1]
