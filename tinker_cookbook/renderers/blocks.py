"""A scanner for text with think blocks and tool calls, fed in pieces of any size.

The same scanner serves parsing in one go and streaming, so the two cannot disagree. The families differ in the tags of
tool calls and in the line breaks that a format adds around blocks: Qwen's has one inside each think tag, two after
</think>, one before <tool_call>. These are taken off, and no more: writing the pieces back in canonical form gives the
text that the model wrote.
"""

from enum import Enum
from typing import NamedTuple

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
TOOL_OPEN, TOOL_CLOSE = "<tool_call>", "</tool_call>"


class BlockKind(Enum):
    """What a piece of a response is."""

    TEXT = "text"
    THINK_START = "think_start"
    THINKING = "thinking"
    TOOL_CALL = "tool_call"
    UNCLOSED_TOOL_CALL = "unclosed_tool_call"


class Piece(NamedTuple):
    """TEXT and THINKING come in fragments; THINK_START opens a block, which may stay empty; tool calls come whole."""

    kind: BlockKind
    text: str


class BlockScanner:
    """Feed text with `feed`, end with `finish`; both return the pieces that are settled by then.

    Args:
        tool_tags: what opens and what closes a tool call; None where tool calls are text.
        thinks: whether think tags open and close blocks; otherwise they are text.
        adds_line_breaks: whether the format puts line breaks around blocks, which are then no part of what was said.
    """

    def __init__(
        self,
        tool_tags: tuple[str, str] | None = (TOOL_OPEN, TOOL_CLOSE),
        thinks: bool = True,
        adds_line_breaks: bool = True,
    ) -> None:
        self._opening_tags = ((THINK_OPEN,) if thinks else ()) + (tool_tags[:1] if tool_tags else ())
        self._tool_close = tool_tags[1] if tool_tags else ""
        self._adds_line_breaks = adds_line_breaks
        self._kind = BlockKind.TEXT
        self._buffer = ""
        self._newlines_to_drop = 0
        self._after_tool_call = False

    def feed(self, text: str) -> list[Piece]:
        self._buffer += text
        return self._scan(final=False)

    def finish(self, text: str = "") -> list[Piece]:
        self._buffer += text
        return self._scan(final=True)

    def _scan(self, final: bool) -> list[Piece]:
        pieces: list[Piece] = []
        while self._step(pieces, final):
            pass
        return pieces

    def _tags(self) -> tuple[str, ...]:
        """The tags that end what is being read."""
        if self._kind is BlockKind.TEXT:
            return self._opening_tags
        return (THINK_CLOSE,) if self._kind is BlockKind.THINKING else (self._tool_close,)

    def _step(self, pieces: list[Piece], final: bool) -> bool:
        """Consume up to and including the next tag. False when the buffer holds no further whole tag."""
        self._drop_format_newlines()
        tags = self._tags()
        found = [(at, tag) for tag in tags if (at := self._buffer.find(tag)) >= 0]
        if found:
            at, tag = min(found)
            before, self._buffer = self._buffer[:at], self._buffer[at + len(tag) :]
            if self._adds_line_breaks and tag != THINK_OPEN and self._kind is not BlockKind.TOOL_CALL:
                before = before.removesuffix("\n")
            self._emit(pieces, before, final=True)
            self._enter(tag, pieces)
            return True
        if self._kind is not BlockKind.TOOL_CALL:
            settled = len(self._buffer) - (0 if final else self._unsettled_suffix(tags))
            text, self._buffer = self._buffer[:settled], self._buffer[settled:]
            self._emit(pieces, text, final)
        elif final:
            pieces.append(Piece(BlockKind.UNCLOSED_TOOL_CALL, self._buffer))
            self._buffer = ""
        return False

    def _enter(self, tag: str, pieces: list[Piece]) -> None:
        """Go on behind `tag`."""
        self._after_tool_call = self._adds_line_breaks and self._kind is BlockKind.TOOL_CALL
        self._newlines_to_drop = 0
        if tag == THINK_OPEN:
            self._kind = BlockKind.THINKING
            pieces.append(Piece(BlockKind.THINK_START, ""))
        elif tag in self._opening_tags:
            self._kind = BlockKind.TOOL_CALL
        else:
            self._kind = BlockKind.TEXT
        if self._adds_line_breaks:
            self._newlines_to_drop = {THINK_OPEN: 1, THINK_CLOSE: 2}.get(tag, 0)

    def _emit(self, pieces: list[Piece], text: str, final: bool) -> None:
        # White space that only separates tool calls, or trails the last one, is format and not text.
        if self._after_tool_call and not text.strip():
            if not final:
                self._buffer = text + self._buffer
            return
        if text or self._kind is BlockKind.TOOL_CALL:
            self._after_tool_call = False
            pieces.append(Piece(self._kind, text))

    def _drop_format_newlines(self) -> None:
        while self._newlines_to_drop and self._buffer:
            if self._buffer[0] != "\n":
                self._newlines_to_drop = 0
                return
            self._buffer = self._buffer[1:]
            self._newlines_to_drop -= 1

    def _unsettled_suffix(self, tags: tuple[str, ...]) -> int:
        """Length of the end of the buffer that may turn out to be a tag, or the line break that belongs to one."""
        longest = max((n for tag in tags for n in range(len(tag)) if self._buffer.endswith(tag[:n])), default=0)
        before = self._buffer[: len(self._buffer) - longest]
        return longest + (1 if self._adds_line_breaks and before.endswith("\n") else 0)
