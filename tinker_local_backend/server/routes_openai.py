"""OpenAI-compatible routes, and vLLM's route of tokens in and out, for judges, evaluations and other clients.

A model is a base model's name or a `tinker://` path. Logprobs are the engine's: of softmax(logits / temperature), before top-k
and top-p; at temperature 0, of temperature 1. Streams send each token.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response, StreamingResponse
from tinker.proto.response_conv import deserialize_sample_response
from tinker.types import SampleResponse

from tinker_local_backend.server import openai_replies
from tinker_local_backend.server.budget import Draw
from tinker_local_backend.server.chat_format import ChatFormat, format_name, format_of, rendered
from tinker_local_backend.server.chat_text import ChatText
from tinker_local_backend.server.errors import Refused, error_body
from tinker_local_backend.server.link import ServedModel
from tinker_local_backend.server.openai_constraints import constraint_of, may_constrain
from tinker_local_backend.server.openai_schemas import (
    ChatBody,
    CompletionBody,
    GenerateBody,
    GenerateParams,
    OpenAIBody,
)
from tinker_local_backend.server.openai_stream import Choices, Piece, events
from tinker_local_backend.server.requests import all_set
from tinker_local_backend.server.routes_common import Context, DirectRoute, Posted
from tinker_local_backend.server.sessions import Request, Sampler
from tinker_local_backend.wire.frames import Frame

T = TypeVar("T")


def router() -> APIRouter:
    routes = APIRouter()

    @routes.get("/v1/models")
    async def models(context: Context) -> Any:
        formats, served = context.service.formats, context.service.link.models
        entries = [_model_entry(m.name, m.context_length, format_name(formats, m.name, {})) for m in served]
        return {"object": "list", "data": entries}

    @routes.get("/v1/models/{name:path}")
    async def model(name: str, context: Context) -> Any:
        base, info = await context.service.samplers.named(context.tenant, name)
        metadata = {} if info is None else info.user_metadata
        return _model_entry(name, base.context_length, format_name(context.service.formats, base.name, metadata))

    return routes


async def chat(posted: Posted, body: ChatBody) -> Response:
    request = await _OpenAIRequest.of(posted, body, bool(body.logprobs))
    limit = posted.service.texts.max_characters
    request.check_text([await posted.off_loop(posted.reservation.count, lambda: _characters(body, limit))])
    chat_format = request.chat_format
    assert chat_format is not None
    prompt = await request.in_tokenizer_pool(lambda: rendered(chat_format, body.messages))
    if body.top_logprobs and not body.logprobs:
        raise Refused(400, "top_logprobs needs logprobs=true")
    max_tokens = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    topk = body.top_logprobs or 0

    def make_reply(responses: list[SampleResponse]) -> dict[str, Any]:
        return openai_replies.chat(body, request.text, request.model.eos_token_ids, prompt, responses[0], chat_format)

    if body.stream:
        choices = Choices(body, request.text, request.model.eos_token_ids, chat_format)
        return await request.stream(SampleSpec([prompt], max_tokens, make_reply, topk), choices)
    return await request.sample(SampleSpec([prompt], max_tokens, make_reply, topk))


async def completions(posted: Posted, body: CompletionBody) -> Response:
    request = await _OpenAIRequest.of(posted, body, body.logprobs is not None)
    texts = [body.prompt] if isinstance(body.prompt, str) else [part for part in body.prompt if isinstance(part, str)]
    request.check_text([len(text) for text in texts])
    prompts = await request.in_tokenizer_pool(lambda: _prompts(request.text, body))
    topk = body.logprobs or 0

    def make_reply(responses: list[SampleResponse]) -> dict[str, Any]:
        return openai_replies.completion(body, request.text, request.model.eos_token_ids, prompts, responses)

    if body.stream:
        if body.echo:
            raise Refused(400, "echo cannot be streamed; leave out one of echo and stream")
        choices = Choices(body, request.text, request.model.eos_token_ids)
        return await request.stream(SampleSpec(prompts, body.max_tokens, make_reply, topk), choices)
    scored = body.echo and body.logprobs is not None
    return await request.sample(SampleSpec(prompts, body.max_tokens, make_reply, topk, scored, topk))


async def generate(posted: Posted, body: GenerateBody) -> Response:
    params = body.sampling_params
    known = params.model_fields_set & set(GenerateParams.model_fields) - {"max_tokens", "logprobs"}
    like = OpenAIBody(
        model=body.model or posted.service.link.models[0].name,
        cache_salt=body.cache_salt,
        **params.model_dump(include=known, exclude_none=True),
    )
    request = await _OpenAIRequest.of(posted, like, params.logprobs is not None)

    def make_reply(responses: list[SampleResponse]) -> dict[str, Any]:
        choices = [
            {
                "index": index,
                "token_ids": sequence.tokens,
                "finish_reason": sequence.stop_reason,
                "logprobs": None
                if params.logprobs is None
                else {"content": openai_replies.token_logprobs(None, sequence, params.logprobs)},
            }
            for index, sequence in enumerate(responses[0].sequences)
        ]
        usage = openai_replies.usage([body.token_ids], responses)
        return {"request_id": body.request_id or uuid.uuid4().hex, "choices": choices, "usage": usage}

    return await request.sample(SampleSpec([body.token_ids], params.max_tokens, make_reply, params.logprobs or 0))


DIRECT = (
    DirectRoute("/v1/chat/completions", ChatBody, chat),
    DirectRoute("/v1/completions", CompletionBody, completions),
    DirectRoute("/inference/v1/generate", GenerateBody, generate),
)


def _characters(body: ChatBody, limit: int) -> int:
    """Characters of a chat to encode, without the template's own text. Stops counting tools above `limit`."""
    count = 0
    for message in body.messages:
        content = message.content or ""
        count += len(content) if isinstance(content, str) else sum(len(part.text) for part in content)
        count += sum(len(call.function.name) + len(call.function.arguments) for call in message.tool_calls or ())
        count += len(message.reasoning_content or "") + len(message.reasoning or "")
    # Not measured as JSON: a small compressed body could expand to hundreds of megabytes.
    rest: list[Any] = [tool.function for tool in body.tools or ()]
    while rest and count <= limit:
        value = rest.pop()
        if isinstance(value, dict):
            rest += value
            rest += value.values()
        elif isinstance(value, list):
            rest += value
        count += len(value) if isinstance(value, str) else len(repr(value)) if isinstance(value, int | float) else 2
    return count


def _model_entry(name: str, context_length: int, chat_format: str) -> dict[str, Any]:
    fixed = {"object": "model", "created": 0, "owned_by": "local"}
    return {"id": name, **fixed, "max_model_len": context_length, "chat_format": chat_format}


def _prompts(text: ChatText, body: CompletionBody) -> list[list[int]]:
    prompt = body.prompt
    if isinstance(prompt, str):
        return [text.encode(prompt)]
    if not prompt:
        raise Refused(400, "prompt is empty; give a text or token ids")
    if isinstance(prompt[0], int):
        return [prompt]  # pyright: ignore[reportReturnType]
    if len(prompt) * body.n > 4096:
        raise Refused(400, f"{len(prompt)} prompts times n={body.n} are more than 4096 samples; send fewer at a time")
    return [text.encode(part) if isinstance(part, str) else part for part in prompt]  # pyright: ignore


@dataclass(frozen=True)
class SampleSpec:
    """What to sample, and how to make the reply."""

    prompts: list[list[int]]
    max_tokens: int | None
    make_reply: Callable[[list[SampleResponse]], dict[str, Any]]
    """from one response per prompt"""
    topk: int = 0
    scored: bool = False
    topk_prompt: int = 0


ProgressEvent = tuple[int, Frame | None]
"""Index of a request's first choice, and a frame with new tokens; None: the request has ended."""


@dataclass(frozen=True)
class _OpenAIRequest:
    """A request in progress, with its sampler and tokenizer."""

    posted: Posted
    body: OpenAIBody
    returns_logprobs: bool
    sampler: Sampler
    model: ServedModel
    text: ChatText
    chat_format: ChatFormat | None
    """of a chat"""
    constraint: dict[str, Any] | None

    @classmethod
    async def of(cls, posted: Posted, body: OpenAIBody, returns_logprobs: bool) -> _OpenAIRequest:
        sampler, model = await posted.service.samplers.default_sampler(posted.tenant, body.model)
        text = await posted.service.texts.of(model.name)
        chat_format: ChatFormat | None = None
        if isinstance(body, ChatBody):
            chat_format = format_of(posted.service.formats, model.name, text, sampler.user_metadata, body)
        constraint: dict[str, Any] | None = None
        if may_constrain(body):  # a schema may be large
            constraint = await posted.service.texts.pool.run(posted.tenant, lambda: constraint_of(body, chat_format))
        return cls(posted, body, returns_logprobs, sampler, model, text, chat_format, constraint)

    def check_text(self, lengths: Sequence[int]) -> None:
        """Raise Refused if prompts of these lengths, in characters, are too long."""
        self.posted.service.texts.check(self.text, lengths, self.model.context_length)

    async def in_tokenizer_pool(self, work: Callable[[], T]) -> T:
        """Run long work with the tokenizer."""
        return await self.posted.service.texts.pool.run(self.posted.tenant, work)

    async def sample(self, spec: SampleSpec) -> Response:
        """The whole reply. Raises Refused if the engine refuses. Cancels the samples if the client disconnects."""
        requests: list[Request] = []
        try:
            for prompt in spec.prompts:
                requests.append(self._submit(spec, prompt))
            if not await all_set([request.done for request in requests], self._disconnected()):
                raise Refused(400, "the client disconnected")
        except BaseException:
            self._stop(requests)
            raise
        return await self._reply(spec, requests, JSONResponse)

    async def stream(self, spec: SampleSpec, choices: Choices) -> Response:
        """Events per token. Raises Refused if the engine refuses before the first token, as without a stream."""
        requests: list[Request] = []
        waiting: list[asyncio.Task[None]] = []
        arrived: asyncio.Queue[ProgressEvent] = asyncio.Queue()

        async def notify_end(request: Request, at: int) -> None:
            await request.done.wait()  # after its last progress frame
            arrived.put_nowait((at, None))

        try:
            for index, prompt in enumerate(spec.prompts):
                at = index * self.body.n
                requests.append(self._submit(spec, prompt, lambda frame, at=at: arrived.put_nowait((at, frame))))
                waiting.append(asyncio.create_task(notify_end(requests[-1], at)))
            first = await arrived.get()
            if first[1] is None:
                _result(requests[first[0] // self.body.n].reply)
        except BaseException:
            self._stop(requests)
            raise

        async def pieces() -> AsyncGenerator[Piece]:
            """Chunks until every request has ended. Cancels the samples if the client disconnects."""
            try:
                for piece in choices.begin(len(requests) * self.body.n):
                    yield piece
                running, (at, frame) = len(requests), first
                while True:
                    if frame is None:
                        running -= 1
                    for delta in frame.fields["progress"] if frame is not None else ():
                        yield choices.grow(at + delta["index"], delta)
                    if not running:
                        break
                    at, frame = await arrived.get()
                try:
                    reply = await self._reply(spec, requests, dict)
                except Refused as refusal:  # too late for another status
                    yield error_body("/v1/", refusal.status, refusal.detail)
                    return
                for choice in reply["choices"]:
                    for piece in choices.end(choice["index"], choice):
                        yield piece
                if (self.body.stream_options or {}).get("include_usage"):
                    yield choices.usage(reply["usage"])
            finally:
                for task in waiting:
                    task.cancel()
                self._stop([request for request in requests if request.reply is None])

        return StreamingResponse(events(pieces()), media_type="text/event-stream")

    def _submit(
        self, spec: SampleSpec, prompt: list[int], on_progress: Callable[[Frame], None] | None = None
    ) -> Request:
        context_length, body, scored = self.model.context_length, self.body, spec.scored
        room = context_length - len(prompt)
        if room < 1:
            raise Refused(
                400,
                f"the prompt of {len(prompt)} tokens leaves no room in the context of {context_length}; shorten it by at "
                f"least {1 - room}",
            )
        max_tokens = room if spec.max_tokens is None else spec.max_tokens
        fields = {
            "num_samples": body.n,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": prompt}]},
            "sampling_params": self._sampling_params(max_tokens),
            "prompt_logprobs": scored,
            "topk_prompt_logprobs": spec.topk_prompt if scored else 0,
            "topk_sample_logprobs": spec.topk,
            "prompt_alt_tokens_k": 0,
            "constraint": self.constraint,
        }
        prompt_topk, stops = scored + spec.topk_prompt, len(body.stop_token_ids or ())
        draw = Draw(json.dumps(fields).encode(), body.n, len(prompt), max_tokens, spec.topk, prompt_topk, stops)
        if self.returns_logprobs:
            self.posted.reservation.extend(draw.reply_bytes(context_length))
        samplers, tenant = self.posted.service.samplers, self.posted.tenant
        return samplers.sample(
            tenant, self.sampler.sampler_id, None, draw, b"", on_progress, cache_salt=body.cache_salt
        )

    def _sampling_params(self, max_tokens: int) -> dict[str, Any]:
        """Parameters for the engine. A chat also ends in the stops of its format."""
        ends = self.model.eos_token_ids
        params = self.body.sampling_params(max_tokens, ends)
        if self.chat_format is not None and (stops := self.chat_format.stops):
            params["stop"] = list(dict.fromkeys([*ends, *(params["stop"] or ()), *stops]))
        return params

    def _stop(self, requests: list[Request]) -> None:
        for request in requests:
            self.posted.service.requests.cancel(request)
            request.fetched = time.monotonic()  # no client will fetch it: housekeeping drops it after its end

    async def _disconnected(self) -> None:
        while (await self.posted.receive())["type"] != "http.disconnect":
            pass

    async def _reply(self, spec: SampleSpec, requests: list[Request], form: Callable[[dict[str, Any]], T]) -> T:
        """The reply made of the results. Raises Refused if a request failed."""
        replies = [request.reply for request in requests]
        for request in requests:
            self.posted.service.requests.discard(request)
        bodies = [_result(reply) for reply in replies]
        return await self.in_tokenizer_pool(
            lambda: form(spec.make_reply([deserialize_sample_response(b) for b in bodies]))
        )


def _result(reply: Frame | None) -> bytes:
    """The reply's body. Raises Refused if the request failed."""
    if reply is None or "error" in reply.fields:
        fields = {"error": "the result is gone", "category": "server"} if reply is None else reply.fields
        raise Refused(400 if fields["category"] == "user" else 500, fields["error"])
    return reply.body
