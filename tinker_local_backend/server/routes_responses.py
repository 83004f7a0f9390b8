"""OpenAI's Responses API over the chats of routes_openai.py: the body becomes a ChatBody, and its reply or stream a Response.

Nothing is stored: each request has the whole conversation, and reasoning is plain text.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import Annotated, Any, ClassVar, Literal, Self

from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, Discriminator, Field, Tag, model_validator

from tinker_local_backend.server.chat_adapters import as_chat, event, refuse
from tinker_local_backend.server.openai_request import ReplyForm, TextRequest
from tinker_local_backend.server.openai_schemas import Short, Strict, Text
from tinker_local_backend.server.openai_stream import Piece
from tinker_local_backend.server.routes_common import DirectRoute, Posted
from tinker_local_backend.server.routes_openai import chat, chat_prompt
from tinker_local_backend.server.schemas import Count, Name, Seed, entries

ROUTE = "/v1/responses"

LOGPROBS = "message.output_text.logprobs"


Included = Literal["message.output_text.logprobs", "reasoning.encrypted_content"]
"""The second has no effect: reasoning is always included as plain text."""


class Part(BaseModel):
    type: Literal["input_text", "output_text", "reasoning_text", "summary_text"]
    text: Text


Parts = Annotated[list[Part], Field(max_length=4096, fail_fast=True)]


class MessageItem(BaseModel):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Text | Parts


class CallItem(BaseModel):
    type: Literal["function_call"]
    call_id: Short
    name: Text
    arguments: Text


class OutputItem(BaseModel):
    type: Literal["function_call_output"]
    call_id: Short
    output: Text | Parts


class ReasoningItem(BaseModel):
    type: Literal["reasoning"]
    content: Parts | None = None


def _kind(item: Any) -> Any:
    return item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", None)


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[OutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(_kind),
]


class FunctionTool(Strict):
    type: Literal["function"]
    name: Short
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class InputBody(Strict):
    """A prompt."""

    without_effect = frozenset(
        ["user", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"]
    )
    stateless: ClassVar[dict[str, tuple[Any, ...]]] = {
        "previous_response_id": (None,),
        "conversation": (None,),
        "truncation": (None, "disabled"),
    }
    """Field for state between requests -> values that need no state"""

    model: Name
    input: Text | Annotated[list[Item], Field(min_length=1, max_length=10_000, fail_fast=True)]
    instructions: Text | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=1024, fail_fast=True)] | None = None
    tool_choice: Short | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    """as in chats, a forced call is always a single one, and otherwise the model decides"""
    reasoning: dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    previous_response_id: Any = None
    conversation: Any = None
    truncation: Any = None

    @model_validator(mode="after")
    def _check_state(self) -> Self:
        for name, values in self.stateless.items():
            if getattr(self, name) not in values:
                raise refuse(
                    name, "is not supported: nothing is stored or truncated here; send the whole conversation as input"
                )
        return self


class ResponsesBody(InputBody):
    max_output_tokens: Count | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: Seed | None = None
    """not in OpenAI's route"""
    stateless = {**InputBody.stateless, "store": (None, False), "background": (None, False)}  # noqa: RUF012
    stream: bool = False
    stream_options: Annotated[dict[str, Any], entries(8)] | None = None
    store: bool | None = None
    background: bool | None = None
    include: Annotated[list[Included], Field(max_length=8)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None


async def responses(posted: Posted, body: ResponsesBody) -> Response:
    def fields() -> dict[str, Any]:
        sampling = body.model_dump(include={"temperature", "top_p", "seed", "stream"})
        logprobs = LOGPROBS in (body.include or ())
        return {
            **_prompt_fields(body),
            **sampling,
            "max_completion_tokens": body.max_output_tokens,
            "stream_options": {"include_usage": True} if body.stream else None,
            "logprobs": logprobs or None,
            "top_logprobs": body.top_logprobs if logprobs else None,
        }

    asked = await as_chat(posted, ROUTE, fields)
    builder = _ResponseBuilder(body)
    return await chat(posted, asked, ReplyForm(lambda reply: JSONResponse(builder.whole(reply)), builder.events))


async def count(posted: Posted, body: InputBody) -> Response:
    asked = await as_chat(posted, ROUTE, lambda: _prompt_fields(body))
    request = await TextRequest.named(posted, body.model)
    tokens = len(await chat_prompt(request, asked))
    return JSONResponse({"object": "response.input_tokens", "input_tokens": tokens})


DIRECT = (DirectRoute(ROUTE, ResponsesBody, responses), DirectRoute(f"{ROUTE}/input_tokens", InputBody, count))


# The request


def _prompt_fields(body: InputBody) -> dict[str, Any]:
    """The fields of a ChatBody for the prompt, the tools and the form of the reply."""
    asked: list[dict[str, Any]] = []
    if body.instructions:
        asked.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        asked.append({"role": "user", "content": body.input})
    else:
        asked += _messages(body.input)
    fields: dict[str, Any] = {"model": body.model, "messages": asked, "tool_choice": _tool_choice(body.tool_choice)}
    if body.tools:
        fields["tools"] = [
            {"type": "function", "function": tool.model_dump(include=_FUNCTION, exclude_none=True)}
            for tool in body.tools
        ]
    if others := sorted(key for key, value in (body.reasoning or {}).items() if key != "effort" and value is not None):
        raise refuse(f"reasoning.{others[0]}", "is not supported: reasoning is returned in full; leave it out")
    if body.reasoning and body.reasoning.get("effort") is not None:
        fields["reasoning_effort"] = body.reasoning["effort"]
    return {**fields, **_format(body.text)}


_FUNCTION = {"name", "description", "parameters"}


def _messages(items: Sequence[BaseModel]) -> list[dict[str, Any]]:
    """Items as messages of a chat: consecutive reasoning, text and calls are merged into one assistant message."""
    messages: list[dict[str, Any]] = []
    open_turn: dict[str, Any] | None = None

    def turn(*filled: str) -> dict[str, Any]:
        """The assistant message to add to: a new one if the open one already has any of these."""
        nonlocal open_turn
        if open_turn is None or any(open_turn.get(name) for name in filled):
            open_turn = {"role": "assistant", "content": ""}
            messages.append(open_turn)
        return open_turn

    for item in items:
        if isinstance(item, ReasoningItem):
            turn("content", "tool_calls", "reasoning_content")["reasoning_content"] = _joined(item.content or ())
        elif isinstance(item, CallItem):
            call = {"id": item.call_id, "function": {"name": item.name, "arguments": item.arguments}}
            turn().setdefault("tool_calls", []).append(call)
        elif isinstance(item, MessageItem) and item.role == "assistant":
            turn("content", "tool_calls")["content"] = _joined(item.content)
        else:
            open_turn = None
            if isinstance(item, OutputItem):
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _joined(item.output)})
            elif isinstance(item, MessageItem):
                messages.append({"role": item.role, "content": _joined(item.content)})
    return messages


def _joined(content: str | Sequence[Part]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


def _tool_choice(choice: str | Mapping[str, Any] | None) -> Any:
    if isinstance(choice, Mapping):
        if choice.get("type") != "function":
            raise refuse(f"tool_choice.type={choice.get('type')!r:.100}", "is not supported; use function")
        return {"type": "function", "function": {"name": choice.get("name")}}
    return choice


def _format(text: Mapping[str, Any] | None) -> dict[str, Any]:
    given = {key: value for key, value in (text or {}).items() if value is not None}
    if others := sorted(given.keys() - {"format"}):
        raise refuse(f"text.{others[0]}", "is not supported; leave it out")
    form = given.get("format")
    if form is None:
        return {}
    if isinstance(form, dict) and form.get("type") == "json_schema":
        described = {key: value for key, value in form.items() if key != "type"}
        return {"response_format": {"type": "json_schema", "json_schema": described}}
    return {"response_format": form}


# The reply


def _id(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"


class _Item:
    """An item of the output as it grows."""

    def __init__(self, kind: Literal["reasoning", "message", "function_call"], call: Mapping[str, Any] | None = None):
        self.kind, self.text = kind, ""
        self.logprobs: list[dict[str, Any]] = []
        self.id = _id({"reasoning": "rs", "message": "msg", "function_call": "fc"}[kind])
        self._call = call or {}

    def part(self, is_done: bool = True) -> dict[str, Any]:
        """The only part of its content."""
        text = self.text if is_done else ""
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": self.logprobs if is_done else []}

    def written(self, is_done: bool = True, status: str = "completed") -> dict[str, Any]:
        item: dict[str, Any] = {"id": self.id, "type": self.kind, "status": status if is_done else "in_progress"}
        if self.kind == "function_call":
            name, call_id = self._call["function"]["name"], self._call["id"]
            return {**item, "call_id": call_id, "name": name, "arguments": self.text if is_done else ""}
        content = [self.part()] if is_done else []
        return (
            {**item, "summary": [], "content": content}
            if self.kind == "reasoning"
            else {
                **item,
                "role": "assistant",
                "content": content,
            }
        )


class _ResponseBuilder:
    """Builds the Response for a body, whole or as events."""

    def __init__(self, body: ResponsesBody):
        self._body, self._id, self._created = body, _id("resp"), int(time.time())
        self._items: list[_Item] = []
        self._model = body.model
        self._number = -1

    def whole(self, reply: Mapping[str, Any]) -> dict[str, Any]:
        """The reply of a chat as a Response."""
        (choice,) = reply["choices"]
        self._model = reply["model"]
        for _ in self._grow(choice["message"], choice.get("logprobs")):
            pass
        return self._response(choice["finish_reason"], reply["usage"])

    async def events(self, pieces: AsyncGenerator[Piece], prompt_tokens: int) -> AsyncGenerator[str]:
        """The chunks of a chat as events of a Response."""
        reason: str | None = None
        async with aclosing(pieces):
            async for piece in pieces:
                if "error" in piece:
                    error = {"code": piece["error"]["code"] or "server_error", "message": piece["error"]["message"]}
                    yield self._event(
                        "response.failed", response={**self._response(), "status": "failed", "error": error}
                    )
                    return
                if self._number < 0:
                    self._model = piece["model"]
                    yield self._event("response.created", response=self._response())
                    yield self._event("response.in_progress", response=self._response())
                for choice in piece["choices"]:
                    for data in self._grow(choice["delta"], choice.get("logprobs")):
                        yield data
                    reason = choice["finish_reason"] or reason
                if piece.get("usage"):
                    for data in self._end_item(reason):
                        yield data
                    response = self._response(reason, piece["usage"])
                    yield self._event(f"response.{response['status']}", response=response)

    def _event(self, kind: str, **fields: Any) -> str:
        self._number += 1
        return event({"type": kind, "sequence_number": self._number, **fields})

    def _grow(self, delta: Mapping[str, Any], logprobs: Mapping[str, Any] | None) -> Iterator[str]:
        """Add a message, or the delta of one."""
        if reasoning := delta.get("reasoning_content"):
            yield from self._add("reasoning", reasoning, "response.reasoning_text.delta")
        if text := delta.get("content"):
            yield from self._add("message", text, "response.output_text.delta", logprobs=[])
        if logprobs and (messages := [item for item in self._items if item.kind == "message"]):
            messages[-1].logprobs += logprobs["content"]
        for call in delta.get("tool_calls") or ():
            arguments = call["function"]["arguments"]
            yield from self._add("function_call", arguments, "response.function_call_arguments.delta", call)

    def _add(
        self,
        kind: Literal["reasoning", "message", "function_call"],
        text: str,
        name: str,
        call: Mapping[str, Any] | None = None,
        **fields: Any,
    ) -> Iterator[str]:
        if not self._items or self._items[-1].kind != kind or call is not None:
            yield from self._end_item()
            self._items.append(_Item(kind, call))
            item = self._items[-1]
            yield self._event("response.output_item.added", output_index=len(self._items) - 1, item=item.written(False))
            if call is None:
                yield self._event("response.content_part.added", **self._at(item), part=item.part(False))
        item = self._items[-1]
        item.text += text
        yield self._event(name, **self._at(item), delta=text, **fields)

    def _at(self, item: _Item) -> dict[str, Any]:
        at = {"item_id": item.id, "output_index": len(self._items) - 1}
        return at if item.kind == "function_call" else {**at, "content_index": 0}

    def _end_item(self, reason: str | None = None) -> Iterator[str]:
        if not self._items:
            return
        item = self._items[-1]
        at = self._at(item)
        if item.kind == "function_call":
            yield self._event("response.function_call_arguments.done", **at, arguments=item.text)
        else:
            name, scores = (
                ("reasoning_text", {}) if item.kind == "reasoning" else ("output_text", {"logprobs": item.logprobs})
            )
            yield self._event(f"response.{name}.done", **at, text=item.text, **scores)
            yield self._event("response.content_part.done", **at, part=item.part())
        status = "incomplete" if reason == "length" else "completed"
        yield self._event(
            "response.output_item.done", output_index=at["output_index"], item=item.written(status=status)
        )

    def _response(self, reason: str | None = None, usage: Mapping[str, Any] | None = None) -> dict[str, Any]:
        body, is_cut = self._body, reason == "length"
        status = "in_progress" if usage is None else "incomplete" if is_cut else "completed"
        last = len(self._items) - 1
        items = [
            item.written(status=status if i == last and is_cut else "completed") for i, item in enumerate(self._items)
        ]
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": self._model,
            "output": items if usage is not None else [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": (body.reasoning or {}).get("effort"), "summary": None},
            "store": False,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": {"format": (body.text or {}).get("format") or {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": [tool.model_dump(exclude_none=True) for tool in body.tools or ()],
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
            "usage": None if usage is None else _usage(usage),
            "metadata": {},
        }


def _usage(usage: Mapping[str, Any]) -> dict[str, Any]:
    reasoning = usage.get("completion_tokens_details", {}).get("reasoning_tokens", 0)
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": usage["prompt_tokens_details"]["cached_tokens"]},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": reasoning},
        "total_tokens": usage["total_tokens"],
    }
