"""Conversations as data: JSONL files and dataset rows, read into messages and checked line by line.

A line of a file is `{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}`.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from pydantic import ValidationError

from tinker_cookbook.data.rows import read_file
from tinker_cookbook.exceptions import DataFormatError
from tinker_cookbook.renderers import Content, Message, ToolCall

MESSAGES = "messages"
_EXPECTED = '{"messages": [{"role": "user", "content": "..."}, ...]}'
_MESSAGE_KEYS = {"role", "content", "tool_calls", "trainable", "tool_call_id", "name"}
_PART_TEXT_KEYS = {"text": "text", "thinking": "thinking"}


class ConversationRow(NamedTuple):
    """A conversation and where it stands, for error messages."""

    place: str
    messages: list[Message]


def read_conversations(file_path: str) -> list[ConversationRow]:
    """Every conversation of a JSONL file, checked. Blank lines and keys beside `messages` do not matter.

    Raises ConfigurationError when there is no such file, DataFormatError `path:line: what is wrong; expected form`
    for the first malformed line, and DataFormatError for a file without conversations.
    """
    return read_file(file_path, lambda row: ConversationRow(row.place, messages_of_row(row.content)), _EXPECTED)


def messages_of_row(row: Mapping[str, Any], column: str = MESSAGES) -> list[Message]:
    """The conversation in a row of a dataset. Its other columns do not matter.

    Arrow tables have no missing keys: a key of a message whose value is null is one that the message does not have.

    Raises DataFormatError for a row that is no conversation.
    """
    if column not in row:
        raise DataFormatError(f"there is no {column!r} (there are {sorted(row)}); name the column with the messages")
    raw = row[column]
    if not isinstance(raw, list) or not raw:
        raise DataFormatError(f"{column!r} must be a list with at least one message")
    messages = []
    for i, message in enumerate(raw):
        try:
            messages.append(_parse_message(_without_nulls(message)))
        except ValueError as error:
            raise DataFormatError(f"{column}[{i}]: {error}") from error
    return messages


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(entry) for key, entry in value.items() if entry is not None}
    return [_without_nulls(entry) for entry in value] if isinstance(value, list) else value


def _parse_message(raw: object) -> Message:
    if not isinstance(raw, dict):
        raise ValueError(f"a {type(raw).__name__} and not an object")
    if extra := sorted(set(raw) - _MESSAGE_KEYS):
        raise ValueError(f"unknown keys {extra} (known: {sorted(_MESSAGE_KEYS)})")
    for key in ("role", "content"):
        if key not in raw:
            raise ValueError(f"the key {key!r} is missing")
    for key in ("role", "tool_call_id", "name"):
        if key in raw and (not isinstance(raw[key], str) or not raw[key]):
            raise ValueError(f"{key!r} must be a string that is not empty")
    if "trainable" in raw and not isinstance(raw["trainable"], bool):
        raise ValueError("'trainable' must be true or false")
    _check_content(raw["content"])
    message = Message(**raw)
    if "tool_calls" in raw:
        if not isinstance(raw["tool_calls"], list):
            raise ValueError("'tool_calls' must be a list")
        try:
            message["tool_calls"] = [ToolCall.model_validate(call) for call in raw["tool_calls"]]
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(step) for step in first["loc"])
            raise ValueError(f"tool_calls: {where}: {first['msg']}") from error
    return message


def _check_content(content: Content | object) -> None:
    if isinstance(content, str):
        return
    if not isinstance(content, list):
        raise ValueError("'content' must be a string or a list of parts")
    for i, part in enumerate(content):
        key = _PART_TEXT_KEYS.get(part.get("type", "")) if isinstance(part, dict) else None
        if key is None or set(part) != {"type", key} or not isinstance(part[key], str):
            raise ValueError(
                f'content[{i}] must be {{"type": "text", "text": "..."}} or {{"type": "thinking", "thinking": "..."}}'
            )
