"""A scanner for text with think blocks and tool calls, fed in pieces of any size.

The same scanner serves one-shot parsing and streaming, so that both always agree. The families differ in the tags of
tool calls, in the line breaks that a format adds around blocks (Qwen3's has one inside each think tag, two after
</think>, one before <tool_call>), and in whether the prompt opens the first block. Exactly these line breaks are
removed: writing the pieces in canonical form reproduces the model's text.
"""

from enum import Enum
from typing import NamedTuple

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
TOOL_OPEN, TOOL_CLOSE = "<tool_call>", "</tool_call>"


class BlockKind(Enum):
    """Kind of a piece of a response."""

    TEXT = "text"
    THINK_START = "think_start"
    THINKING = "thinking"
    TOOL_CALL = "tool_call"
    UNCLOSED_TOOL_CALL = "unclosed_tool_call"


class Piece(NamedTuple):
    """TEXT and THINKING arrive in fragments; THINK_START opens a block, which may stay empty; tool calls arrive whole."""

    kind: BlockKind
    text: str


class LineBreaks(NamedTuple):
    """Number of line breaks after <think>, before </think>, after it, and before a tool call that follows text."""

    after_open: int = 1
    before_close: int = 1
    after_close: int = 2
    before_call: int = 1


QWEN3_BREAKS = LineBreaks()


class BlockScanner:
    """Feed text with `feed`, end with `finish`; both return the pieces that are complete by then.

    Args:
        tool_tags: opening and closing tag of a tool call; None: tool calls are text.
        thinks: whether think tags open and close blocks; otherwise they are text.
        line_breaks: those that the format adds around blocks, which are not content; None for a format that adds
            none, not even between tool calls.
        opened: whether the prompt may have opened a think block. If so, text before the first </think> or tool
            call is treated as reasoning; `opening_unclosed` is True until a </think> confirms it.
    """

    def __init__(
        self,
        tool_tags: tuple[str, str] | None = (TOOL_OPEN, TOOL_CLOSE),
        thinks: bool = True,
        line_breaks: LineBreaks | None = QWEN3_BREAKS,
        opened: bool = False,
    ) -> None:
        self._opening_tags = ((THINK_OPEN,) if thinks else ()) + (tool_tags[:1] if tool_tags else ())
        self._tool_close = tool_tags[1] if tool_tags else ""
        self._separates_calls = line_breaks is not None
        self._breaks = line_breaks or LineBreaks(0, 0, 0, 0)
        self._kind = BlockKind.THINKING if opened else BlockKind.TEXT
        self._at_start = self._in_opening = self.opening_unclosed = opened
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
        # The response may begin with <think> if the prompt does not supply it.
        if self._at_start:
            if self._buffer.startswith(THINK_OPEN):
                self._buffer = self._buffer.removeprefix(THINK_OPEN)
                self._newlines_to_drop = self._breaks.after_open
                self._in_opening = self.opening_unclosed = False
            elif THINK_OPEN.startswith(self._buffer) and not final:
                return []
            self._at_start = False
        pieces: list[Piece] = []
        while self._step(pieces, final):
            pass
        return pieces

    def _tags(self) -> tuple[str, ...]:
        """The tags that end the current piece."""
        if self._kind is BlockKind.TEXT:
            return self._opening_tags
        if self._kind is BlockKind.TOOL_CALL:
            return (self._tool_close,)
        return (THINK_CLOSE, *self._opening_tags[1:]) if self._in_opening else (THINK_CLOSE,)

    def _step(self, pieces: list[Piece], final: bool) -> bool:
        """Consume up to and including the next tag. Returns False if the buffer has no further complete tag."""
        self._drop_format_newlines()
        tags = self._tags()
        hits = [(at, tag) for tag in tags if (at := self._buffer.find(tag)) >= 0]
        if hits:
            at, tag = min(hits)
            before, self._buffer = self._buffer[:at], self._buffer[at + len(tag) :]
            for _ in range(self._breaks_before(tag)):
                before = before.removesuffix("\n")
            self._emit(pieces, before, final=True)
            self._enter(tag, pieces)
            return True
        if self._kind is not BlockKind.TOOL_CALL:
            num_complete = len(self._buffer) - (0 if final else self._incomplete_suffix(tags))
            text, self._buffer = self._buffer[:num_complete], self._buffer[num_complete:]
            self._emit(pieces, text, final)
        elif final:
            pieces.append(Piece(BlockKind.UNCLOSED_TOOL_CALL, self._buffer))
            self._buffer = ""
        return False

    def _enter(self, tag: str, pieces: list[Piece]) -> None:
        """Continue after `tag`."""
        if self._in_opening:
            self._in_opening, self.opening_unclosed = False, tag != THINK_CLOSE
        self._after_tool_call = self._separates_calls and self._kind is BlockKind.TOOL_CALL
        self._newlines_to_drop = 0
        if tag == THINK_OPEN:
            self._kind = BlockKind.THINKING
            pieces.append(Piece(BlockKind.THINK_START, ""))
        elif tag in self._opening_tags:
            self._kind = BlockKind.TOOL_CALL
        else:
            self._kind = BlockKind.TEXT
        self._newlines_to_drop = {THINK_OPEN: self._breaks.after_open, THINK_CLOSE: self._breaks.after_close}.get(
            tag, 0
        )

    def _breaks_before(self, tag: str) -> int:
        """Number of line breaks before `tag` that belong to it."""
        if tag == THINK_OPEN or self._kind is BlockKind.TOOL_CALL:
            return 0
        return self._breaks.before_close if tag == THINK_CLOSE else self._breaks.before_call

    def _emit(self, pieces: list[Piece], text: str, final: bool) -> None:
        # White space between tool calls, or after the last one, belongs to the format.
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

    def _incomplete_suffix(self, tags: tuple[str, ...]) -> int:
        """Length of the suffix of the buffer that may become a tag, or line breaks that belong to a tag."""
        longest = max((n for tag in tags for n in range(len(tag)) if self._buffer.endswith(tag[:n])), default=0)
        before = self._buffer[: len(self._buffer) - longest]
        breaks = max((self._breaks_before(tag) for tag in tags), default=0)
        return longest + min(breaks, len(before) - len(before.rstrip("\n")))
