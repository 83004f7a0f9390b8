"""Formats whose prompt opens the think block of an answer, or also closes it if thinking is disabled.

A response of a thinking model begins inside the block: text before the first </think> is reasoning. A response without
</think> is a plain answer if it ended or called a tool, and reasoning if it was cut off, so that truncated reasoning is never
mistaken for an answer. A stream treats it as reasoning throughout.
"""

from typing import ClassVar

from tinker_cookbook.exceptions import RendererError
from tinker_cookbook.renderers.blocks import (
    THINK_CLOSE,
    TOOL_CLOSE,
    TOOL_OPEN,
    BlockKind,
    BlockScanner,
    LineBreaks,
    Piece,
)
from tinker_cookbook.renderers.content import assistant_message, parse_pieces, text_of, without_thinking
from tinker_cookbook.renderers.decoding import decode_tokens
from tinker_cookbook.renderers.formats import EndTokenRenderer
from tinker_cookbook.renderers.renderer import RenderContext
from tinker_cookbook.renderers.types import Message, ParseTermination, ToolCall, UnparsedToolCall


class OpenedThinkRenderer(EndTokenRenderer):
    """Parses such responses. A family defines how to parse its tool calls (`_read_calls`).

    tool_tags: opening and closing tag of a tool call, or of a section of calls.
    line_breaks: as in BlockScanner.
    """

    tool_tags: ClassVar[tuple[str, str]] = (TOOL_OPEN, TOOL_CLOSE)
    line_breaks: ClassVar[LineBreaks | None] = None

    def parse_response(self, response: list[int]) -> tuple[Message, ParseTermination]:
        """As in EndTokenRenderer; empty blocks are dropped."""
        tokens, termination = self._split_ending(self._normalize_response_tokens(response))
        scanner = self._new_scanner()
        pieces = scanner.finish(decode_tokens(self.tokenizer, tokens))
        called = any(piece.kind in (BlockKind.TOOL_CALL, BlockKind.UNCLOSED_TOOL_CALL) for piece in pieces)
        if scanner.opening_unclosed and (termination.is_clean or called) and pieces[:1]:
            pieces[0] = pieces[0]._replace(kind=BlockKind.TEXT) if pieces[0].kind is BlockKind.THINKING else pieces[0]
        return self._message_of(pieces), termination

    def _new_scanner(self) -> BlockScanner:
        return BlockScanner(self.tool_tags, line_breaks=self.line_breaks, opened=not self.disables_thinking)

    def _message_of(self, pieces: list[Piece]) -> Message:
        # Drop empty blocks.
        following = [*(piece.kind for piece in pieces), None][1:]
        pieces = [
            piece
            for piece, after in zip(pieces, following, strict=True)
            if piece.kind is not BlockKind.THINK_START or after is BlockKind.THINKING
        ]
        parts, calls = parse_pieces(pieces, self.tool_tags, self._read_calls)
        # A string with </think> would be split into reasoning when it is rendered again.
        plain = all(part["type"] == "text" and THINK_CLOSE not in part["text"] for part in parts)
        return assistant_message(text_of(parts) if plain else parts, calls)

    def _read_calls(self, body: str) -> list[ToolCall | UnparsedToolCall]:
        """The calls between the tags, in order; text that is not a call becomes an UnparsedToolCall."""
        raise NotImplementedError

    def without_reasoning(self, message: Message) -> Message:
        return without_thinking(message) if self.disables_thinking else message

    def _check_reasoning(self, reasoning: str, ctx: RenderContext) -> None:
        """Raises RendererError for reasoning that cannot be rendered."""
        if THINK_CLOSE in reasoning:
            raise RendererError(
                f"message {ctx.idx}: its reasoning holds {THINK_CLOSE!r}, which would end it; remove it"
            )
