"""Convert messages and tools to and from OpenAI's Chat Completions format. Independent of any model.

`endpoints.as_openai` is for messages to a judge, and supports only text; these functions convert everything that a
message can hold.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from typing import Any, NotRequired, TypedDict, cast
from urllib.parse import urlparse

from tinker_cookbook.audio_processing_utils import audio_part_to_input_audio
from tinker_cookbook.exceptions import DataFormatError
from tinker_cookbook.image_processing_utils import image_to_data_uri
from tinker_cookbook.renderers.types import ContentPart, Message, ToolCall, ToolSpec
from tinker_cookbook.utils.narrowing import is_list, is_object

TOOL_DECLARE = "tool_declare"
"""The role of a message that declares tools."""


class OpenAIChatInput(TypedDict):
    """The part of a request that a conversation provides."""

    messages: list[dict[str, Any]]
    tools: NotRequired[list[dict[str, Any]]]


def openai_messages_to_tinker(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Convert to the renderers' messages.

    `reasoning_content` of an assistant becomes a thinking part before the others. Images and recordings become
    separate parts; content None, as in messages with tool calls, becomes an empty text.

    Raises:
        DataFormatError: reasoning is not text, or not an assistant's; or a recording is not base64.
    """
    return [_from_openai(message) for message in messages]


def _from_openai(message: Mapping[str, Any]) -> Message:
    content = message.get("content") or ""
    parts = content if isinstance(content, str) else [_part_from_openai(part) for part in content]
    if reasoning := message.get("reasoning_content"):
        if not isinstance(reasoning, str):
            raise DataFormatError(f"reasoning_content must be a string; got {type(reasoning).__name__}")
        _check_reasons(message["role"], "reasoning_content")
        text: list[Any] = [{"type": "text", "text": parts}] if parts else []
        parts = [{"type": "thinking", "thinking": reasoning}, *(text if isinstance(parts, str) else parts)]
    converted: dict[str, Any] = {"role": message["role"], "content": parts}
    converted |= {key: message[key] for key in ("name", "tool_call_id") if key in message}
    if "tool_calls" in message:
        converted["tool_calls"] = [ToolCall.model_validate(call) for call in message["tool_calls"]]
    return cast(Message, converted)


def _check_reasons(role: str, what: str) -> None:
    if role != "assistant":
        raise DataFormatError(f"{what} is only valid on assistant messages; this one is of role {role!r}")


def _part_from_openai(part: Mapping[str, Any]) -> ContentPart:
    converted: Any = dict(part)
    if part.get("type") == "image_url":
        source = part["image_url"]
        converted = {"type": "image", "image": source if isinstance(source, str) else source["url"]}
    elif part.get("type") == "input_audio":
        audio = part["input_audio"]
        try:
            data = base64.b64decode(audio["data"], validate=True)
        except ValueError as error:
            raise DataFormatError(f"input_audio: data is not base64 ({error})") from error
        known = {key: audio[key] for key in ("num_frames", "sample_rate") if key in audio}
        converted = {"type": "audio", "audio": data, "format": audio["format"].lower(), **known}
    return cast(ContentPart, converted)


def tinker_messages_to_openai(messages: Sequence[Message]) -> OpenAIChatInput:
    """The `messages` of a request and, if there are messages of the role `tool_declare`, its `tools`.

    The thinking parts of a message are joined with line breaks into one `reasoning_content`. `trainable` and
    `unparsed_tool_calls` do not exist in OpenAI's format and are dropped.

    Raises:
        DataFormatError: thinking of a role other than the assistant's; a part of an unknown type; a declaration that
            is not a JSON list of tools, or contradicts another one; an image or recording that cannot be sent.
    """
    tools: dict[str, dict[str, Any]] = {}
    for tool in (tool for message in messages if message["role"] == TOOL_DECLARE for tool in _declared(message)):
        name = tool["function"]["name"]
        if tools.setdefault(name, tool) != tool:
            raise DataFormatError(f"tool {name!r} is declared twice with different specs")
    converted = [_to_openai(message) for message in messages if message["role"] != TOOL_DECLARE]
    return {"messages": converted, "tools": [*tools.values()]} if tools else {"messages": converted}


def _declared(message: Message) -> list[dict[str, Any]]:
    try:
        tools = json.loads(message["content"]) if isinstance(message["content"], str) else None
    except ValueError:
        tools = None
    if not is_list(tools) or not all(is_object(t) and is_object(t.get("function")) for t in tools):
        raise DataFormatError(
            f"a message of role {TOOL_DECLARE} must be a JSON list of OpenAI tools (tool_specs_to_openai_tools makes one)"
        )
    for tool in tools:
        if not isinstance(tool["function"].get("name"), str):
            raise DataFormatError(f"a declared tool's name must be a string; got {tool['function'].get('name')!r}")
    return tools


def _to_openai(message: Message) -> dict[str, Any]:
    converted: dict[str, Any] = {"role": message["role"], "content": message["content"]}
    calls = message.get("tool_calls")
    if not isinstance(message["content"], str):
        thoughts = [part["thinking"] for part in message["content"] if part["type"] == "thinking"]
        parts = [_part_to_openai(part) for part in message["content"] if part["type"] != "thinking"]
        if len(parts) == 1 and parts[0]["type"] == "text":
            converted["content"] = parts[0]["text"]
        else:
            converted["content"] = parts or (None if calls else "")
        if thoughts:
            _check_reasons(message["role"], "thinking")
            converted["reasoning_content"] = "\n".join(thoughts)
    if calls is not None:
        converted["tool_calls"] = [_call_to_openai(call) for call in calls]
    return converted | {key: message.get(key) for key in ("tool_call_id", "name") if key in message}


def _call_to_openai(call: object) -> object:
    """Anything but a ToolCall is assumed to be in OpenAI's form already."""
    return call.model_dump(mode="json", exclude_none=True) if isinstance(call, ToolCall) else call


def _part_to_openai(part: ContentPart) -> dict[str, Any]:
    if part["type"] == "text":
        return {"type": "text", "text": part["text"]}
    if part["type"] == "image":
        image: Any = part["image"]
        is_remote = isinstance(image, str) and urlparse(image).scheme in ("http", "https")
        return {"type": "image_url", "image_url": {"url": image if is_remote else image_to_data_uri(image)}}
    if part["type"] == "audio":
        return {"type": "input_audio", "input_audio": audio_part_to_input_audio(part)}
    raise DataFormatError(f"unsupported content part type: {part['type']!r}")


def openai_tools_to_tinker(tools: Sequence[Mapping[str, Any]]) -> list[ToolSpec]:
    """The function tools, in the renderers' form. Tools of other types only run on OpenAI's servers."""
    functions = [tool["function"] for tool in tools if tool.get("type") == "function"]
    return [
        {"name": f["name"], "description": f.get("description", ""), "parameters": f.get("parameters", {})}
        for f in functions
    ]


def tool_specs_to_openai_tools(tools: Sequence[ToolSpec]) -> list[dict[str, Any]]:
    """The renderers' tools as a request declares them."""
    keys = ("name", "description", "parameters")
    return [{"type": "function", "function": {key: tool[key] for key in keys}} for tool in tools]
