"""A scanner for what a DeepSeek-V3.1 model writes: reasoning up to </think>, text, and a section of tool calls.

The same scanner serves parsing in one go and streaming. Unlike blocks.py it drops nothing: this format puts no line
breaks around its tags, so the pieces and their tags, joined, are the text that was fed in.
"""

import json
import re
from enum import Enum

from tinker_cookbook.renderers.blocks import THINK_CLOSE, THINK_OPEN, BlockKind, Piece
from tinker_cookbook.renderers.types import ToolCall, UnparsedToolCall

CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
CALL_SEP = "<｜tool▁sep｜>"

_CALL = re.compile(f"{CALL_BEGIN}(.*?){CALL_END}", re.DOTALL)


class _State(Enum):
    OPENING = "opening"
    THINKING = "thinking"
    TEXT = "text"
    CALLS = "calls"


_KINDS = {
    _State.OPENING: BlockKind.THINKING,
    _State.THINKING: BlockKind.THINKING,
    _State.TEXT: BlockKind.TEXT,
    _State.CALLS: BlockKind.TOOL_CALL,
}


class DeepSeekScanner:
    """Feed text with `feed`, end with `finish`; both return the pieces that are settled by then.

    A TOOL_CALL piece is a whole section of calls. Whoever has the whole text gives it to `finish`: then every piece is
    a whole block, and none comes in fragments.

    thinks: whether the prompt may have opened a think block. If so, what comes before the first </think> or section of
        calls is taken for reasoning; `opening_unclosed` then tells whether a </think> has confirmed it. If not, think
        tags are text.
    """

    def __init__(self, thinks: bool) -> None:
        self._thinks = thinks
        self._state = _State.OPENING if thinks else _State.TEXT
        self._buffer = ""
        self._at_start = True
        self.opening_unclosed = thinks

    def feed(self, text: str) -> list[Piece]:
        self._buffer += text
        return self._scan(final=False)

    def finish(self, text: str = "") -> list[Piece]:
        self._buffer += text
        return self._scan(final=True)

    def _scan(self, final: bool) -> list[Piece]:
        pieces: list[Piece] = []
        if not self._past_leading_think_tag(final):
            return pieces
        while self._step(pieces, final):
            pass
        return [piece for piece in pieces if piece.text or piece.kind not in (BlockKind.TEXT, BlockKind.THINKING)]

    def _past_leading_think_tag(self, final: bool) -> bool:
        """False while it is open whether the response begins with <think>, as it may where the prompt supplies none."""
        if self._at_start and self._state is _State.OPENING:
            if self._buffer.startswith(THINK_OPEN):
                self._buffer, self._state = self._buffer.removeprefix(THINK_OPEN), _State.THINKING
                self.opening_unclosed = False
            elif THINK_OPEN.startswith(self._buffer) and not final:
                return False
        self._at_start = False
        return True

    def _tags(self) -> tuple[str, ...]:
        if self._state is _State.CALLS:
            return (CALLS_END,)
        if self._state is _State.THINKING:
            return (THINK_CLOSE,)
        if self._state is _State.OPENING:
            return (THINK_CLOSE, CALLS_BEGIN)
        return (THINK_OPEN, CALLS_BEGIN) if self._thinks else (CALLS_BEGIN,)

    def _step(self, pieces: list[Piece], final: bool) -> bool:
        """Consume up to and including the next tag. False when the buffer holds no further whole tag."""
        tags = self._tags()
        found = [(at, tag) for tag in tags if (at := self._buffer.find(tag)) >= 0]
        if found:
            at, tag = min(found)
            pieces.append(Piece(_KINDS[self._state], self._buffer[:at]))
            self._buffer = self._buffer[at + len(tag) :]
            if self._state is _State.OPENING and tag == THINK_CLOSE:
                self.opening_unclosed = False
            self._state = {THINK_OPEN: _State.THINKING, CALLS_BEGIN: _State.CALLS}.get(tag, _State.TEXT)
            return True
        if self._state is not _State.CALLS:
            keep = 0 if final else _start_of_tag(self._buffer, tags)
            settled, self._buffer = self._buffer[: len(self._buffer) - keep], self._buffer[len(self._buffer) - keep :]
            pieces.append(Piece(_KINDS[self._state], settled))
        elif final:
            pieces.append(Piece(BlockKind.UNCLOSED_TOOL_CALL, self._buffer))
            self._buffer = ""
        return False


def _start_of_tag(text: str, tags: tuple[str, ...]) -> int:
    """Length of the end of `text` that may turn out to be a tag."""
    return max(n for tag in tags for n in range(len(tag)) if text.endswith(tag[:n]))


def parse_calls(section: str) -> list[ToolCall | UnparsedToolCall]:
    """The calls between the two tokens of a section, in order; whatever is no call comes as UnparsedToolCall."""
    calls: list[ToolCall | UnparsedToolCall] = []
    end = 0
    for match in _CALL.finditer(section):
        calls += _between_calls(section[end : match.start()])
        calls.append(_parse_call(match.group(1)))
        end = match.end()
    return [*calls, *_between_calls(section[end:])]


def _between_calls(text: str) -> list[UnparsedToolCall]:
    if not text.strip():
        return []
    error = (
        f"{CALL_END} is missing" if CALL_BEGIN in text else f"expected {CALL_BEGIN}name{CALL_SEP}arguments{CALL_END}"
    )
    return [UnparsedToolCall(raw_text=text, error=error)]


def _parse_call(body: str) -> ToolCall | UnparsedToolCall:
    def unparsed(error: str) -> UnparsedToolCall:
        return UnparsedToolCall(raw_text=CALL_BEGIN + body + CALL_END, error=error)

    if CALL_BEGIN in body:
        return unparsed(f"{CALL_END} is missing")
    name, sep, arguments = body.partition(CALL_SEP)
    if not sep:
        return unparsed(f"{CALL_SEP} between name and arguments is missing")
    if not name or name != name.strip():
        return unparsed(f"the tool name {name!r} is empty or has spaces around it")
    try:
        is_object = isinstance(json.loads(arguments), dict)
    except (ValueError, RecursionError) as error:
        return unparsed(f"the arguments are not valid JSON: {error}")
    if not is_object:
        return unparsed("the arguments are no JSON object")
    # The arguments keep the model's own spelling, so that the call renders back.
    return ToolCall(function=ToolCall.FunctionBody(name=name, arguments=arguments))
