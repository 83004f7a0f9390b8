"""Replies of the OpenAI-compatible routes."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from tinker.types import SampledSequence, SampleResponse

from tinker_local_backend.server.chat_format import ChatFormat
from tinker_local_backend.server.chat_text import ChatText
from tinker_local_backend.server.openai_schemas import ChatBody, CompletionBody, OpenAIBody
from tinker_local_backend.server.token_bytes import token_bytes

FLAGS = ("unparsed_tool_calls", "tool_argument_errors")
"""Keys of a message for malformed tool calls, in addition to OpenAI's fields."""


def head(body: ChatBody | CompletionBody) -> dict[str, Any]:
    """The first fields of every reply and every chunk of a stream."""
    is_chat = isinstance(body, ChatBody)
    kind = "text_completion" if not is_chat else "chat.completion.chunk" if body.stream else "chat.completion"
    name = f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid.uuid4().hex}"
    return {"id": name, "object": kind, "created": int(time.time()), "model": body.model}


def usage(prompts: Sequence[Sequence[int]], responses: Sequence[SampleResponse]) -> dict[str, Any]:
    prompt_tokens = sum(map(len, prompts))
    sampled = sum(len(sequence.tokens) for response in responses for sequence in response.sequences)
    cached = sum(response.prompt_cache_hit_tokens or 0 for response in responses)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": sampled,
        "total_tokens": prompt_tokens + sampled,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def _completion_text(body: OpenAIBody, text: ChatText, eos_token_ids: Sequence[int], sequence: SampledSequence) -> str:
    """The text of a sample, without the end of turn or stop string that ended it."""
    tokens = sequence.tokens
    if sequence.stop_reason == "stop" and tokens and tokens[-1] in {*eos_token_ids, *(body.stop_token_ids or [])}:
        tokens = tokens[:-1]
    return text.text(tokens, body.stops)


def stopped_by(
    body: OpenAIBody, text: ChatText, eos_token_ids: Sequence[int], sequence: SampledSequence
) -> str | int | None:
    """vLLM's `stop_reason`: the stop string or the id of `stop_token_ids` that ended a sample; None for any other end."""
    if sequence.stop_reason != "stop" or not sequence.tokens:
        return None
    last = sequence.tokens[-1]
    if last in (body.stop_token_ids or ()):
        return last
    if last in eos_token_ids and not body.ignore_eos:
        return None
    whole = text.text(sequence.tokens)
    matches = [(whole.find(stop), stop) for stop in body.stops if stop in whole]
    return min(matches)[1] if matches else None


def reasoning_fields(reasoning: str) -> dict[str, str]:
    """Reasoning apart from content, under both names that clients read."""
    return {"reasoning_content": reasoning, "reasoning": reasoning}


def _message(
    body: ChatBody, text: ChatText, eos_token_ids: Sequence[int], sequence: SampledSequence, chat_format: ChatFormat
) -> dict[str, Any]:
    """The assistant's message. A stop string of the request ends its content and its reasoning."""
    tokens, last = sequence.tokens, sequence.tokens[-1] if sequence.tokens else None
    stopped = sequence.stop_reason == "stop" and last not in chat_format.stops
    at_end, at_stop = stopped and last in eos_token_ids, stopped and last in (body.stop_token_ids or ())
    parsed = chat_format.read(tokens[:-1] if at_end or at_stop else tokens, ended=at_end)
    message: dict[str, Any] = {"role": "assistant", "content": text.cut(parsed["content"], body.stops)}
    if reasoning := text.cut(parsed.get("reasoning_content", ""), body.stops):
        message |= reasoning_fields(reasoning)
    if calls := parsed.get("tool_calls"):
        message["content"] = message["content"] or None
        message["tool_calls"] = [{"id": f"call_{uuid.uuid4().hex[:24]}", **call} for call in calls]
    return message | {key: parsed[key] for key in FLAGS if key in parsed}


def token_logprobs(text: ChatText | None, sequence: SampledSequence, top: int) -> list[dict[str, Any]]:
    """Per sampled token: text, bytes and logprob, and the same of the likeliest tokens.
    Without `text`, a token's text is `token_id:7`, as vLLM's clients expect."""

    def named(token: int, logprob: float) -> dict[str, Any]:
        if text is None:
            return {"token": f"token_id:{token}", "logprob": logprob}
        return {"token": text.piece(token), "logprob": logprob, "bytes": list(token_bytes(text.tokenizer, token))}

    entries = []
    for position, (token, logprob) in enumerate(zip(sequence.tokens, sequence.logprobs or [], strict=True)):
        entry = {**named(token, logprob), "top_logprobs": []}
        if top and sequence.topk_logprobs_np is not None:
            row = sequence.topk_logprobs_np
            entry["top_logprobs"] = [
                named(int(other), float(value))
                for other, value in zip(row.token_ids[position], row.logprobs[position], strict=True)
            ]
        entries.append(entry)
    return entries


def chat(
    body: ChatBody,
    text: ChatText,
    eos_token_ids: Sequence[int],
    prompt: Sequence[int],
    response: SampleResponse,
    chat_format: ChatFormat,
) -> dict[str, Any]:
    choices = []
    for index, sequence in enumerate(response.sequences):
        message = _message(body, text, eos_token_ids, sequence, chat_format)
        reason: str = sequence.stop_reason
        if "tool_calls" in message and reason == "stop":
            reason = "tool_calls"
        choice: dict[str, Any] = {"index": index, "message": message, "finish_reason": reason, "logprobs": None}
        choice["stop_reason"] = stopped_by(body, text, eos_token_ids, sequence)
        if body.logprobs:
            choice["logprobs"] = {"content": token_logprobs(text, sequence, body.top_logprobs or 0)}
        if body.return_token_ids:
            choice["token_ids"] = sequence.tokens
        choices.append(choice)
    reply_body = head(body)
    reply_body |= {"choices": choices, "usage": usage([prompt], [response])}
    if body.return_token_ids:
        reply_body["prompt_token_ids"] = list(prompt)
    return reply_body


def completion(
    body: CompletionBody,
    text: ChatText,
    eos_token_ids: Sequence[int],
    prompts: Sequence[Sequence[int]],
    responses: Sequence[SampleResponse],
) -> dict[str, Any]:
    if body.max_tokens == 0:
        responses = [replace(response, sequences=[_NOTHING]) for response in responses]
    choices = []
    for prompt, response in zip(prompts, responses, strict=True):
        for sequence in _best(body, response.sequences):
            sampled = _completion_text(body, text, eos_token_ids, sequence)
            choice: dict[str, Any] = {
                "index": len(choices),
                "text": text.text(prompt) + sampled if body.echo else sampled,
                "finish_reason": sequence.stop_reason,
                "stop_reason": stopped_by(body, text, eos_token_ids, sequence),
                "logprobs": None,
            }
            if body.logprobs is not None:
                choice["logprobs"] = _completion_logprobs(body, text, prompt, response, sequence)
            if body.return_token_ids:
                choice |= {"token_ids": sequence.tokens, "prompt_token_ids": list(prompt)}
            choices.append(choice)
    reply = head(body)
    return {**reply, "choices": choices, "usage": usage(prompts, responses)}


def _best(body: CompletionBody, sequences: Sequence[SampledSequence]) -> Sequence[SampledSequence]:
    if body.best_of in (None, body.n):
        return sequences
    return sorted(sequences, key=lambda sequence: float(np.mean(sequence.logprobs or [-np.inf])), reverse=True)[
        : body.n
    ]


_NOTHING = SampledSequence(
    stop_reason="length", sequence_id="", tokens_np=np.zeros(0, np.int32), logprobs_np=np.zeros(0, np.float32)
)
"""The sample of max_tokens=0."""


def _completion_logprobs(
    body: CompletionBody, text: ChatText, prompt: Sequence[int], response: SampleResponse, sequence: SampledSequence
) -> dict[str, Any]:
    """The older format: parallel lists, which include the prompt with `echo`."""
    if not body.echo:
        return sampled_logprobs(body, text, sequence)
    scores = response.prompt_logprobs_np
    assert scores is not None
    values = [*(None if np.isnan(score) else float(score) for score in scores), *(sequence.logprobs or [])]
    tops = [None, *_tops(text, response.topk_prompt_logprobs_np)[1:], *_tops(text, sequence.topk_logprobs_np)]
    return _parallel(body, text, [*prompt, *sequence.tokens], values, tops)


def sampled_logprobs(
    body: CompletionBody, text: ChatText, sequence: SampledSequence, offset: int = 0
) -> dict[str, Any]:
    """As `_completion_logprobs`, of sampled tokens only; `offset`: start of their text, in characters."""
    tops = _tops(text, sequence.topk_logprobs_np)
    return _parallel(body, text, sequence.tokens, [*(sequence.logprobs or [])], tops, offset)


def _parallel(
    body: CompletionBody,
    text: ChatText,
    tokens: Sequence[int],
    values: Sequence[float | None],
    tops: Sequence[dict[str, float] | None],
    offset: int = 0,
) -> dict[str, Any]:
    pieces = [text.piece(token) for token in tokens]
    offsets = [offset]
    for piece in pieces[:-1]:
        offsets.append(offsets[-1] + len(piece))
    return {
        "tokens": pieces,
        "token_logprobs": values,
        "top_logprobs": tops if body.logprobs else None,
        "text_offset": offsets[: len(pieces)],
    }


def _tops(text: ChatText, topk: Any) -> list[dict[str, float] | None]:
    if topk is None:
        return []
    return [
        {text.piece(int(token)): float(logprob) for token, logprob in zip(tokens, logprobs, strict=True)}
        for tokens, logprobs in zip(topk.token_ids, topk.logprobs, strict=True)
    ]
