"""Formats with one section for the tool calls of a message: rendering and parsing."""

import re
from collections.abc import Callable, Sequence

from tinker_cookbook.renderers.content import UNTERMINATED_TOOL_BLOCK_ERROR
from tinker_cookbook.renderers.types import Message, ToolCall, UnparsedToolCall


class CallSection:
    """begin, end: what opens and closes the section; between: what stands between two calls in it.

    call_begin, call_end: what opens and closes a call.
    """

    def __init__(self, begin: str, end: str, call_begin: str, call_end: str, between: str = "") -> None:
        self.begin, self.end, self.call_begin, self.call_end, self.between = begin, end, call_begin, call_end, between
        self._call = re.compile(f"{re.escape(call_begin)}(.*?){re.escape(call_end)}", re.DOTALL)

    def text(self, calls: Sequence[str], message: Message) -> str:
        """The rendered section with `calls`, and the message's unparsed calls."""
        unparsed = [call.raw_text for call in message.get("unparsed_tool_calls", [])]
        # What was read from inside a section goes back into one; a section that was never closed stands for itself.
        written = [*calls, *(raw for raw in unparsed if not raw.startswith(self.begin))]
        section = self.begin + self.between.join(written) + self.end if written else ""
        return section + "".join(raw for raw in unparsed if raw.startswith(self.begin))

    def read(self, body: str, read_call: Callable[[str], ToolCall], form: str) -> list[ToolCall | UnparsedToolCall]:
        """The calls in the text between begin and end, in order.

        read_call: parses the text between call_begin and call_end, and raises ValueError with the reason.
        form: the expected form of a call, for errors.
        """
        calls: list[ToolCall | UnparsedToolCall] = []
        end = 0
        for match in self._call.finditer(body):
            calls += self._no_call(body[end : match.start()], form)
            try:
                if self.call_begin in match.group(1):
                    raise ValueError(f"{UNTERMINATED_TOOL_BLOCK_ERROR}: {self.call_end} is missing")
                calls.append(read_call(match.group(1)))
            except ValueError as error:
                calls.append(UnparsedToolCall(raw_text=match.group(), error=str(error)))
            end = match.end()
        return [*calls, *self._no_call(body[end:], form)]

    def _no_call(self, text: str, form: str) -> list[UnparsedToolCall]:
        if not text.strip():
            return []
        is_open = self.call_begin in text
        error = f"{UNTERMINATED_TOOL_BLOCK_ERROR}: {self.call_end} is missing" if is_open else f"expected {form}"
        return [UnparsedToolCall(raw_text=text, error=error)]
