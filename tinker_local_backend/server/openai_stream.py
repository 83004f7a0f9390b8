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
from tinker_local_backend.server.chat_text import TOOL_CALL_BEGIN, ChatText
from tinker_local_backend.server.openai_schemas import ChatBody, CompletionBody

UNFINISHED = "�"
"""What a decoder writes for an incomplete character."""

Piece = dict[str, Any]


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
        self._stops = list(stops)
        self._markers = [*stops, TOOL_CALL_BEGIN] if with_tools else list(stops)
        self._with_tools = with_tools
        self._tokens: list[int] = []
        self._whole = ""
        self._emitted = 0
        self._prefix, self._read = 0, 0

    def feed(self, tokens: Sequence[int]) -> str:
        """Add tokens. Returns the new text that can no longer change."""
        self._tokens += [token for token in tokens if token not in self._ends]
        # Decoding from a few tokens back shows what the new ones add, including spaces between words.
        before = self._text.text(self._tokens[self._prefix : self._read])
        after = self._text.text(self._tokens[self._prefix :])
        if len(after) > len(before) and not after.endswith(UNFINISHED):
            self._whole += after[len(before) :]
            self._prefix, self._read = self._read, len(self._tokens)
        return self._emit(self._stable_length())

    def end(self, text: str) -> str:
        """The rest of the text, given the full text of the non-streamed reply."""
        self._whole = text
        return self._emit(len(text))

    def _emit(self, until: int) -> str:
        piece = self._whole[self._emitted : until]
        self._emitted = max(self._emitted, until)
        return piece

    def _stable_length(self) -> int:
        """Length of the text before any marker, or any start of one."""
        positions = [at for marker in self._markers if (at := self._whole.find(marker)) >= 0]
        if positions:
            return len(self._whole[: min(positions)].rstrip()) if self._with_tools else min(positions)
        begun = max((_overlap(self._whole, marker) for marker in self._markers), default=0)
        safe = self._whole[: len(self._whole) - begun]
        return len(safe.rstrip()) if self._with_tools else len(safe)


def _overlap(text: str, marker: str) -> int:
    """Length of the longest suffix of the text that the marker starts with."""
    return next((size for size in range(min(len(text), len(marker) - 1), 0, -1) if text.endswith(marker[:size])), 0)


class Choices:
    """The choices of one streamed request, as chunks of a chat or text completion."""

    def __init__(self, body: ChatBody | CompletionBody, text: ChatText, eos_token_ids: Sequence[int], with_tools: bool):
        self._body, self._text = body, text
        ends = [*eos_token_ids, *(body.stop_token_ids or [])]
        self._head: Piece = openai_replies.head(body)
        self._texts: dict[int, TextSoFar] = {}
        self._make_text = lambda: TextSoFar(text, ends, body.stops, with_tools)
        self._offsets: dict[int, int] = {}

    def begin(self, count: int) -> Iterator[Piece]:
        """Chunks before the first token."""
        for index in range(count):
            self._texts[index] = self._make_text()
            if isinstance(self._body, ChatBody):
                yield self._chunk(index, {"delta": {"role": "assistant", "content": ""}, "logprobs": None})

    def grow(self, index: int, delta: dict[str, Any]) -> Piece:
        """A chunk of new tokens (operations.Progress). Its text may be empty, but logprobs are never held back."""
        words = self._texts[index].feed(delta["tokens"])
        sequence = _sequence(delta)
        choice: Piece = {"logprobs": None}
        if isinstance(self._body, ChatBody):
            choice["delta"] = {"content": words}
            if self._body.logprobs:
                entries = openai_replies.token_logprobs(self._text, sequence, self._body.top_logprobs or 0)
                choice["logprobs"] = {"content": entries}
        else:
            choice["text"] = words
            if self._body.logprobs is not None:
                scores = openai_replies.sampled_logprobs(self._body, self._text, sequence, self._offsets.get(index, 0))
                self._offsets[index] = scores["text_offset"][-1] + len(scores["tokens"][-1])
                choice["logprobs"] = scores
        if self._body.return_token_ids:
            choice["token_ids"] = sequence.tokens
        return self._chunk(index, choice)

    def end(self, index: int, choice: Piece) -> Iterator[Piece]:
        """The rest of a choice, from the non-streamed reply: held back text, tool calls, finish reason."""
        if not isinstance(self._body, ChatBody):
            rest = self._texts[index].end(choice["text"])
            yield self._chunk(index, {"text": rest, "logprobs": None}, choice["finish_reason"])
            return
        message = choice["message"]
        if rest := self._texts[index].end(message["content"] or ""):
            yield self._chunk(index, {"delta": {"content": rest}, "logprobs": None})
        for call_index, call in enumerate(message.get("tool_calls", [])):
            yield self._chunk(index, {"delta": {"tool_calls": [{"index": call_index, **call}]}, "logprobs": None})
        yield self._chunk(index, {"delta": {}, "logprobs": None}, choice["finish_reason"])

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
