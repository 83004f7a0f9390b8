"""Conversations as data: JSONL files and dataset rows, read into messages and checked line by line.

A line of a file is `{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}`.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from tinker_cookbook.exceptions import ConfigurationError, DataFormatError
from tinker_cookbook.renderers import Content, Message, ToolCall

MESSAGES = "messages"
_EXPECTED = 'expected {"messages": [{"role": "user", "content": "..."}, ...]}'
_MESSAGE_KEYS = {"role", "content", "tool_calls", "trainable", "tool_call_id", "name"}
_PART_TEXT_KEYS = {"text": "text", "thinking": "thinking"}


class ConversationRow(NamedTuple):
    """A conversation and where it stands, for error messages."""

    place: str
    messages: list[Message]


def read_conversations(file_path: str) -> list[ConversationRow]:
    """Every conversation of a JSONL file, checked. Blank lines are passed over.

    Raises ConfigurationError when there is no such file, DataFormatError `path:line: what is wrong; expected form`
    for the first malformed line, and DataFormatError for a file without conversations.
    """
    path = Path(file_path).expanduser()
    if not path.is_file():
        raise ConfigurationError(f"file_path={file_path!r}: there is no such file; name a JSONL file of conversations")
    rows: list[ConversationRow] = []
    # Split at line feeds only: JSON strings may hold other line separators.
    for number, raw in enumerate(path.read_bytes().split(b"\n"), start=1):
        if raw.strip():
            place = f"{path}:{number}"
            rows.append(ConversationRow(place, _parse_line(raw, place)))
    if not rows:
        raise DataFormatError(f"{path}: the file holds no conversation; {_EXPECTED} on each line")
    return rows


def messages_of_row(row: Mapping[str, Any], column: str = MESSAGES) -> list[Message]:
    """The conversation in a row of a Hugging Face dataset. Its other columns do not matter.

    Arrow tables have no missing keys: a key of a message whose value is null is one that the message does not have.

    Raises DataFormatError for a row that is no conversation.
    """
    if column not in row:
        raise DataFormatError(f"there is no column {column!r} (columns: {sorted(row)}); name the one with the messages")
    raw = row[column]
    if isinstance(raw, list):
        raw = [_without_nulls(message) if isinstance(message, dict) else message for message in raw]
    try:
        return _parse_messages(raw)
    except ValueError as error:
        raise DataFormatError(f"{error}; {_EXPECTED}") from error


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(entry) for key, entry in value.items() if entry is not None}
    return [_without_nulls(entry) for entry in value] if isinstance(value, list) else value


def _parse_line(raw: bytes, place: str) -> list[Message]:
    def wrong(what: str) -> DataFormatError:
        return DataFormatError(f"{place}: {what}; {_EXPECTED}")

    try:
        line = json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise wrong(f"not UTF-8 text ({error.reason} at byte {error.start})") from error
    except (json.JSONDecodeError, RecursionError) as error:
        raise wrong(f"not valid JSON ({error})") from error
    if not isinstance(line, dict):
        raise wrong(f"a {type(line).__name__} and not an object")
    if MESSAGES not in line:
        raise wrong(f"the key 'messages' is missing (keys: {sorted(line)})")
    if extra := sorted(set(line) - {MESSAGES}):
        raise wrong(f"unknown keys {extra}")
    try:
        return _parse_messages(line[MESSAGES])
    except ValueError as error:
        raise wrong(str(error)) from error


def _parse_messages(raw: object) -> list[Message]:
    if not isinstance(raw, list) or not raw:
        raise ValueError("'messages' must be a list with at least one message")
    messages: list[Message] = []
    for i, message in enumerate(raw):
        try:
            messages.append(_parse_message(message))
        except ValueError as error:
            raise ValueError(f"messages[{i}]: {error}") from error
    return messages


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
