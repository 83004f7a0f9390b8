"""Formats in which one special token ends every message: reading a response up to that token, whole or as a stream.

A family says what its ending is and how messages are written; one whose responses hold more than text also says how
they are read (`_read_message`, `_new_scanner`).
"""

from collections.abc import Iterator
from typing import Protocol

from tinker_cookbook.exceptions import RendererError
from tinker_cookbook.renderers.base import RenderContext, RenderedMessage, Renderer, text_chunk
from tinker_cookbook.renderers.blocks import BlockKind, Piece
from tinker_cookbook.renderers.content import ensure_text
from tinker_cookbook.renderers.decoding import Utf8TokenDecoder, decode_tokens, encode_text, special_token_id
from tinker_cookbook.renderers.types import (
    Message,
    MessageDelta,
    ParseTermination,
    StreamingMessageHeader,
    StreamingTextDelta,
    StreamingThinkingDelta,
)
from tinker_cookbook.tokenizer_utils import Tokenizer


class Scanner(Protocol):
    """Takes apart text that arrives in pieces; both methods return what is settled by then."""

    def feed(self, text: str) -> list[Piece]: ...

    def finish(self) -> list[Piece]: ...


class PlainScanner:
    """For formats in which a response is text and nothing else."""

    def feed(self, text: str) -> list[Piece]:
        return [Piece(BlockKind.TEXT, text)]

    def finish(self) -> list[Piece]:
        return []


class EndTokenRenderer(Renderer):
    """Messages end in the special token `end_token`, which is also the stop sequence.

    Raises RendererError when the tokenizer has no single id for it.
    """

    supports_streaming = True

    def __init__(self, tokenizer: Tokenizer, end_token: str) -> None:
        super().__init__(tokenizer)
        self._end_id = special_token_id(tokenizer, end_token)

    @property
    def _end_message_token(self) -> int:
        return self._end_id

    def get_stop_sequences(self) -> list[int]:
        return [self._end_id]

    def _rendered(self, header: str, output: str) -> RenderedMessage:
        """Header and output, each encoded on its own: the prompt ends where the header ends."""
        chunk = text_chunk(encode_text(self.tokenizer, output))
        return RenderedMessage(
            header=text_chunk(encode_text(self.tokenizer, header)), output=[chunk] if chunk is not None else []
        )

    def parse_response(self, response: list[int]) -> tuple[Message, ParseTermination]:
        """STOP_SEQUENCE after the end token, EOS after another end-of-text token, else MALFORMED (cut off)."""
        return self._parse_response_for_streaming(response)

    def _parse_response_for_streaming(self, response: list[int]) -> tuple[Message, ParseTermination]:
        """The message with everything that was written, for families whose parse_response leaves something out."""
        tokens, termination = self._split_ending(self._normalize_response_tokens(response))
        return self._read_message(tokens), termination

    def _read_message(self, tokens: list[int]) -> Message:
        """The message in the tokens before the ending."""
        return Message(role="assistant", content=decode_tokens(self.tokenizer, tokens))

    def _split_ending(self, response: list[int]) -> tuple[list[int], ParseTermination]:
        """(tokens before the first ending, how it ended). Tokens after an ending make it MALFORMED."""
        at = next((i for i, token in enumerate(response) if self._ends_message(token)), len(response))
        if at != len(response) - 1:
            return response[:at], ParseTermination.MALFORMED
        stopped = response[at] == self._end_id
        return response[:at], ParseTermination.STOP_SEQUENCE if stopped else ParseTermination.EOS

    def _ends_message(self, token: int) -> bool:
        return token in (self._end_id, self.tokenizer.eos_token_id)

    def _ends_text(self, token: int) -> bool:
        """Whether nothing after `token` is shown in a stream."""
        return self._ends_message(token)

    def _new_scanner(self) -> Scanner:
        return PlainScanner()

    def parse_response_streaming(self, response: Iterator[int] | list[int]) -> Iterator[MessageDelta]:
        """Text and thinking as they settle; tool calls and the parsed Message come at the end."""
        yield StreamingMessageHeader(role="assistant")
        decoder, scanner = Utf8TokenDecoder(self.tokenizer), self._new_scanner()
        seen: list[int] = []
        ended = False
        for token in response:
            seen.append(token)
            # Tokens after an ending are read for the final verdict, but are no part of the message.
            ended = ended or self._ends_text(token)
            if not ended:
                yield from _deltas(scanner.feed(decoder.decode([token])))
        yield from _deltas(scanner.feed(decoder.flush()))
        yield from _deltas(scanner.finish())
        yield self.parse_response(seen)[0]


def text_only(message: Message, ctx: RenderContext, family: str) -> str:
    """The text of a message in a format that writes nothing else. Raises RendererError for anything more."""
    if message.get("tool_calls") or message.get("unparsed_tool_calls"):
        raise RendererError(
            f"message {ctx.idx} ({message['role']}) calls tools, and the {family} format has no tool calls: "
            "use a model and renderer that have them, such as qwen3"
        )
    return ensure_text(message["content"])


def _deltas(pieces: list[Piece]) -> Iterator[MessageDelta]:
    for piece in pieces:
        if piece.kind is BlockKind.TEXT and piece.text:
            yield StreamingTextDelta(piece.text)
        elif piece.kind is BlockKind.THINKING and piece.text:
            yield StreamingThinkingDelta(piece.text)
