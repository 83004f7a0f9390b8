"""Anthropic's Messages API over the chats of routes_openai.py: the body becomes a ChatBody, and its reply or stream a Message.

The prompt cache needs no `cache_control`. A thinking block's signature is empty: nothing checks it.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import Annotated, Any, Literal

from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, Field

from tinker_local_backend.server.chat_adapters import as_chat, event, refuse
from tinker_local_backend.server.openai_request import ReplyForm, TextRequest
from tinker_local_backend.server.openai_schemas import Short, Strict, Text
from tinker_local_backend.server.openai_stream import Piece
from tinker_local_backend.server.routes_common import DirectRoute, Posted
from tinker_local_backend.server.routes_openai import chat, chat_prompt
from tinker_local_backend.server.schemas import Count, Name, Seed, Stops

ROUTE = "/v1/messages"


class TextBlock(BaseModel):
    type: Literal["text"]
    text: Text


class ThinkingBlock(BaseModel):
    type: Literal["thinking"]
    thinking: Text


class ToolUse(BaseModel):
    type: Literal["tool_use"]
    id: Short
    name: Text
    input: dict[str, Any]


TextBlocks = Annotated[list[TextBlock], Field(max_length=4096, fail_fast=True)]


class ToolResult(BaseModel):
    type: Literal["tool_result"]
    tool_use_id: Short
    content: Text | TextBlocks | None = None
    is_error: bool = False


Block = Annotated[TextBlock | ThinkingBlock | ToolUse | ToolResult, Field(discriminator="type")]


class AnthropicMessage(BaseModel):
    role: Literal["user", "assistant", "system"]
    content: Text | Annotated[list[Block], Field(max_length=4096, fail_fast=True)]


class AnthropicTool(Strict):
    without_effect = frozenset({"cache_control", "eager_input_streaming"})

    type: Literal["custom"] | None = None
    name: Short
    description: Text | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None


class ToolChoice(Strict):
    type: Literal["auto", "any", "tool", "none"]
    name: Short | None = None
    disable_parallel_tool_use: bool = False


class CountBody(Strict):
    """A prompt."""

    without_effect = frozenset({"cache_control", "metadata", "service_tier"})

    model: Name
    messages: Annotated[list[AnthropicMessage], Field(min_length=1, max_length=10_000, fail_fast=True)]
    system: Text | TextBlocks | None = None
    tools: Annotated[list[AnthropicTool], Field(max_length=1024, fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None


class MessagesBody(CountBody):
    max_tokens: Annotated[Count, Field(ge=1)]
    stop_sequences: Stops | None = None
    stream: bool = False
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    top_p: float | None = None
    seed: Seed | None = None
    """not in Anthropic's API"""


async def messages(posted: Posted, body: MessagesBody) -> Response:
    def fields() -> dict[str, Any]:
        sampling = body.model_dump(include={"max_tokens", "temperature", "top_k", "top_p", "seed", "stream"})
        stream_options = {"include_usage": True} if body.stream else None
        return {
            **_prompt_fields(body),
            **sampling,
            "stop": body.stop_sequences or None,
            "stream_options": stream_options,
        }

    asked = await as_chat(posted, ROUTE, fields)
    return await chat(posted, asked, ReplyForm(lambda reply: JSONResponse(_message(reply)), _events))


async def count_tokens(posted: Posted, body: CountBody) -> Response:
    asked = await as_chat(posted, ROUTE, lambda: _prompt_fields(body))
    request = await TextRequest.named(posted, body.model)
    return JSONResponse({"input_tokens": len(await chat_prompt(request, asked))})


DIRECT = (
    DirectRoute(ROUTE, MessagesBody, messages),
    DirectRoute(f"{ROUTE}/count_tokens", CountBody, count_tokens),
)


# The request


def _prompt_fields(body: CountBody) -> dict[str, Any]:
    """The fields of a ChatBody for the prompt, the tools and the form of the reply."""
    asked: list[dict[str, Any]] = []
    if body.system:
        asked.append({"role": "system", "content": _joined(body.system)})
    for i, message in enumerate(body.messages):
        asked += _chat_messages(message, f"messages[{i}]")
    fields: dict[str, Any] = {"model": body.model, "messages": asked}
    if asked[-1]["role"] == "assistant":  # a prefix of the reply
        if "tool_calls" in asked[-1]:
            raise refuse("messages", "end with a tool_use; append its tool_result")
        fields |= {"add_generation_prompt": False, "continue_final_message": True}
    fields["tool_choice"] = _tool_choice(body.tool_choice)
    if body.tools:
        fields["tools"] = [_tool(tool, i, fields["tool_choice"]) for i, tool in enumerate(body.tools)]
    return {**fields, **_thinking(body.thinking), **_output(body.output_config)}


def _joined(content: str | Sequence[TextBlock] | None) -> str:
    return content if isinstance(content, str) else "".join(block.text for block in content or ())


def _chat_messages(message: AnthropicMessage, where: str) -> Iterator[dict[str, Any]]:
    """Blocks of one message as messages of a chat, in their order."""
    blocks = [TextBlock(type="text", text=message.content)] if isinstance(message.content, str) else message.content
    fitting = {
        "assistant": (TextBlock, ThinkingBlock, ToolUse),
        "user": (TextBlock, ToolResult),
        "system": (TextBlock,),
    }
    for i, block in enumerate(blocks):
        if not isinstance(block, fitting[message.role]):
            raise refuse(
                f"{where}.content[{i}]", f"is a {block.type} block, which a message of role {message.role} cannot have"
            )
    if message.role == "assistant":
        yield _assistant(blocks)
        return
    texts: list[TextBlock] = []
    for block in blocks:
        if isinstance(block, ToolResult):
            if texts:
                yield {"role": message.role, "content": _joined(texts)}
                texts = []
            content = f"Error: {_joined(block.content)}" if block.is_error else _joined(block.content)
            yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}
        elif isinstance(block, TextBlock):
            texts.append(block)
    if texts or not blocks:
        yield {"role": message.role, "content": _joined(texts)}


def _assistant(blocks: Sequence[Block]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant"}
    message["content"] = _joined([block for block in blocks if isinstance(block, TextBlock)])
    if thinking := "".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock)):
        message["reasoning_content"] = thinking
    calls = [block for block in blocks if isinstance(block, ToolUse)]
    if calls:
        message["tool_calls"] = [
            {"id": call.id, "function": {"name": call.name, "arguments": json.dumps(call.input, ensure_ascii=False)}}
            for call in calls
        ]
    return message


def _tool(tool: AnthropicTool, i: int, choice: Any) -> dict[str, Any]:
    if tool.strict and not (choice == "required" or isinstance(choice, dict)):
        raise refuse(f"tools[{i}].strict", "works only for a forced call: set tool_choice to any or tool")
    described = {} if tool.description is None else {"description": tool.description}
    return {"type": "function", "function": {"name": tool.name, **described, "parameters": tool.input_schema}}


def _tool_choice(choice: ToolChoice | None) -> Any:
    if choice is None:
        return None
    if choice.disable_parallel_tool_use and choice.type == "auto":  # a forced call is always a single one
        raise refuse(
            "tool_choice.disable_parallel_tool_use", "is not supported with auto; leave it out, or use any or tool"
        )
    if choice.type == "tool":
        if choice.name is None:
            raise refuse("tool_choice.name", "is missing; name one of tools")
        return {"type": "function", "function": {"name": choice.name}}
    return {"any": "required"}.get(choice.type, choice.type)


def _thinking(thinking: Mapping[str, Any] | None) -> dict[str, Any]:
    """Fields for the thinking option. With `adaptive`, or without the field, the model decides."""
    if thinking is None:
        return {}
    kind = thinking.get("type")
    if kind not in ("adaptive", "disabled"):
        raise refuse(
            f"thinking.type={kind!r:.100}", "is not supported: no budget can be enforced; use adaptive or disabled"
        )
    if others := sorted(thinking.keys() - {"type"}):
        raise refuse(f"thinking.{others[0]}", "is not supported; leave it out")
    return {} if kind == "adaptive" else {"chat_template_kwargs": {"enable_thinking": False}}


def _output(config: Mapping[str, Any] | None) -> dict[str, Any]:
    given = {key: value for key, value in (config or {}).items() if value is not None}
    if others := sorted(given.keys() - {"format"}):
        raise refuse(f"output_config.{others[0]}", "is not supported; leave it out")
    if "format" not in given:
        return {}
    form = given["format"]
    schema = form.get("schema") if isinstance(form, dict) and form.get("type") == "json_schema" else None
    if not isinstance(schema, dict):
        raise refuse("output_config.format", 'must be {"type": "json_schema", "schema": {...}}')
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "output", "schema": schema}}}


# The reply


def _message(reply: Mapping[str, Any]) -> dict[str, Any]:
    """The reply of a chat as a Message."""
    (choice,) = reply["choices"]
    message = choice["message"]
    content: list[dict[str, Any]] = []
    if message.get("reasoning_content"):
        content.append({"type": "thinking", "thinking": message["reasoning_content"], "signature": ""})
    if message["content"]:
        content.append({"type": "text", "text": message["content"]})
    content += [{**_tool_use(call), "input": _parsed(call)} for call in message.get("tool_calls") or ()]
    return {**_empty(reply["model"]), "content": content, **_stop(choice), "usage": _usage(reply["usage"])}


def _empty(model: str) -> dict[str, Any]:
    return {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant", "model": model}


def _tool_use(call: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": {}}


def _parsed(call: Mapping[str, Any]) -> Any:
    arguments = call["function"]["arguments"]
    try:
        return json.loads(arguments)
    except ValueError:  # invalid JSON is passed on as text
        return arguments


def _stop(choice: Mapping[str, Any]) -> dict[str, Any]:
    at = choice.get("stop_reason")
    sequence = at if isinstance(at, str) and choice["finish_reason"] == "stop" else None
    reasons = {"length": "max_tokens", "tool_calls": "tool_use", "stop": "stop_sequence" if sequence else "end_turn"}
    return {"stop_reason": reasons[choice["finish_reason"]], "stop_sequence": sequence}


def _usage(usage: Mapping[str, Any]) -> dict[str, Any]:
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"] - cached,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage["completion_tokens"],
    }


class _Blocks:
    """The content blocks of a stream: one is open at a time."""

    def __init__(self) -> None:
        self._index, self._open = -1, ""

    def add(self, delta: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Events for a chunk's delta."""
        if thinking := delta.get("reasoning_content"):
            yield from self._start("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            yield self._delta({"type": "thinking_delta", "thinking": thinking})
        if text := delta.get("content"):
            yield from self._start("text", {"type": "text", "text": ""})
            yield self._delta({"type": "text_delta", "text": text})
        for call in delta.get("tool_calls") or ():
            yield from self._start(call["id"], _tool_use(call))
            yield self._delta({"type": "input_json_delta", "partial_json": call["function"]["arguments"]})

    def stop(self) -> Iterator[dict[str, Any]]:
        if self._open:
            yield {"type": "content_block_stop", "index": self._index}
        self._open = ""

    def _start(self, name: str, block: dict[str, Any]) -> Iterator[dict[str, Any]]:
        if self._open == name:
            return
        yield from self.stop()
        self._open, self._index = name, self._index + 1
        yield {"type": "content_block_start", "index": self._index, "content_block": block}

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}


async def _events(pieces: AsyncGenerator[Piece], prompt_tokens: int) -> AsyncGenerator[str]:
    """The chunks of a chat as events of a Message."""
    blocks, begun, ended = _Blocks(), False, {}
    async with aclosing(pieces):
        async for piece in pieces:
            if "error" in piece:
                yield event({"type": "error", "error": {"type": "api_error", "message": piece["error"]["message"]}})
                return
            if not begun:
                begun, usage = True, {"input_tokens": prompt_tokens, "output_tokens": 0}
                empty = {**_empty(piece["model"]), "content": [], "stop_reason": None, "stop_sequence": None}
                yield event({"type": "message_start", "message": {**empty, "usage": usage}})
            for choice in piece["choices"]:
                for data in blocks.add(choice["delta"]):
                    yield event(data)
                ended = choice if choice["finish_reason"] else ended
            if piece.get("usage"):
                for data in blocks.stop():
                    yield event(data)
                yield event({"type": "message_delta", "delta": _stop(ended), "usage": _usage(piece["usage"])})
                yield event({"type": "message_stop"})
