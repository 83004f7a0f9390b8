"""Parse and convert message content: text, thinking and tool calls. Pure functions over strings and parts."""

import json
import re
from collections.abc import Callable, Iterable
from typing import Any

from tinker_cookbook.exceptions import RendererError
from tinker_cookbook.renderers.blocks import THINK_OPEN, TOOL_CLOSE, TOOL_OPEN, BlockKind, BlockScanner, Piece
from tinker_cookbook.renderers.types import (
    Content,
    ContentPart,
    Message,
    ParseFailureKind,
    ParseTermination,
    TextPart,
    ThinkingPart,
    ToolCall,
    UnparsedToolCall,
)
from tinker_cookbook.utils.narrowing import is_object

PARSE_FAILURE_DETAIL_MAX_CHARS = 16384
LONGEST_ADDRESS = 512
"""Image addresses up to this many characters are logged in full."""
UNTERMINATED_TOOL_BLOCK_ERROR = "unterminated tool block"
"""Start of the error for a call that is never closed."""
_PART_KEYS = ("text", "thinking", "image", "audio")
_CANONICAL_CALL = re.compile(r'\n\{"name": "([^"\\]+)", "arguments": (.*)\}\n', re.DOTALL)


def ensure_list(content: Content) -> list[ContentPart]:
    """Content as a list of parts; a string becomes one text part, an empty string an empty list."""
    if isinstance(content, str):
        return [TextPart(type="text", text=content)] if content else []
    return content


def ensure_text(content: Content) -> str:
    """Content that must consist of text. Raises RendererError for any other kind of part."""
    others = sorted({part["type"] for part in ensure_list(content) if part["type"] != "text"})
    if others:
        raise RendererError(f"content must be text only here, but it holds parts of type {', '.join(others)}")
    return text_of(content)


def text_of(content: Content) -> str:
    """The text parts, joined; thinking and media are dropped."""
    return "".join(part["text"] for part in ensure_list(content) if part["type"] == "text")


def shown_text(content: Content) -> str:
    """The text parts, joined, with `[image]` for images; for display, never for prompts."""
    return "".join("[image]" if part["type"] == "image" else text_of([part]) for part in ensure_list(content))


def thinking_of(content: Content) -> str:
    """The thinking parts, joined."""
    return "".join(part["thinking"] for part in ensure_list(content) if part["type"] == "thinking")


def get_text_content(message: Message) -> str:
    """The visible text of the message, without thinking."""
    return text_of(message["content"])


def format_content_as_string(content: Content, separator: str = "\n") -> str:
    """Content for a log, parts joined by `separator`: thinking in <think> tags, an image in <image> tags as its address (a
    long one is cut) or as `Image(WxH, mode)`, other media as [audio].
    """
    if isinstance(content, str):
        return content
    pieces: list[str] = []
    for part in content:
        if part["type"] == "text":
            pieces.append(part["text"])
        elif part["type"] == "thinking":
            pieces.append(f"<think>{part['thinking']}</think>")
        elif part["type"] == "image":
            pieces.append(f"<image>{_named(part['image'])}</image>")
        else:
            pieces.append(f"[{part['type']}]")
    return separator.join(pieces)


def _named(image: Any) -> str:
    """An image in one line; a long address, such as a data URI, is cut."""
    if not isinstance(image, str):
        return f"Image({image.size[0]}x{image.size[1]}, {image.mode})"
    return image if len(image) <= LONGEST_ADDRESS else f"{image[:40]}... ({len(image)} characters)"


def parse_think_blocks(text: str) -> list[ContentPart]:
    """Split text with <think> blocks into thinking and text parts. Tool call blocks stay in the text."""
    ends = {BlockKind.TOOL_CALL: TOOL_CLOSE, BlockKind.UNCLOSED_TOOL_CALL: ""}
    pieces = (
        Piece(BlockKind.TEXT, TOOL_OPEN + body + ends[kind]) if kind in ends else Piece(kind, body)
        for kind, body in BlockScanner().finish(text)
    )
    return parse_pieces(pieces)[0]


def parse_content_blocks(content: str) -> tuple[list[ContentPart], list[ToolCall | UnparsedToolCall]]:
    """Split a model's output into its parts and its tool calls, each in order.

    An unclosed <think> makes the rest thinking, so that truncated reasoning is never mistaken for an answer; an
    unclosed <tool_call> becomes an UnparsedToolCall.
    """
    return parse_pieces(BlockScanner().finish(content))


def parse_pieces(
    pieces: Iterable[Piece],
    tool_tags: tuple[str, str] = (TOOL_OPEN, TOOL_CLOSE),
    read_calls: Callable[[str], list[ToolCall | UnparsedToolCall]] | None = None,
) -> tuple[list[ContentPart], list[ToolCall | UnparsedToolCall]]:
    """(parts, tool calls) from the pieces of a complete text; `read_calls` parses the text between `tool_tags`."""
    read_calls = read_calls or (lambda body: [parse_tool_call(body)])
    parts: list[ContentPart] = []
    calls: list[ToolCall | UnparsedToolCall] = []
    for kind, text in pieces:
        last = parts[-1] if parts else None
        if kind is BlockKind.TOOL_CALL:
            calls += read_calls(text)
        elif kind is BlockKind.UNCLOSED_TOOL_CALL:
            calls.append(unterminated(*tool_tags, text))
        elif kind is BlockKind.TEXT and last is not None and last["type"] == "text":
            last["text"] += text
        elif kind is BlockKind.TEXT:
            parts.append(TextPart(type="text", text=text))
        elif kind is BlockKind.THINKING and last is not None and last["type"] == "thinking":
            last["thinking"] += text
        else:
            parts.append(ThinkingPart(type="thinking", thinking=text))
    return parts, calls


def assistant_message(content: Content, calls: Iterable[ToolCall | UnparsedToolCall]) -> Message:
    """The assistant message of a parsed response; `calls` go under the key of their kind, which is absent if there are
    none.
    """
    message, calls = Message(role="assistant", content=content), list(calls)
    if good := [call for call in calls if isinstance(call, ToolCall)]:
        message["tool_calls"] = good
    if bad := [call for call in calls if isinstance(call, UnparsedToolCall)]:
        message["unparsed_tool_calls"] = bad
    return message


def parse_tool_call(body: str) -> ToolCall | UnparsedToolCall:
    """Parse the content of one <tool_call> block: a JSON object with `name` (string) and `arguments` (object)."""
    try:
        call = check_call(load_json(body))
        canonical = _CANONICAL_CALL.fullmatch(body)
        # The arguments keep the model's spelling (spaces, escapes) if the block has the canonical form.
        arguments = canonical.group(2) if canonical else json.dumps(call["arguments"], ensure_ascii=False)
        check_encodable(call["name"] + arguments)
    except ValueError as error:
        return UnparsedToolCall(raw_text=TOOL_OPEN + body + TOOL_CLOSE, error=str(error))
    return ToolCall(function=ToolCall.FunctionBody(name=call["name"], arguments=arguments))


def load_json(text: str) -> object:
    """json.loads for model output. Raises ValueError with the reason, even for extremely deep nesting."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not valid JSON: {error}") from error


def check_call(call: object, *also: str) -> dict[str, Any]:
    """Check a decoded tool call with `name`, `arguments` and the keys `also`. Raises ValueError with the reason."""
    if not is_object(call) or not isinstance(call.get("name"), str):
        raise ValueError('expected a JSON object with the string key "name"')
    if not isinstance(call.get("arguments"), dict):
        raise ValueError('expected the key "arguments" to be a JSON object')
    if extra := sorted(set(call) - {"name", "arguments", *also}):
        raise ValueError(f"unexpected keys {extra}; a call has {', '.join(('name', 'arguments', *also))} only")
    return call


def check_arguments(arguments: str) -> None:
    """Raises ValueError when `arguments` is not a JSON object."""
    try:
        is_object = isinstance(load_json(arguments), dict)
    except ValueError as error:
        raise ValueError(f"the arguments are {error}") from error
    if not is_object:
        raise ValueError("the arguments are not a JSON object")


def check_encodable(text: str) -> None:
    """Raises ValueError for text with a lone surrogate (JSON can encode one), which no tokenizer accepts."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("an escape in it stands for half a character, which is not valid text") from None


def classify_parse_failure(message: Message, termination: ParseTermination) -> tuple[ParseFailureKind, str] | None:
    """None for a usable message; otherwise whether its ending or its content is invalid, and why, in at most
    PARSE_FAILURE_DETAIL_MAX_CHARS characters. The ending is checked first: after an invalid ending the content is
    unreliable.
    """
    if not termination.is_clean:
        detail = f"the reply did not terminate cleanly ({termination.value}): no stop sequence or end of text ends it"
        return ParseFailureKind.STRUCTURAL, detail
    errors = [call.error for call in message.get("unparsed_tool_calls", [])]
    return (ParseFailureKind.CONTENT, "\n".join(errors)[:PARSE_FAILURE_DETAIL_MAX_CHARS]) if errors else None


def unterminated(open_marker: str, close_marker: str, body: str) -> UnparsedToolCall:
    """An UnparsedToolCall for `open_marker + body`, which is unclosed at the end of the reply."""
    error = f"{UNTERMINATED_TOOL_BLOCK_ERROR}: {close_marker} is missing"
    return UnparsedToolCall(raw_text=open_marker + body, error=error)


def detect_unterminated_tool_block(content: str, open_marker: str, close_marker: str) -> UnparsedToolCall | None:
    """The last opened block of `content` if more blocks are opened than closed; else None."""
    if content.count(open_marker) <= content.count(close_marker):
        return None
    return unterminated(open_marker, close_marker, content.rpartition(open_marker)[2])


def has_thinking(content: Content) -> bool:
    """Whether content has a thinking part, or an opening think tag in a string."""
    return THINK_OPEN in content if isinstance(content, str) else any(part["type"] == "thinking" for part in content)


def without_thinking(message: Message) -> Message:
    """The message without its thinking parts."""
    content = message["content"]
    if isinstance(content, str) or not has_thinking(content):
        return message
    kept = remove_thinking(content)
    return {**message, "content": text_of(kept) if all(part["type"] == "text" for part in kept) else kept}


def remove_thinking(parts: list[ContentPart]) -> list[ContentPart]:
    """The parts other than reasoning."""
    return [part for part in parts if part["type"] != "thinking"]


def content_to_jsonable(content: Content) -> str | list[dict[str, Any]]:
    """Content in JSON form. An image or a recording is kept only as a URL, path or data URI, not from memory.

    Raises RendererError for a part of an unknown kind.
    """
    if isinstance(content, str):
        return content
    parts: list[dict[str, Any]] = []
    for part in content:
        if part["type"] not in _PART_KEYS:
            raise RendererError(f"a part of type {part['type']!r} is unknown; there are {', '.join(_PART_KEYS)}")
        value = part.get(part["type"])
        parts.append({"type": part["type"], **({part["type"]: value} if isinstance(value, str) else {})})
    return parts


def message_to_jsonable(message: Message) -> dict[str, Any]:
    """A message with all its keys in JSON form."""
    jsonable: dict[str, Any] = dict(message) | {"content": content_to_jsonable(message["content"])}
    for key in ("tool_calls", "unparsed_tool_calls"):
        if key in jsonable:
            jsonable[key] = [call.model_dump(mode="json") for call in jsonable[key]]
    return jsonable


def split_hf_reasoning(text: str) -> tuple[str, str]:
    """(reasoning, text) of a string that may have a think block, split as in Qwen3's chat template."""
    if "</think>" not in text:
        return "", text
    reasoning = text.split("</think>")[0].rstrip("\n").split(THINK_OPEN)[-1].lstrip("\n")
    return reasoning, text.split("</think>")[-1].lstrip("\n")
