"""Streams of the OpenAI-compatible routes: server-sent events, token by token, that add up to the reply that is not streamed."""

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
"""What a decoder writes for a character of which bytes are missing."""

Piece = dict[str, Any]


class TextSoFar:
    """The text of a sample that grows. What may still change, or turn out to be no text, is held back.

    Args:
        ends: token ids that end the sample and are no part of its text.
        stops: strings at which the text ends.
        with_tools: the text up to the first call of a tool is all that is given out before the end.
    """

    def __init__(self, text: ChatText, ends: Sequence[int], stops: Sequence[str], with_tools: bool):
        self._text = text
        self._ends = frozenset(ends)
        self._stops = list(stops)
        self._markers = [*stops, TOOL_CALL_BEGIN] if with_tools else list(stops)
        self._with_tools = with_tools
        self._tokens: list[int] = []
        self._whole = ""
        self._given = 0
        self._prefix, self._read = 0, 0

    def add(self, tokens: Sequence[int]) -> str:
        """What can be given out of it now."""
        self._tokens += [token for token in tokens if token not in self._ends]
        # Decoding from a few tokens back is enough to see what the new ones add, spaces of a word's begin included.
        before = self._text.text(self._tokens[self._prefix : self._read])
        after = self._text.text(self._tokens[self._prefix :])
        if len(after) > len(before) and not after.endswith(UNFINISHED):
            self._whole += after[len(before) :]
            self._prefix, self._read = self._read, len(self._tokens)
        return self._give(self._safe())

    def end(self, said: str) -> str:
        """The rest of what the sample says, as the reply that is not streamed has it."""
        self._whole = said
        return self._give(len(said))

    def _give(self, until: int) -> str:
        piece = self._whole[self._given : until]
        self._given = max(self._given, until)
        return piece

    def _safe(self) -> int:
        """How much of the text no marker can take back."""
        found = [at for marker in self._markers if (at := self._whole.find(marker)) >= 0]
        if found:
            return len(self._whole[: min(found)].rstrip()) if self._with_tools else min(found)
        begun = max((_overlap(self._whole, marker) for marker in self._markers), default=0)
        safe = self._whole[: len(self._whole) - begun]
        return len(safe.rstrip()) if self._with_tools else len(safe)


def _overlap(text: str, marker: str) -> int:
    """Length of the longest end of the text with which the marker begins."""
    return next((size for size in range(min(len(text), len(marker) - 1), 0, -1) if text.endswith(marker[:size])), 0)


class Choices:
    """The choices of one streamed request, as chunks of a chat or of a text completion."""

    def __init__(self, body: ChatBody | CompletionBody, text: ChatText, eos_token_ids: Sequence[int], with_tools: bool):
        self._body, self._text = body, text
        ends = [*eos_token_ids, *(body.stop_token_ids or [])]
        self._head: Piece = openai_replies.head(body)
        self._texts: dict[int, TextSoFar] = {}
        self._make_text = lambda: TextSoFar(text, ends, body.stops, with_tools)
        self._offsets: dict[int, int] = {}

    def begin(self, count: int) -> Iterator[Piece]:
        """Chunks that come before any token."""
        for index in range(count):
            self._texts[index] = self._make_text()
            if isinstance(self._body, ChatBody):
                yield self._chunk(index, {"delta": {"role": "assistant", "content": ""}, "logprobs": None})

    def grow(self, index: int, news: dict[str, Any]) -> Piece:
        """A chunk of new tokens (operations.Progress). Its text may be empty: their logprobs come with the tokens."""
        words = self._texts[index].add(news["tokens"])
        sequence = _sequence(news)
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
        """The rest of a choice, from the reply that is not streamed: text that was held back, calls, how it ended."""
        if not isinstance(self._body, ChatBody):
            rest = self._texts[index].end(choice["text"])
            yield self._chunk(index, {"text": rest, "logprobs": None}, choice["finish_reason"])
            return
        message = choice["message"]
        if rest := self._texts[index].end(message["content"] or ""):
            yield self._chunk(index, {"delta": {"content": rest}, "logprobs": None})
        for place, call in enumerate(message.get("tool_calls", [])):
            yield self._chunk(index, {"delta": {"tool_calls": [{"index": place, **call}]}, "logprobs": None})
        yield self._chunk(index, {"delta": {}, "logprobs": None}, choice["finish_reason"])

    def usage(self, usage: Piece) -> Piece:
        """The chunk that `include_usage` asks for."""
        return {**self._head, "choices": [], "usage": usage}

    def _chunk(self, index: int, choice: Piece, finish_reason: str | None = None) -> Piece:
        return {**self._head, "choices": [{"index": index, **choice, "finish_reason": finish_reason}]}


def _sequence(news: dict[str, Any]) -> SampledSequence:
    topk = None
    if news["topk"]:
        ids, logprobs = (np.array(rows) for rows in zip(*news["topk"], strict=True))
        topk = TopkLogprobs(ids.astype(np.int32), logprobs.astype(np.float32))
    return SampledSequence(
        stop_reason="length",
        sequence_id="",
        tokens_np=np.array(news["tokens"], dtype=np.int32),
        logprobs_np=np.array(news["logprobs"], dtype=np.float32),
        topk_logprobs_np=topk,
    )


async def events(pieces: AsyncGenerator[Piece]) -> AsyncGenerator[str]:
    """Server-sent events, with the end that clients wait for."""
    async with aclosing(pieces):
        async for piece in pieces:
            yield f"data: {json.dumps(piece)}\n\n"
    yield "data: [DONE]\n\n"
