"""OpenAI-compatible routes, and vLLM's route of tokens in and out: for judges, evaluations and whatever else speaks them.

A model is a base model's name or a `tinker://` path. Logprobs are the engine's own: of softmax(logits / temperature), before
top-k and top-p; at temperature 0, of temperature 1. Streams are sent token by token.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response, StreamingResponse
from tinker.proto.response_conv import deserialize_sample_response
from tinker.types import SampleResponse

from tinker_local_backend.server import openai_replies
from tinker_local_backend.server.chat_text import ChatText
from tinker_local_backend.server.errors import Refused, error_body
from tinker_local_backend.server.held import Draw
from tinker_local_backend.server.link import ServedModel
from tinker_local_backend.server.openai_schemas import (
    ChatBody,
    CompletionBody,
    GenerateBody,
    GenerateParams,
    Message,
    OpenAIBody,
)
from tinker_local_backend.server.openai_stream import Choices, Piece, events
from tinker_local_backend.server.requests import all_set
from tinker_local_backend.server.routes_common import Ask, DirectRoute, Posted
from tinker_local_backend.server.sessions import Request, Sampler
from tinker_local_backend.wire.frames import Frame

T = TypeVar("T")


def router() -> APIRouter:
    routes = APIRouter()

    @routes.get("/v1/models")
    async def models(asked: Ask) -> Any:
        entries = [_model_entry(model.name, model.context_length) for model in asked.service.link.models]
        return {"object": "list", "data": entries}

    @routes.get("/v1/models/{name:path}")
    async def model(name: str, asked: Ask) -> Any:
        base, _ = await asked.service.samplers.named(asked.tenant, name)
        return _model_entry(name, base.context_length)

    return routes


async def chat(posted: Posted, body: ChatBody) -> Response:
    asked = await _Asked.of(posted, body, bool(body.logprobs))
    most = posted.service.texts.most
    asked.check_text([await posted.aside(posted.holding.count, lambda: _characters(body, most))])
    with_tools = bool(body.tools) and (body.model_extra or {}).get("tool_choice") != "none"

    def encoded() -> list[int]:
        tools = [tool.model_dump() for tool in body.tools or ()] if with_tools else None
        messages = [_as_template_sees(message) for message in body.messages]
        return asked.text.prompt(messages, tools, body.chat_template_kwargs or {})

    prompt = await asked.on_a_thread(encoded)
    if body.top_logprobs and not body.logprobs:
        raise Refused(400, "top_logprobs needs logprobs=true")
    limit = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    topk = body.top_logprobs or 0

    def whole(responses: list[SampleResponse]) -> dict[str, Any]:
        return openai_replies.chat(body, asked.text, asked.model.eos_token_ids, prompt, responses[0], with_tools)

    if body.stream:
        choices = Choices(body, asked.text, asked.model.eos_token_ids, with_tools)
        return await asked.stream(Wanted([prompt], limit, whole, topk), choices)
    return await asked.sample(Wanted([prompt], limit, whole, topk))


async def completions(posted: Posted, body: CompletionBody) -> Response:
    asked = await _Asked.of(posted, body, body.logprobs is not None)
    texts = [body.prompt] if isinstance(body.prompt, str) else [part for part in body.prompt if isinstance(part, str)]
    asked.check_text([len(text) for text in texts])
    prompts = await asked.on_a_thread(lambda: _prompts(asked.text, body))
    topk = body.logprobs or 0

    def whole(responses: list[SampleResponse]) -> dict[str, Any]:
        return openai_replies.completion(body, asked.text, asked.model.eos_token_ids, prompts, responses)

    if body.stream:
        if body.echo:
            raise Refused(400, "echo cannot be streamed; leave out one of echo and stream")
        choices = Choices(body, asked.text, asked.model.eos_token_ids, with_tools=False)
        return await asked.stream(Wanted(prompts, body.max_tokens, whole, topk), choices)
    scored = body.echo and body.logprobs is not None
    return await asked.sample(Wanted(prompts, body.max_tokens, whole, topk, scored, topk))


async def generate(posted: Posted, body: GenerateBody) -> Response:
    params = body.sampling_params
    known = params.model_fields_set & set(GenerateParams.model_fields) - {"max_tokens", "logprobs"}
    like = OpenAIBody(
        model=body.model or posted.service.link.models[0].name,
        cache_salt=body.cache_salt,
        **params.model_dump(include=known, exclude_none=True),
    )
    asked = await _Asked.of(posted, like, params.logprobs is not None)

    def whole(responses: list[SampleResponse]) -> dict[str, Any]:
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

    return await asked.sample(Wanted([body.token_ids], params.max_tokens, whole, params.logprobs or 0))


DIRECT = (
    DirectRoute("/v1/chat/completions", ChatBody, chat),
    DirectRoute("/v1/completions", CompletionBody, completions),
    DirectRoute("/inference/v1/generate", GenerateBody, generate),
)


def _characters(body: ChatBody, most: int) -> int:
    """What is to be encoded of a chat, without the template's own text. Tools are not looked at beyond `most`."""
    said = 0
    for message in body.messages:
        content = message.content or ""
        said += len(content) if isinstance(content, str) else sum(len(part.text) for part in content)
        said += sum(len(call.function.name) + len(call.function.arguments) for call in message.tool_calls or ())
    # Written as JSON to be measured, small bodies that are compressed would become hundreds of megabytes.
    rest: list[Any] = [tool.function for tool in body.tools or ()]
    while rest and said <= most:
        value = rest.pop()
        if isinstance(value, dict):
            rest += value
            rest += value.values()
        elif isinstance(value, list):
            rest += value
        said += len(value) if isinstance(value, str) else len(repr(value)) if isinstance(value, int | float) else 2
    return said


def _model_entry(name: str, context_length: int) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "local", "max_model_len": context_length}


def _as_template_sees(message: Message) -> dict[str, Any]:
    fields = message.model_dump(exclude_none=True)
    if isinstance(message.content, list):
        fields["content"] = "".join(part.text for part in message.content)
    fields.setdefault("content", "")
    if message.role == "developer":
        fields["role"] = "system"
    for call in fields.get("tool_calls", []):
        with suppress(ValueError):  # templates write arguments as JSON themselves
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return fields


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
class Wanted:
    """What is to be sampled, and what becomes of it."""

    prompts: list[list[int]]
    max_tokens: int | None
    whole: Callable[[list[SampleResponse]], dict[str, Any]]
    """makes the reply of one response per prompt"""
    topk: int = 0
    scored: bool = False
    topk_prompt: int = 0


Arrived = tuple[int, Frame | None]
"""The first choice of a request, and what is new of its samples; None: it has ended."""


@dataclass(frozen=True)
class _Asked:
    """A request on its way: whose it is, of which sampler, in which words."""

    posted: Posted
    body: OpenAIBody
    tells_logprobs: bool
    sampler: Sampler
    model: ServedModel
    text: ChatText

    @classmethod
    async def of(cls, posted: Posted, body: OpenAIBody, tells_logprobs: bool) -> _Asked:
        sampler, model = await posted.service.samplers.standing(posted.tenant, body.model)
        return cls(posted, body, tells_logprobs, sampler, model, await posted.service.texts.of(model.name))

    def check_text(self, lengths: Sequence[int]) -> None:
        """Raise Refused for prompts of these lengths, in characters, that are too long to be encoded."""
        self.posted.service.texts.check(self.text, lengths, self.model.context_length)

    async def on_a_thread(self, work: Callable[[], T]) -> T:
        """What needs the tokenizer for long."""
        return await self.posted.service.texts.pool.run(self.posted.tenant, work)

    async def sample(self, wanted: Wanted) -> Response:
        """The whole reply. Raises Refused for what the engine refuses. A client that goes away stops it."""
        requests: list[Request] = []
        try:
            for prompt in wanted.prompts:
                requests.append(self._submit(wanted, prompt))
            if not await all_set([request.done for request in requests], self._disconnected()):
                raise Refused(400, "the client went away")
        except BaseException:
            self._stop(requests)
            raise
        return await self._reply(wanted, requests, JSONResponse)

    async def stream(self, wanted: Wanted, choices: Choices) -> Response:
        """Events as tokens come. What the engine refuses before the first token is Refused, as without a stream."""
        requests: list[Request] = []
        waiting: list[asyncio.Task[None]] = []
        arrived: asyncio.Queue[Arrived] = asyncio.Queue()

        async def tell_end(request: Request, at: int) -> None:
            await request.done.wait()  # which is after the last of its progress
            arrived.put_nowait((at, None))

        try:
            for place, prompt in enumerate(wanted.prompts):
                at = place * self.body.n
                requests.append(self._submit(wanted, prompt, lambda frame, at=at: arrived.put_nowait((at, frame))))
                waiting.append(asyncio.create_task(tell_end(requests[-1], at)))
            first = await arrived.get()
            if first[1] is None:
                _result(requests[first[0] // self.body.n].reply)
        except BaseException:
            self._stop(requests)
            raise

        async def pieces() -> AsyncGenerator[Piece]:
            """Chunks until every request has ended; a client that goes away stops them."""
            try:
                for piece in choices.begin(len(requests) * self.body.n):
                    yield piece
                running, (at, frame) = len(requests), first
                while True:
                    if frame is None:
                        running -= 1
                    for news in frame.fields["progress"] if frame is not None else ():
                        yield choices.grow(at + news["index"], news)
                    if not running:
                        break
                    at, frame = await arrived.get()
                try:
                    reply = await self._reply(wanted, requests, dict)
                except Refused as refusal:  # it is too late for another status
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

    def _submit(self, wanted: Wanted, prompt: list[int], on_progress: Callable[[Frame], None] | None = None) -> Request:
        context_length, body, scored = self.model.context_length, self.body, wanted.scored
        room = context_length - len(prompt)
        if room < 1:
            raise Refused(
                400,
                f"the prompt of {len(prompt)} tokens leaves no room in the context of {context_length}; shorten it by at "
                f"least {1 - room}",
            )
        most = room if wanted.max_tokens is None else wanted.max_tokens
        fields = {
            "num_samples": body.n,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": prompt}]},
            "sampling_params": body.sampling_params(most, self.model.eos_token_ids),
            "prompt_logprobs": scored,
            "topk_prompt_logprobs": wanted.topk_prompt if scored else 0,
            "topk_sample_logprobs": wanted.topk,
            "prompt_alt_tokens_k": 0,
        }
        prompt_topk, stops = scored + wanted.topk_prompt, len(body.stop_token_ids or ())
        draw = Draw(json.dumps(fields).encode(), body.n, len(prompt), most, wanted.topk, prompt_topk, stops)
        if self.tells_logprobs:
            self.posted.holding.grow(draw.reply_bytes(context_length))
        samplers, tenant = self.posted.service.samplers, self.posted.tenant
        return samplers.sample(
            tenant, self.sampler.sampler_id, None, draw, b"", on_progress, cache_salt=body.cache_salt
        )

    def _stop(self, requests: list[Request]) -> None:
        for request in requests:
            self.posted.service.requests.cancel(request)
            request.fetched = time.monotonic()  # nobody will ask for it: housekeeping forgets it once it has ended

    async def _disconnected(self) -> None:
        while (await self.posted.receive())["type"] != "http.disconnect":
            pass

    async def _reply(self, wanted: Wanted, requests: list[Request], form: Callable[[dict[str, Any]], T]) -> T:
        """What becomes of the results. Raises Refused for a request that has failed."""
        replies = [request.reply for request in requests]
        for request in requests:
            self.posted.service.requests.forget(request)
        bodies = [_result(reply) for reply in replies]
        return await self.on_a_thread(lambda: form(wanted.whole([deserialize_sample_response(b) for b in bodies])))


def _result(reply: Frame | None) -> bytes:
    """Raises Refused for a request that has failed."""
    if reply is None or "error" in reply.fields:
        fields = {"error": "the result is gone", "category": "server"} if reply is None else reply.fields
        raise Refused(400 if fields["category"] == "user" else 500, fields["error"])
    return reply.body
