"""A sampled reply without its stop: as token ids for another agent's prompt, as text for rewards, judges and people."""

from collections.abc import Sequence

from tinker_cookbook.exceptions import RendererError
from tinker_cookbook.renderers import Message, ParseTermination, Renderer, get_text_content
from tinker_cookbook.renderers.decoding import decode_tokens
from tinker_cookbook.tokenizer_utils import Tokenizer


def strip_stop(renderer: Renderer, tokens: Sequence[int]) -> list[int]:
    """The reply's ids without the stop that ended it; unchanged when it was cut off.

    A stop token is one id. For a stop string, tokens entirely inside it are removed; one that also contains text stays.
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
    """The reply's text without the stop. It is never encoded again."""
    text = decode_tokens(renderer.tokenizer, list(tokens))
    for stop in renderer.get_stop_sequences():
        if isinstance(stop, int):
            if tokens and tokens[-1] == stop:
                return decode_tokens(renderer.tokenizer, list(tokens[:-1]))
        elif stop in text:
            return text[: text.index(stop)]
    return text


def reply_text(renderer: Renderer, tokens: Sequence[int]) -> str:
    """The reply's content for rewards and judges: the message's text, without reasoning that the renderer separates."""
    message, _ = renderer.parse_response(list(tokens))
    return get_text_content(message)


def parse_response_for_stop_token(
    response: list[int], tokenizer: Tokenizer, stop_token: int
) -> tuple[Message, ParseTermination]:
    """The text before `stop_token` as an assistant message; without it the whole text, and MALFORMED (truncated).

    Raises RendererError when `stop_token` occurs more than once: the sampler used other stops.
    """
    if response.count(stop_token) > 1:
        raise RendererError(
            f"the stop token {stop_token} is in the response {response.count(stop_token)} times, so it did not stop the "
            "sampler: give get_stop_sequences() to SamplingParams.stop"
        )
    stopped = stop_token in response
    text = decode_tokens(tokenizer, response[: response.index(stop_token)] if stopped else response)
    termination = ParseTermination.STOP_SEQUENCE if stopped else ParseTermination.MALFORMED
    return Message(role="assistant", content=text), termination
