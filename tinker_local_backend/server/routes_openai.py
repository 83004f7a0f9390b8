"""OpenAI-compatible routes, and vLLM's token-in, token-out route, for judges, evaluations and other clients.

A model is a base model's name or a `tinker://` path. Logprobs are the engine's: of softmax(logits / temperature), before top-k
and top-p; at temperature 0, of temperature 1. Streams send each token.
"""

from __future__ import annotations

import uuid
from typing import Any

from fastapi import APIRouter
from fastapi.responses import Response
from tinker.types import SampleResponse

from tinker_local_backend.server import openai_replies
from tinker_local_backend.server.chat_format import ChatFormat, format_name, rendered
from tinker_local_backend.server.chat_text import ChatText
from tinker_local_backend.server.errors import Refused
from tinker_local_backend.server.openai_request import OPENAI_FORM, OpenAIRequest, ReplyForm, SampleSpec, TextRequest
from tinker_local_backend.server.openai_schemas import (
    ChatBody,
    CompletionBody,
    GenerateBody,
    GenerateParams,
    OpenAIBody,
    text_of,
)
from tinker_local_backend.server.openai_stream import Choices
from tinker_local_backend.server.routes_common import Context, DirectRoute, Posted


def router() -> APIRouter:
    routes = APIRouter()

    @routes.get("/v1/models")
    async def models(context: Context) -> Any:
        formats, served = context.service.formats, context.service.link.models
        entries = [_model_entry(m.name, m.context_length, format_name(formats, m.name, {})) for m in served]
        ends = {"has_more": False, "first_id": entries[0]["id"], "last_id": entries[-1]["id"]}  # Anthropic's
        return {"object": "list", "data": entries, **ends}

    @routes.get("/v1/models/{name:path}")
    async def model(name: str, context: Context) -> Any:
        base, info, name = await context.service.samplers.named(context.tenant, name)
        metadata = {} if info is None else info.user_metadata
        return _model_entry(name, base.context_length, format_name(context.service.formats, base.name, metadata))

    return routes


async def chat_prompt(request: TextRequest, body: ChatBody, chat_format: ChatFormat | None = None) -> list[int]:
    """The tokens of a chat. `chat_format`: the request's, if already known."""
    posted = request.posted
    limit = posted.service.texts.max_characters
    request.check_text([await posted.off_loop(posted.reservation.count, lambda: _characters(body, limit))])
    if body.continue_final_message and (body.add_generation_prompt or body.messages[-1].role != "assistant"):
        raise Refused(
            400, "continue_final_message needs add_generation_prompt=false, and an assistant message at the end"
        )

    written = request.format_of(body) if chat_format is None else chat_format
    ending = body.add_generation_prompt, body.continue_final_message
    return await request.in_tokenizer_pool(lambda: rendered(written, body.messages, *ending))


async def chat(posted: Posted, body: ChatBody, form: ReplyForm = OPENAI_FORM) -> Response:
    """`form`: how the reply is written."""
    request = await OpenAIRequest.of(posted, body, bool(body.logprobs))
    chat_format = request.chat_format
    assert chat_format is not None
    prompt = await chat_prompt(request, body, chat_format)
    if body.top_logprobs and not body.logprobs:
        raise Refused(400, "top_logprobs needs logprobs=true")
    max_tokens = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    topk = body.top_logprobs or 0

    def make_reply(responses: list[SampleResponse]) -> dict[str, Any]:
        return openai_replies.chat(body, request.text, request.model.eos_token_ids, prompt, responses[0], chat_format)

    if body.stream:
        choices = Choices(body, request.text, request.model.eos_token_ids, chat_format)
        return await request.stream(SampleSpec([prompt], max_tokens, make_reply, topk), choices, form.events)
    return await request.sample(SampleSpec([prompt], max_tokens, make_reply, topk), form.whole)


async def completions(posted: Posted, body: CompletionBody) -> Response:
    request = await OpenAIRequest.of(posted, body, body.logprobs is not None)
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
    max_tokens = 1 if body.max_tokens == 0 else body.max_tokens  # the reply drops this token
    return await request.sample(SampleSpec(prompts, max_tokens, make_reply, topk, scored, topk, body.best_of))


async def generate(posted: Posted, body: GenerateBody) -> Response:
    params = body.sampling_params
    known = params.model_fields_set & set(GenerateParams.model_fields) - {"max_tokens", "logprobs"}
    like = OpenAIBody(
        model=body.model or posted.service.link.models[0].name,
        cache_salt=body.cache_salt,
        **params.model_dump(include=known, exclude_none=True),
    )
    request = await OpenAIRequest.of(posted, like, params.logprobs is not None)

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
        count += len(text_of(message.content or ""))
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
    """Description of a model, with the fields of OpenAI, vLLM and Anthropic."""
    openai = {"id": name, "object": "model", "created": 0, "owned_by": "local", "max_model_len": context_length}
    return {
        **openai,
        "chat_format": chat_format,
        "type": "model",
        "display_name": name,
        "created_at": "1970-01-01T00:00:00Z",
    }


def _prompts(text: ChatText, body: CompletionBody) -> list[list[int]]:
    prompt = body.prompt
    if isinstance(prompt, str):
        return [text.encode(prompt)]
    if not prompt:
        raise Refused(400, "prompt is empty; give a text or token ids")
    if isinstance(prompt[0], int):
        return [prompt]  # pyright: ignore[reportReturnType]
    if len(prompt) * (body.best_of or body.n) > 4096:
        samples = f"n={body.n}" if body.best_of is None else f"best_of={body.best_of}"
        raise Refused(400, f"{len(prompt)} prompts times {samples} are more than 4096 samples; send fewer at a time")
    return [text.encode(part) if isinstance(part, str) else part for part in prompt]  # pyright: ignore
