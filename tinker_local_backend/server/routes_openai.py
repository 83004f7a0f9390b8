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
from typing import Any, TypeVar

from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response, StreamingResponse
from tinker.proto.response_conv import deserialize_sample_response
from tinker.types import SampleResponse

from tinker_local_backend.server import openai_replies
from tinker_local_backend.server.chat_text import ChatText
from tinker_local_backend.server.direct import DirectRoute, Posted
from tinker_local_backend.server.errors import error_body
from tinker_local_backend.server.held import reply_bytes
from tinker_local_backend.server.openai_schemas import (
    ChatBody,
    CompletionBody,
    GenerateBody,
    GenerateParams,
    Message,
    OpenAIBody,
)
from tinker_local_backend.server.openai_stream import Choices, Piece, events
from tinker_local_backend.server.routes_common import ServiceOf, TenantOf
from tinker_local_backend.server.sessions import Draw, Refused, Request
from tinker_local_backend.wire.frames import Frame

T = TypeVar("T")


def router() -> APIRouter:
    routes = APIRouter()

    @routes.get("/v1/models")
    async def models(service: ServiceOf) -> Any:
        entries = [_model_entry(model.name, model.context_length) for model in service.link.models]
        return {"object": "list", "data": entries}

    @routes.get("/v1/models/{name:path}")
    async def model(name: str, service: ServiceOf, tenant: TenantOf) -> Any:
        base_model = await service.samplers.base_model_of(tenant, name)
        lengths = {served.name: served.context_length for served in service.link.models}
        return _model_entry(name, lengths[base_model])

    return routes


async def _chat(posted: Posted, body: ChatBody) -> Response:
    asked = await _Asked.of(posted, body, bool(body.logprobs))
    most = posted.service.texts.most
    asked.check_text([await posted.aside(posted.holding.count, lambda: _characters(body, most))])
    with_tools = bool(body.tools) and not _no_tools(body)

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
        return openai_replies.chat(body, asked.text, asked.eos_token_ids, prompt, responses[0], with_tools)

    if body.stream:
        choices = Choices(body, asked.text, asked.eos_token_ids, with_tools)
        return await asked.stream([prompt], limit, topk, choices, whole)
    return await asked.sample([prompt], limit, whole, topk=topk)


async def _completions(posted: Posted, body: CompletionBody) -> Response:
    asked = await _Asked.of(posted, body, body.logprobs is not None)
    texts = [body.prompt] if isinstance(body.prompt, str) else [part for part in body.prompt if isinstance(part, str)]
    asked.check_text([len(text) for text in texts])
    prompts = await asked.on_a_thread(lambda: _prompts(asked.text, body))
    topk = body.logprobs or 0

    def whole(responses: list[SampleResponse]) -> dict[str, Any]:
        return openai_replies.completion(body, asked.text, asked.eos_token_ids, prompts, responses)

    if body.stream:
        if body.echo:
            raise Refused(400, "echo cannot be streamed; leave out one of echo and stream")
        choices = Choices(body, asked.text, asked.eos_token_ids, with_tools=False)
        return await asked.stream(prompts, body.max_tokens, topk, choices, whole)
    scored = body.echo and body.logprobs is not None
    return await asked.sample(prompts, body.max_tokens, whole, topk, scored, topk)


async def _generate(posted: Posted, body: GenerateBody) -> Response:
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
                else {"content": openai_replies.token_id_logprobs(sequence, params.logprobs)},
            }
            for index, sequence in enumerate(responses[0].sequences)
        ]
        usage = openai_replies.usage([body.token_ids], responses)
        return {"request_id": body.request_id or uuid.uuid4().hex, "choices": choices, "usage": usage}

    return await asked.sample([body.token_ids], params.max_tokens, whole, params.logprobs or 0)


DIRECT = (
    DirectRoute("/v1/chat/completions", ChatBody, _chat),
    DirectRoute("/v1/completions", CompletionBody, _completions),
    DirectRoute("/inference/v1/generate", GenerateBody, _generate),
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
        said += len(value) if isinstance(value, str) else len(repr(value)) if _is_number(value) else 2
    return said


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float))


def _model_entry(name: str, context_length: int) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "local", "max_model_len": context_length}


def _no_tools(body: ChatBody) -> bool:
    return (body.model_extra or {}).get("tool_choice") == "none"


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


class _Asked:
    """A request on its way: whose it is, of which sampler, in which words."""

    def __init__(
        self, posted: Posted, body: OpenAIBody, tells_logprobs: bool, sampler_id: str, text: ChatText, model: Any
    ):
        self._service = posted.service
        self._posted = posted
        self._body = body
        self._tells_logprobs = tells_logprobs
        self._sampler_id = sampler_id
        self._context_length: int = model.context_length
        self.text = text
        self.eos_token_ids: list[int] = model.eos_token_ids

    @classmethod
    async def of(cls, posted: Posted, body: OpenAIBody, tells_logprobs: bool) -> _Asked:
        service = posted.service
        sampler = await service.samplers.standing(posted.tenant, body.model)
        model = next(model for model in service.link.models if model.name == sampler.base_model)
        text = await service.texts.of(sampler.base_model)
        return cls(posted, body, tells_logprobs, sampler.sampler_id, text, model)

    def check_text(self, lengths: Sequence[int]) -> None:
        """Raise Refused for prompts of these lengths, in characters, that are too long to be encoded."""
        self._service.texts.check(self.text, lengths, self._context_length)

    async def on_a_thread(self, work: Callable[[], T]) -> T:
        """What needs the tokenizer for long."""
        return await self._service.texts.pool.run(self._posted.tenant, work)

    async def sample(
        self,
        prompts: list[list[int]],
        max_tokens: int | None,
        whole: Callable[[list[SampleResponse]], dict[str, Any]],
        topk: int = 0,
        scored: bool = False,
        topk_prompt: int = 0,
    ) -> Response:
        """The reply that `whole` makes of one response per prompt. Raises Refused for what the engine refuses. A client that goes
        away stops it."""
        requests: list[Request] = []
        try:
            for prompt in prompts:
                requests.append(self._submit(prompt, max_tokens, topk, scored, topk_prompt))
            await self._wait(requests)
        except BaseException:
            self._stop(requests)
            raise
        bodies = [self._result(request) for request in requests]
        return await self.on_a_thread(lambda: JSONResponse(whole([deserialize_sample_response(b) for b in bodies])))

    async def stream(
        self,
        prompts: list[list[int]],
        max_tokens: int | None,
        topk: int,
        choices: Choices,
        whole: Callable[[list[SampleResponse]], dict[str, Any]],
    ) -> Response:
        """Events as tokens come. What the engine refuses before the first token is Refused, as without a stream."""
        requests: list[Request] = []
        waiting: list[asyncio.Task[None]] = []
        arrived: asyncio.Queue[tuple[int, Frame | None]] = asyncio.Queue()

        async def tell_end(request: Request, at: int) -> None:
            await request.done.wait()  # which is after the last of its progress
            arrived.put_nowait((at, None))

        try:
            for place, prompt in enumerate(prompts):
                first_choice = place * self._body.n
                request = self._submit(
                    prompt, max_tokens, topk, on_progress=lambda frame, at=first_choice: arrived.put_nowait((at, frame))
                )
                requests.append(request)
                waiting.append(asyncio.create_task(tell_end(request, first_choice)))
            first = await arrived.get()
            if first[1] is None:
                self._check(requests[first[0] // self._body.n])
        except BaseException:
            self._stop(requests)
            raise
        pieces = self._pieces(requests, waiting, arrived, first, choices, whole)
        return StreamingResponse(events(pieces), media_type="text/event-stream")

    async def _pieces(
        self,
        requests: list[Request],
        waiting: list[asyncio.Task[None]],
        arrived: asyncio.Queue[tuple[int, Frame | None]],
        first: tuple[int, Frame | None],
        choices: Choices,
        whole: Callable[[list[SampleResponse]], dict[str, Any]],
    ) -> AsyncGenerator[Piece]:
        """Chunks until every request has ended; a client that goes away stops them."""
        try:
            for piece in choices.begin(len(requests) * self._body.n):
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
                bodies = [self._result(request) for request in requests]
                reply = await self.on_a_thread(lambda: whole([deserialize_sample_response(b) for b in bodies]))
            except Refused as refusal:  # it is too late for another status
                yield error_body("/v1/", refusal.status, refusal.detail)
                return
            for choice in reply["choices"]:
                for piece in choices.end(choice["index"], choice):
                    yield piece
            if (self._body.stream_options or {}).get("include_usage"):
                yield choices.usage(reply["usage"])
        finally:
            for task in waiting:
                task.cancel()
            self._stop([request for request in requests if request.reply is None])

    def _submit(
        self,
        prompt: list[int],
        max_tokens: int | None,
        topk: int,
        scored: bool = False,
        topk_prompt: int = 0,
        on_progress: Callable[[Frame], None] | None = None,
    ) -> Request:
        room = self._context_length - len(prompt)
        if room < 1:
            raise Refused(
                400,
                f"the prompt of {len(prompt)} tokens leaves no room in the context of {self._context_length}; shorten it by at "
                f"least {1 - room}",
            )
        most = room if max_tokens is None else max_tokens
        fields = {
            "num_samples": self._body.n,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": prompt}]},
            "sampling_params": self._body.sampling_params(most, self.eos_token_ids),
            "prompt_logprobs": scored,
            "topk_prompt_logprobs": topk_prompt if scored else 0,
            "topk_sample_logprobs": topk,
            "prompt_alt_tokens_k": 0,
        }
        prompt_topk, stops = scored + topk_prompt, len(self._body.stop_token_ids or ())
        draw = Draw(json.dumps(fields).encode(), self._body.n, len(prompt), most, topk, prompt_topk, stops)
        if self._tells_logprobs:
            self._posted.holding.grow(reply_bytes(draw, self._context_length))
        salt = self._body.cache_salt
        return self._service.samplers.sample(
            self._posted.tenant, self._sampler_id, None, draw, b"", on_progress, cache_salt=salt
        )

    def _stop(self, requests: list[Request]) -> None:
        for request in requests:
            self._service.requests.cancel(request)
            request.fetched = time.monotonic()  # nobody will ask for it: housekeeping forgets it once it has ended

    async def _wait(self, requests: list[Request]) -> None:
        async def gone() -> None:
            while (await self._posted.receive())["type"] != "http.disconnect":
                pass

        async def all_done() -> None:
            for request in requests:
                await request.done.wait()

        # A gather that is cancelled would be told in the log, with a traceback, as an error that nobody looked at.
        leaving, ended = asyncio.create_task(gone()), asyncio.create_task(all_done())
        try:
            await asyncio.wait([leaving, ended], return_when=asyncio.FIRST_COMPLETED)
            if not ended.done():
                raise Refused(400, "the client went away")
        finally:
            leaving.cancel()
            ended.cancel()

    def _result(self, request: Request) -> bytes:
        self._check(request)
        reply = request.reply
        assert reply is not None
        self._service.requests.forget(request)
        return reply.body

    def _check(self, request: Request) -> None:
        """Raise Refused for a request that has failed."""
        reply = request.reply
        if reply is None or "error" in reply.fields:
            self._service.requests.forget(request)
            fields = {"error": "the result is gone", "category": "server"} if reply is None else reply.fields
            raise Refused(400 if fields["category"] == "user" else 500, fields["error"])
