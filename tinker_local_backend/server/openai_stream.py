"""Streams of the OpenAI-compatible routes: server-sent events per token, which add up to the non-streamed reply."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from typing import Any

import numpy as np
from tinker.types import SampledSequence
from tinker.types.topk_logprobs import TopkLogprobs

from tinker_local_backend.server import openai_replies
from tinker_local_backend.server.chat_format import ChatFormat
from tinker_local_backend.server.chat_text import ChatText
from tinker_local_backend.server.openai_schemas import ChatBody, CompletionBody
from tinker_local_backend.server.text_stream import HeldBack, TextSoFar

Piece = dict[str, Any]


class ReplySoFar:
    """Content and reasoning of a streamed chat reply. Text that may become a stop string is held back."""

    def __init__(self, chat_format: ChatFormat, ends: Sequence[int], stops: Sequence[str]):
        self._stream = chat_format.stream()
        self._ends = frozenset(ends)
        self._content, self._reasoning = HeldBack(stops), HeldBack(stops)

    def feed(self, tokens: Sequence[int]) -> Piece:
        """Add tokens. Returns the new part of the message."""
        content, reasoning = self._stream.feed([token for token in tokens if token not in self._ends])
        return _delta(self._content.feed(content), self._reasoning.feed(reasoning))

    def end(self, message: Piece) -> Piece:
        """The rest of content and reasoning, given the message of the non-streamed reply."""
        content, reasoning = message["content"] or "", message.get("reasoning_content", "")
        return _delta(self._content.end(content), self._reasoning.end(reasoning))


def _delta(content: str, reasoning: str) -> Piece:
    return {"content": content, **(openai_replies.reasoning_fields(reasoning) if reasoning else {})}


class Choices:
    """The choices of one streamed request, as chunks of a chat or text completion.

    Args:
        chat_format: format of the chat; None for a text completion.
    """

    def __init__(
        self,
        body: ChatBody | CompletionBody,
        text: ChatText,
        eos_token_ids: Sequence[int],
        chat_format: ChatFormat | None = None,
    ):
        self._body, self._text = body, text
        ends = [*eos_token_ids, *(body.stop_token_ids or [])]
        self._head: Piece = openai_replies.head(body)
        self._texts: dict[int, TextSoFar] = {}
        self._replies: dict[int, ReplySoFar] = {}
        self._make_text = lambda: TextSoFar(text, ends, body.stops, with_tools=False)
        self._make_reply = (lambda: ReplySoFar(chat_format, ends, body.stops)) if chat_format is not None else None
        self._offsets: dict[int, int] = {}

    def begin(self, count: int) -> Iterator[Piece]:
        """Chunks before the first token."""
        for index in range(count):
            if self._make_reply is None:
                self._texts[index] = self._make_text()
            else:
                self._replies[index] = self._make_reply()
                yield self._chunk(index, {"delta": {"role": "assistant", "content": ""}, "logprobs": None})

    def grow(self, index: int, delta: dict[str, Any]) -> Piece:
        """A chunk of new tokens (operations.Progress). Its text may be empty, but logprobs are never held back."""
        sequence = _sequence(delta)
        choice: Piece = {"logprobs": None}
        if isinstance(self._body, ChatBody):
            choice["delta"] = self._replies[index].feed(delta["tokens"])
            if self._body.logprobs:
                entries = openai_replies.token_logprobs(self._text, sequence, self._body.top_logprobs or 0)
                choice["logprobs"] = {"content": entries}
        else:
            choice["text"] = self._texts[index].feed(delta["tokens"])
            if self._body.logprobs is not None:
                scores = openai_replies.sampled_logprobs(self._body, self._text, sequence, self._offsets.get(index, 0))
                self._offsets[index] = scores["text_offset"][-1] + len(scores["tokens"][-1])
                choice["logprobs"] = scores
        if self._body.return_token_ids:
            choice["token_ids"] = sequence.tokens
        return self._chunk(index, choice)

    def end(self, index: int, choice: Piece) -> Iterator[Piece]:
        """The rest of a choice, from the non-streamed reply: held back text, tool calls, other keys of the message, and the
        finish reason."""
        if not isinstance(self._body, ChatBody):
            rest = self._texts[index].end(choice["text"])
            yield self._chunk(index, {"text": rest, "logprobs": None}, choice["finish_reason"])
            return
        message = choice["message"]
        if any((rest := self._replies[index].end(message)).values()):
            yield self._chunk(index, {"delta": rest, "logprobs": None})
        for call_index, call in enumerate(message.get("tool_calls", [])):
            yield self._chunk(index, {"delta": {"tool_calls": [{"index": call_index, **call}]}, "logprobs": None})
        others = {key: message[key] for key in openai_replies.FLAGS if key in message}
        yield self._chunk(index, {"delta": others, "logprobs": None}, choice["finish_reason"])

    def usage(self, usage: Piece) -> Piece:
        """The chunk for `include_usage`."""
        return {**self._head, "choices": [], "usage": usage}

    def _chunk(self, index: int, choice: Piece, finish_reason: str | None = None) -> Piece:
        return {**self._head, "choices": [{"index": index, **choice, "finish_reason": finish_reason}]}


def _sequence(delta: dict[str, Any]) -> SampledSequence:
    topk = None
    if delta["topk"]:
        ids, logprobs = (np.array(rows) for rows in zip(*delta["topk"], strict=True))
        topk = TopkLogprobs(ids.astype(np.int32), logprobs.astype(np.float32))
    return SampledSequence(
        stop_reason="length",
        sequence_id="",
        tokens_np=np.array(delta["tokens"], dtype=np.int32),
        logprobs_np=np.array(delta["logprobs"], dtype=np.float32),
        topk_logprobs_np=topk,
    )


async def events(pieces: AsyncGenerator[Piece]) -> AsyncGenerator[str]:
    """Server-sent events, with the end marker."""
    async with aclosing(pieces):
        async for piece in pieces:
            yield f"data: {json.dumps(piece)}\n\n"
    yield "data: [DONE]\n\n"
