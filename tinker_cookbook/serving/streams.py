"""What a reply says while its tokens arrive: text and reasoning, never tool calls."""

from collections.abc import Sequence
from typing import Protocol

from tinker_cookbook.renderers import Renderer, StreamingTextDelta, StreamingThinkingDelta
from tinker_cookbook.renderers.content import text_of, thinking_of
from tinker_cookbook.renderers.formats import EndTokenRenderer

_REREADS = 16
"""A reply that is read anew while it grows is read each time it has grown by this part of its length: 1/16."""
_INCOMPLETE = "\ufffd"


class ReplyStream(Protocol):
    """One reply."""

    def feed(self, tokens: Sequence[int]) -> tuple[str, str]:
        """(text, reasoning) that became certain with these tokens."""
        ...


def reply_stream(renderer: Renderer) -> ReplyStream:
    return _Scanned(renderer) if isinstance(renderer, EndTokenRenderer) else _Reread(renderer)


class _Scanned:
    """By the renderer's own parser of streams."""

    def __init__(self, renderer: EndTokenRenderer) -> None:
        self._parser = renderer.streaming_parser()
        self._reasoning = ""
        self._said = False

    def feed(self, tokens: Sequence[int]) -> tuple[str, str]:
        text = reasoning = ""
        for token in tokens:
            for delta in self._parser.feed(token):
                if isinstance(delta, StreamingThinkingDelta):
                    reasoning += delta.thinking
                    self._reasoning += delta.thinking
                elif isinstance(delta, StreamingTextDelta):
                    # Before a call without a </think>, what passed for reasoning was text.
                    if not self._said and self._parser.opening_unclosed:
                        text += self._reasoning
                    self._said = True
                    text += delta.text
        return text, reasoning


class _Reread:
    """Of a renderer that reads whole replies alone: by reading what there is so far, now and then."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._tokens: list[int] = []
        self._read_at = 0
        self._text = self._reasoning = ""

    def feed(self, tokens: Sequence[int]) -> tuple[str, str]:
        self._tokens += tokens
        if (len(self._tokens) - self._read_at) * _REREADS < self._read_at:
            return "", ""
        self._read_at = len(self._tokens)
        content = self._renderer.parse_response(self._tokens)[0]["content"]
        text, reasoning = self._certain(text_of(content)), self._certain(thinking_of(content))
        new = _growth(self._text, text), _growth(self._reasoning, reasoning)
        self._text, self._reasoning = self._text + new[0], self._reasoning + new[1]
        return new

    def _certain(self, text: str) -> str:
        """Without what may become a character, or a stop sequence."""
        text = text.rstrip(_INCOMPLETE)
        stops = [stop for stop in self._renderer.get_stop_sequences() if isinstance(stop, str)]
        begun = max((n for stop in stops for n in range(len(stop)) if text.endswith(stop[:n])), default=0)
        return text[: len(text) - begun]


def _growth(before: str, now: str) -> str:
    return now[len(before) :] if now.startswith(before) else ""
