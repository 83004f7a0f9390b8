"""The next prompt of a conversation as token ids: what was there, what was sampled, and only then what is new.

A renderer with the extension property promises that each prompt begins with the previous prompt plus the previous
response. This file keeps the promise for responses as they were sampled, however their text would be encoded: sampled ids
are taken over verbatim, and only the messages after them are rendered.
"""

from __future__ import annotations

from tinker_cookbook.renderers import Message, Renderer
from tinker_cookbook.renderers.base import merge_text_chunks, text_chunk
from tinker_cookbook.renderers.decoding import decode_tokens, encode_text
from tinker_cookbook.renderers.replies import strip_stop
from tinker_cookbook.utils.lazy import tinker


def continue_prompt(
    renderer: Renderer, prompt: tinker.ModelInput, response: list[int], reply: Message, following: list[Message]
) -> tinker.ModelInput | None:
    """prompt + response verbatim + (end of turn, if the response lacks one) + `following` + the assistant's header.

    Args:
        prompt: what the response was sampled from.
        response: sampled ids, with the stop that ended them if there was one.
        reply: the response as parsed; only its tool calls matter, because a tool's result may name its call.
        following: messages after the reply, none of which the model has seen.

    Returns:
        None when the format cannot go on like this: the renderer lacks the extension property, or the messages that follow
        do not begin with what ended the response (role_colon, where only a user may follow). Render anew then.
    """
    if not renderer.has_extension_property:
        return None
    stand_in: Message = {"role": "assistant", "content": "."}
    if calls := reply.get("tool_calls"):
        stand_in["tool_calls"] = calls
    before: list[Message] = [{"role": "user", "content": "."}, stand_in]
    spoken = renderer.build_supervised_example(before)[0].to_ints()
    first, *rest = renderer.build_generation_prompt([*before, *following]).chunks
    if not isinstance(first, tinker.EncodedTextChunk) or list(first.tokens[: len(spoken)]) != spoken:
        return None
    stopped = len(strip_stop(renderer, response)) < len(response)
    closing = [] if stopped else _stop_tokens(renderer, spoken)
    delta = text_chunk([*response, *closing, *first.tokens[len(spoken) :]])
    return tinker.ModelInput(chunks=merge_text_chunks([*prompt.chunks, *([delta] if delta else []), *rest]))


def _stop_tokens(renderer: Renderer, spoken: list[int]) -> list[int]:
    """The stop at the end of a rendered turn, in the tokens that the format writes it with."""
    for stop in renderer.get_stop_sequences():
        if isinstance(stop, int):
            if spoken[-1] == stop:
                return [stop]
            continue
        for length in range(1, len(spoken) + 1):
            text = decode_tokens(renderer.tokenizer, spoken[-length:])
            if text == stop:
                return spoken[-length:]
            if len(text) > len(stop):
                # A token reaches from the text into the stop, so the turn's own tokens cannot be cut there.
                return encode_text(renderer.tokenizer, stop)
    raise ValueError(f"renderer {type(renderer).__name__} does not end a turn with one of its stop sequences")
