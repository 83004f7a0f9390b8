"""A sampled reply without its stop: as token ids for another agent's prompt, as text for rewards, judges and people."""

from collections.abc import Sequence

from tinker_cookbook.renderers import Renderer, get_text_content
from tinker_cookbook.renderers.decoding import decode_tokens


def strip_stop(renderer: Renderer, tokens: Sequence[int]) -> list[int]:
    """The reply's ids without the stop that ended it; unchanged when it was cut off.

    A stop token is one id. Of a stop string the tokens that hold nothing but it go; one that also ends the reply stays.
    """
    reply = list(tokens)
    for stop in renderer.get_stop_sequences():
        if isinstance(stop, int):
            if reply and reply[-1] == stop:
                return reply[:-1]
            continue
        text = decode_tokens(renderer.tokenizer, reply)
        if stop in text:
            kept = text[: text.index(stop)]
            while reply and decode_tokens(renderer.tokenizer, reply[:-1]).startswith(kept):
                reply.pop()
            return reply
    return reply


def decode_reply(renderer: Renderer, tokens: Sequence[int]) -> str:
    """The reply's text without the stop. Never encoded again."""
    text = decode_tokens(renderer.tokenizer, list(tokens))
    for stop in renderer.get_stop_sequences():
        if isinstance(stop, int):
            if tokens and tokens[-1] == stop:
                return decode_tokens(renderer.tokenizer, list(tokens[:-1]))
        elif stop in text:
            return text[: text.index(stop)]
    return text


def reply_text(renderer: Renderer, tokens: Sequence[int]) -> str:
    """What the reply says, as rewards and judges read it: the message's text, without reasoning that the renderer sets apart."""
    message, _ = renderer.parse_response(list(tokens))
    return get_text_content(message)
