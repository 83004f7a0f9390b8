"""Streamed text: never part of a character, a stop string, or the beginning of one."""

from __future__ import annotations

from collections.abc import Sequence

from tinker_local_backend.server.chat_text import TOOL_CALL_BEGIN, ChatText
from tinker_local_backend.server.token_bytes import UNFINISHED


class HeldBack:
    """A growing text. Text that may still become one of `markers` is held back, and so is all text from the first marker on.

    Args:
        strips: also hold back trailing white space, which is not part of the text if only a marker follows.
    """

    def __init__(self, markers: Sequence[str], strips: bool = False):
        self._markers, self._strips = list(markers), strips
        self._whole = ""
        self._emitted = 0

    def feed(self, text: str) -> str:
        """Add text. Returns the new text that can no longer change."""
        self._whole += text
        return self._emit(self._stable_length())

    def end(self, text: str) -> str:
        """The rest of the text, given the full text. The full text again if it does not continue the emitted part."""
        if not text.startswith(self._whole[: self._emitted]):
            self._emitted = 0
        self._whole = text
        return self._emit(len(text))

    def _emit(self, until: int) -> str:
        piece = self._whole[self._emitted : until]
        self._emitted = max(self._emitted, until)
        return piece

    def _stable_length(self) -> int:
        """Length of the text before any marker, or any start of one."""
        positions = [at for marker in self._markers if (at := self._whole.find(marker)) >= 0]
        partial = max((_overlap(self._whole, marker) for marker in self._markers), default=0)
        safe = min(positions) if positions else len(self._whole) - partial
        return len(self._whole[:safe].rstrip()) if self._strips else safe


class TextSoFar:
    """The text of a growing sample. Text that may still change, or become a stop string or tool call, is held back.

    Args:
        ends: token ids that end the sample and are not part of its text.
        stops: strings that end the text.
        with_tools: hold back all text from the first tool call on until the end.
    """

    def __init__(self, text: ChatText, ends: Sequence[int], stops: Sequence[str], with_tools: bool):
        self._text = text
        self._ends = frozenset(ends)
        self._shown = HeldBack([*stops, TOOL_CALL_BEGIN] if with_tools else stops, strips=with_tools)
        self._tokens: list[int] = []
        self._prefix, self._read = 0, 0

    def feed(self, tokens: Sequence[int]) -> str:
        """Add tokens. Returns the new text that can no longer change."""
        self._tokens += [token for token in tokens if token not in self._ends]
        # Decode from a few tokens back, because the text of new tokens, such as spaces, depends on the ones before.
        before = self._text.text(self._tokens[self._prefix : self._read])
        after = self._text.text(self._tokens[self._prefix :])
        if len(after) <= len(before) or after.endswith(UNFINISHED):
            return self._shown.feed("")
        self._prefix, self._read = self._read, len(self._tokens)
        return self._shown.feed(after[len(before) :])

    def end(self, text: str) -> str:
        """The rest of the text, given the full text of the non-streamed reply."""
        return self._shown.end(text)


def _overlap(text: str, marker: str) -> int:
    """Length of the longest suffix of the text that the marker starts with."""
    return next((size for size in range(min(len(text), len(marker) - 1), 0, -1) if text.endswith(marker[:size])), 0)
