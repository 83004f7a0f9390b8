"""vLLM's routes that convert texts and tokens, for clients without a tokenizer, and its version route."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any, Self

from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response
from pydantic import Field, model_validator

from tinker_local_backend.server.errors import Refused
from tinker_local_backend.server.openai_request import TOO_LONG, TextRequest
from tinker_local_backend.server.openai_schemas import ChatBody, Message, Strict, Text, TokenIds, Tool
from tinker_local_backend.server.routes_common import DirectRoute, Posted
from tinker_local_backend.server.routes_openai import chat_prompt
from tinker_local_backend.server.schemas import Name, entries

DISTRIBUTION = "tinker-cookbook-local"


class TokenizeBody(Strict):
    """A text, or a chat as for /v1/chat/completions."""

    model: Name | None = None
    prompt: Text | None = None
    add_special_tokens: bool | None = None
    """for a text: whether the tokenizer adds its special tokens; default: true"""
    messages: Annotated[list[Message], Field(min_length=1, max_length=10_000, fail_fast=True)] | None = None
    tools: Annotated[list[Tool], Field(max_length=1024, fail_fast=True)] | None = None
    chat_template_kwargs: Annotated[dict[str, bool], entries(64)] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _check_kind(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise Refused(400, "give exactly one of prompt and messages")
        if self.messages is not None and self.add_special_tokens:
            raise Refused(
                400, "add_special_tokens is for a prompt: for messages the chat template adds them; leave it out"
            )
        return self


class DetokenizeBody(Strict):
    model: Name | None = None
    tokens: TokenIds


def router() -> APIRouter:
    routes = APIRouter()

    @routes.get("/version")
    async def server_version() -> Any:
        try:
            return {"version": version(DISTRIBUTION)}
        except PackageNotFoundError:  # a checkout that is not installed
            return {"version": "unknown"}

    return routes


async def tokenize(posted: Posted, body: TokenizeBody) -> Response:
    request = await TextRequest.named(posted, body.model or posted.service.link.models[0].name)
    tokenizer = request.text.tokenizer
    if body.messages is not None:
        fields = ("messages", "tools", "chat_template_kwargs", "add_generation_prompt", "continue_final_message")
        chat = ChatBody(model=request.model.name, **{name: getattr(body, name) for name in fields})
        tokens = await chat_prompt(request, chat)
    else:
        prompt, special = body.prompt or "", body.add_special_tokens is not False
        request.check_text([len(prompt)])
        tokens = await request.in_tokenizer_pool(lambda: tokenizer.encode(prompt, add_special_tokens=special))
    names = None
    if body.return_token_strs:
        names = await request.in_tokenizer_pool(lambda: tokenizer.convert_ids_to_tokens(tokens))
    max_model_len = request.model.context_length
    return JSONResponse({"count": len(tokens), "max_model_len": max_model_len, "tokens": tokens, "token_strs": names})


async def detokenize(posted: Posted, body: DetokenizeBody) -> Response:
    request = await TextRequest.named(posted, body.model or posted.service.link.models[0].name)
    tokenizer, length = request.text.tokenizer, request.model.context_length
    if len(body.tokens) > length:
        raise Refused(400, f"there are {len(body.tokens)} tokens, more than the context of {length}", code=TOO_LONG)
    if body.tokens and max(body.tokens) >= len(tokenizer):
        raise Refused(400, f"tokens has {max(body.tokens)}; this tokenizer has {len(tokenizer)} tokens")
    return JSONResponse({"prompt": await request.in_tokenizer_pool(lambda: tokenizer.decode(body.tokens))})


DIRECT = (DirectRoute("/tokenize", TokenizeBody, tokenize), DirectRoute("/detokenize", DetokenizeBody, detokenize))
