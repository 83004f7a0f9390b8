"""Reading and taking apart message content: text, thinking and tool calls. Pure functions over strings and parts."""

import json
import re
from collections.abc import Iterable

from tinker_cookbook.exceptions import RendererError
from tinker_cookbook.renderers.blocks import THINK_OPEN, TOOL_CLOSE, TOOL_OPEN, BlockKind, BlockScanner, Piece
from tinker_cookbook.renderers.decoding import is_encodable
from tinker_cookbook.renderers.types import (
    Content,
    ContentPart,
    Message,
    ParseFailure,
    ParseTermination,
    TextPart,
    ThinkingPart,
    ToolCall,
    UnparsedToolCall,
)

_CANONICAL_CALL = re.compile(r'\n\{"name": "([^"\\]+)", "arguments": (.*)\}\n', re.DOTALL)


def ensure_list(content: Content) -> list[ContentPart]:
    """Content as a list of parts; a string becomes one text part, an empty string none."""
    if isinstance(content, str):
        return [TextPart(type="text", text=content)] if content else []
    return content


def ensure_text(content: Content) -> str:
    """Content that must be text and nothing else. Raises RendererError when it holds any other kind of part."""
    others = sorted({part["type"] for part in ensure_list(content) if part["type"] != "text"})
    if others:
        raise RendererError(f"content must be text only here, but it holds parts of type {', '.join(others)}")
    return text_of(content)


def text_of(content: Content) -> str:
    """The text parts, joined; thinking and media are left out."""
    return "".join(part["text"] for part in ensure_list(content) if part["type"] == "text")


def thinking_of(content: Content) -> str:
    """The thinking parts, joined."""
    return "".join(part["thinking"] for part in ensure_list(content) if part["type"] == "thinking")


def get_text_content(message: Message) -> str:
    """What a reader of the message sees: its text, without thinking."""
    return text_of(message["content"])


def format_content_as_string(content: Content, separator: str = "\n") -> str:
    """Content for a log: thinking in <think> tags, media as [image] or [audio], parts joined by `separator`."""
    if isinstance(content, str):
        return content
    shown = {"image": "[image]", "audio": "[audio]"}
    pieces: list[str] = []
    for part in content:
        if part["type"] == "text":
            pieces.append(part["text"])
        elif part["type"] == "thinking":
            pieces.append(f"<think>{part['thinking']}</think>")
        else:
            pieces.append(shown[part["type"]])
    return separator.join(pieces)


def parse_think_blocks(text: str) -> list[ContentPart]:
    """Split text with <think> blocks into thinking and text parts. Tool call blocks stay in the text."""
    parts: list[ContentPart] = []
    for piece in scan_blocks(text):
        if piece.kind is BlockKind.TOOL_CALL:
            piece = Piece(BlockKind.TEXT, f"{TOOL_OPEN}{piece.text}{TOOL_CLOSE}")
        elif piece.kind is BlockKind.UNCLOSED_TOOL_CALL:
            piece = Piece(BlockKind.TEXT, f"{TOOL_OPEN}{piece.text}")
        _append_piece(parts, piece)
    return parts


def parse_content_blocks(text: str) -> tuple[list[ContentPart], list[ToolCall | UnparsedToolCall]]:
    """Split what a model wrote into its parts and its tool calls, each in the order written.

    An unclosed <think> makes the rest thinking, so that a cut-off reasoning never passes for an answer; an unclosed
    <tool_call> becomes an UnparsedToolCall.
    """
    parts: list[ContentPart] = []
    calls: list[ToolCall | UnparsedToolCall] = []
    for piece in scan_blocks(text):
        if piece.kind is BlockKind.TOOL_CALL:
            calls.append(parse_tool_call(piece.text))
        elif piece.kind is BlockKind.UNCLOSED_TOOL_CALL:
            calls.append(UnparsedToolCall(raw_text=TOOL_OPEN + piece.text, error=f"{TOOL_CLOSE} is missing"))
        else:
            _append_piece(parts, piece)
    return parts, calls


def scan_blocks(text: str) -> Iterable[Piece]:
    """The pieces of a whole text, in order."""
    scanner = BlockScanner()
    return [*scanner.feed(text), *scanner.finish()]


def _append_piece(parts: list[ContentPart], piece: Piece) -> None:
    last = parts[-1] if parts else None
    if piece.kind is BlockKind.THINK_START:
        parts.append(ThinkingPart(type="thinking", thinking=""))
    elif piece.kind is BlockKind.THINKING and last is not None and last["type"] == "thinking":
        last["thinking"] += piece.text
    elif piece.kind is BlockKind.TEXT and last is not None and last["type"] == "text":
        last["text"] += piece.text
    elif piece.kind is BlockKind.TEXT:
        parts.append(TextPart(type="text", text=piece.text))


def parse_tool_call(body: str) -> ToolCall | UnparsedToolCall:
    """Read the inside of one <tool_call> block: a JSON object with `name` (string) and `arguments` (object)."""

    def unparsed(error: str) -> UnparsedToolCall:
        return UnparsedToolCall(raw_text=TOOL_OPEN + body + TOOL_CLOSE, error=error)

    try:
        call = json.loads(body)
    except (ValueError, RecursionError) as error:
        return unparsed(f"not valid JSON: {error}")
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return unparsed('expected a JSON object with the string key "name"')
    if not isinstance(call.get("arguments"), dict):
        return unparsed('expected the key "arguments" to be a JSON object')
    extra = sorted(set(call) - {"name", "arguments"})
    if extra:
        return unparsed(f"unexpected keys {extra}; a call has name and arguments only")
    canonical = _CANONICAL_CALL.fullmatch(body)
    # The arguments keep the model's own spelling (spaces, escapes) where the block has the canonical shape.
    arguments = canonical.group(2) if canonical else json.dumps(call["arguments"], ensure_ascii=False)
    if not is_encodable(call["name"] + arguments):
        return unparsed("an escape in it stands for half a character, which is no valid text")
    return ToolCall(function=ToolCall.FunctionBody(name=call["name"], arguments=arguments))


def classify_parse_failure(message: Message, termination: ParseTermination) -> ParseFailure | None:
    """None for a usable message; otherwise whether its ending or its content is at fault."""
    if not termination.is_clean:
        return ParseFailure.STRUCTURAL
    return ParseFailure.CONTENT if message.get("unparsed_tool_calls") else None


def split_hf_reasoning(text: str) -> tuple[str, str]:
    """(reasoning, text) of a string that may carry a think block, cut as Qwen3's chat template cuts it."""
    if "</think>" not in text:
        return "", text
    reasoning = text.split("</think>")[0].rstrip("\n").split(THINK_OPEN)[-1].lstrip("\n")
    return reasoning, text.split("</think>")[-1].lstrip("\n")
