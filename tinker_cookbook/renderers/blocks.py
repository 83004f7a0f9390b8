"""A scanner for text with <think> and <tool_call> blocks, fed in pieces of any size.

The same scanner serves parsing in one go and streaming, so the two cannot disagree. It takes off the line breaks that
the format itself adds around blocks, and no more: one inside each think tag, two after </think>, one before
<tool_call>. Writing the pieces back in canonical form therefore gives the text that the model wrote.
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
    """Feed text with `feed`, end with `finish`; both return the pieces that are settled by then."""

    def __init__(self) -> None:
        self._kind = BlockKind.TEXT
        self._buffer = ""
        self._newlines_to_drop = 0
        self._after_tool_call = False

    def feed(self, text: str) -> list[Piece]:
        self._buffer += text
        return self._scan(final=False)

    def finish(self) -> list[Piece]:
        return self._scan(final=True)

    def _scan(self, final: bool) -> list[Piece]:
        pieces: list[Piece] = []
        while self._step(pieces, final):
            pass
        return [piece for piece in pieces if piece.text or piece.kind is not BlockKind.TEXT]

    def _step(self, pieces: list[Piece], final: bool) -> bool:
        """Consume up to and including the next tag. False when the buffer holds no further whole tag."""
        if self._kind is BlockKind.TOOL_CALL:
            return self._step_tool_call(pieces, final)
        self._drop_format_newlines()
        thinking = self._kind is BlockKind.THINKING
        tags = (THINK_CLOSE,) if thinking else (THINK_OPEN, TOOL_OPEN)
        found = [(at, tag) for tag in tags if (at := self._buffer.find(tag)) >= 0]
        if not found:
            keep = 0 if final else _unsettled_suffix(self._buffer, tags)
            settled, self._buffer = self._buffer[: len(self._buffer) - keep], self._buffer[len(self._buffer) - keep :]
            self._emit(pieces, settled, final)
            return False
        at, tag = min(found)
        before, self._buffer = self._buffer[:at], self._buffer[at + len(tag) :]
        if tag in (THINK_CLOSE, TOOL_OPEN):
            before = before.removesuffix("\n")
        self._emit(pieces, before, final=True)
        self._enter(tag, pieces)
        return True

    def _enter(self, tag: str, pieces: list[Piece]) -> None:
        self._after_tool_call = False
        if tag == THINK_OPEN:
            self._kind, self._newlines_to_drop = BlockKind.THINKING, 1
            pieces.append(Piece(BlockKind.THINK_START, ""))
        elif tag == THINK_CLOSE:
            self._kind, self._newlines_to_drop = BlockKind.TEXT, 2
        else:
            self._kind, self._newlines_to_drop = BlockKind.TOOL_CALL, 0

    def _step_tool_call(self, pieces: list[Piece], final: bool) -> bool:
        body, close, rest = self._buffer.partition(TOOL_CLOSE)
        if close:
            pieces.append(Piece(BlockKind.TOOL_CALL, body))
            self._kind, self._buffer, self._after_tool_call = BlockKind.TEXT, rest, True
            return True
        if final:
            pieces.append(Piece(BlockKind.UNCLOSED_TOOL_CALL, body))
            self._kind, self._buffer = BlockKind.TEXT, ""
        return False

    def _emit(self, pieces: list[Piece], text: str, final: bool) -> None:
        # White space that only separates tool calls, or trails the last one, is format and not text.
        if self._after_tool_call and not text.strip():
            if not final:
                self._buffer = text + self._buffer
            return
        if text:
            self._after_tool_call = False
            pieces.append(Piece(self._kind, text))

    def _drop_format_newlines(self) -> None:
        while self._newlines_to_drop and self._buffer:
            if self._buffer[0] != "\n":
                self._newlines_to_drop = 0
                return
            self._buffer = self._buffer[1:]
            self._newlines_to_drop -= 1


def _unsettled_suffix(text: str, tags: tuple[str, ...]) -> int:
    """Length of the end of `text` that may turn out to be a tag, or the line break that belongs to one."""
    longest = max((n for tag in tags for n in range(len(tag)) if text.endswith(tag[:n])), default=0)
    return longest + (1 if text[: len(text) - longest].endswith("\n") else 0)
