"""Parse a reply while its tokens arrive, into text and reasoning, never tool calls."""

from collections.abc import Sequence
from typing import Protocol

from tinker_cookbook.renderers import Renderer, StreamingTextDelta, StreamingThinkingDelta, Utf8TokenDecoder
from tinker_cookbook.renderers.content import text_of, thinking_of
from tinker_cookbook.renderers.decoding import decode_tokens
from tinker_cookbook.renderers.formats import EndTokenRenderer
from tinker_cookbook.renderers.gpt_oss import CALL, END, ENDINGS, MESSAGE, START, GptOssRenderer, channel_and_recipient

_REREADS = 16
"""`_Reparsed` parses a reply again whenever it has grown by 1/16 of its length."""
_INCOMPLETE = "\ufffd"


class ReplyStream(Protocol):
    """The parser of one reply."""

    def feed(self, tokens: Sequence[int]) -> tuple[str, str]:
        """The (text, reasoning) that these tokens complete."""
        ...


def reply_stream(renderer: Renderer) -> ReplyStream:
    if isinstance(renderer, EndTokenRenderer):
        return _StreamParsed(renderer)
    return _Harmony(renderer) if isinstance(renderer, GptOssRenderer) else _Reparsed(renderer)


class _StreamParsed:
    """Uses the renderer's streaming parser."""

    def __init__(self, renderer: EndTokenRenderer) -> None:
        self._parser = renderer.streaming_parser()
        self._reasoning = ""
        self._has_text = False

    def feed(self, tokens: Sequence[int]) -> tuple[str, str]:
        text = reasoning = ""
        for token in tokens:
            for delta in self._parser.feed(token):
                if isinstance(delta, StreamingThinkingDelta):
                    reasoning += delta.thinking
                    self._reasoning += delta.thinking
                elif isinstance(delta, StreamingTextDelta):
                    # A call without a preceding </think>: the earlier reasoning was text.
                    if not self._has_text and self._parser.opening_unclosed:
                        text += self._reasoning
                    self._has_text = True
                    text += delta.text
        return text, reasoning


class _Harmony:
    """Message by message: the analysis channel is reasoning, a message with a recipient is a call."""

    def __init__(self, renderer: GptOssRenderer) -> None:
        self._tokenizer = renderer.tokenizer
        self._names = {token_id: name for name, token_id in renderer.ids.items()}
        self._header: list[int] | None = []
        """tokens of the header so far; None: within a body, or between two messages"""
        self._before_header = "assistant"  # the prompt has the first message's role
        self._body: Utf8TokenDecoder | None = None
        self._kind = ""
        self._held: str | None = None
        """text of a message that may still turn out to be a call, because it is in neither text channel"""
        self._over = False

    def feed(self, tokens: Sequence[int]) -> tuple[str, str]:
        new = {"text": "", "reasoning": "", "call": ""}
        for token in tokens:
            if not self._over:
                name = self._names.get(token, "")
                new[self._kind or "text"] += self._next(token, name)
        return new["text"], new["reasoning"]

    def _next(self, token: int, name: str) -> str:
        """The text of the current message that a token completes."""
        if self._body is not None:
            piece = self._body.flush() if name else self._body.decode([token])
            if self._held is not None:
                self._held += piece
                piece = self._held if name and name != CALL else ""
            if name:
                self._body, self._held, self._over = None, None, name != END
            return piece
        if self._header is None:
            self._header, self._before_header, self._over = [], "", name != START
        elif name == MESSAGE:
            header = self._before_header + decode_tokens(self._tokenizer, self._header)
            channel, recipient = channel_and_recipient(header)
            self._kind = "call" if recipient else "reasoning" if channel == "analysis" else "text"
            self._held = None if channel in ("analysis", "final") else ""
            self._header, self._body = None, Utf8TokenDecoder(self._tokenizer)
        elif name in (START, *ENDINGS):
            self._over = True
        else:
            self._header.append(token)
        return ""


class _Reparsed:
    """For a renderer that only parses whole replies: parses the tokens so far, at intervals."""

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
        """The text without an incomplete character or stop sequence at its end."""
        text = text.rstrip(_INCOMPLETE)
        stops = [stop for stop in self._renderer.get_stop_sequences() if isinstance(stop, str)]
        begun = max((n for stop in stops for n in range(len(stop)) if text.endswith(stop[:n])), default=0)
        return text[: len(text) - begun]


def _growth(before: str, now: str) -> str:
    return now[len(before) :] if now.startswith(before) else ""
