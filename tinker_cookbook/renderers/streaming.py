"""Streaming parse of a reply: feed one token, get deltas, and the whole message at the end."""

from collections.abc import Callable, Iterator

from tinker_cookbook.renderers.blocks import BlockKind, BlockScanner, Piece
from tinker_cookbook.renderers.decoding import Utf8TokenDecoder
from tinker_cookbook.renderers.types import (
    Message,
    MessageDelta,
    ParseTermination,
    StreamingMessageHeader,
    StreamingTextDelta,
    StreamingThinkingDelta,
)
from tinker_cookbook.tokenizer_utils import Tokenizer


class StreamingParser:
    """Yields text as deltas. `feed` takes one token at a time, `finish` yields the rest and then the Message.

    Args:
        tokenizer: turns tokens into text; a character whose bytes span tokens is held back until it is whole.
        end_message_token: tokens after it give no deltas.
        parse_final_response: makes the Message from all tokens, including those after the end.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        end_message_token: int,
        parse_final_response: Callable[[list[int]], tuple[Message, ParseTermination]],
    ) -> None:
        self.tokenizer = tokenizer
        self.end_message_token = end_message_token
        self.parse_final_response = parse_final_response
        self.reset()

    def reset(self) -> None:
        """Start with a new reply."""
        self._decoder, self._scanner = Utf8TokenDecoder(self.tokenizer), self._new_scanner()
        self._seen: list[int] = []
        self._began = self._ended = False

    @property
    def opening_unclosed(self) -> bool:
        """Whether the reasoning so far may turn out to be text, because no </think> has closed the prompt's block."""
        return self._scanner.opening_unclosed

    def feed(self, token: int) -> Iterator[MessageDelta]:
        """The header before the first token, and the deltas completed by `token`."""
        yield from self._header()
        self._seen.append(token)
        self._ended = self._ended or self._ends(token)
        if not self._ended:
            yield from _deltas(self._scanner.feed(self._decoder.decode([token])))

    def finish(self) -> Iterator[MessageDelta]:
        """The last deltas, then the Message."""
        yield from self._header()
        yield from _deltas(self._scanner.finish(self._decoder.flush()))
        yield self.parse_final_response(self._seen)[0]

    def _header(self) -> Iterator[MessageDelta]:
        if not self._began:
            self._began = True
            yield StreamingMessageHeader(role="assistant")

    def _ends(self, token: int) -> bool:
        return token == self.end_message_token

    def _new_scanner(self) -> BlockScanner:
        """The scanner of the reply; by default everything is text."""
        return BlockScanner(tool_tags=None, thinks=False, line_breaks=None)


class ReasoningStreamingParser(StreamingParser):
    """Text and, between <think> and </think>, reasoning as deltas. All white space is part of them."""

    def _new_scanner(self) -> BlockScanner:
        return BlockScanner(tool_tags=None, line_breaks=None)


def _deltas(pieces: list[Piece]) -> Iterator[MessageDelta]:
    for piece in pieces:
        if piece.kind is BlockKind.TEXT:
            yield StreamingTextDelta(piece.text)
        elif piece.kind is BlockKind.THINKING:
            yield StreamingThinkingDelta(piece.text)
