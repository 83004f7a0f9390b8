"""Datasets of conversations: an in-memory dataset that shuffles by epoch, and one read from a JSONL file.

A line of the file is `{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}`.
"""

import json
import logging
import random
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

import chz
import tinker
from pydantic import ValidationError

from tinker_cookbook.exceptions import ConfigurationError, DataError, DataFormatError, RendererError
from tinker_cookbook.renderers import Content, Message, Renderer, ToolCall, TrainOnWhat
from tinker_cookbook.supervised.common import Reduction, datum_from_model_input_weights
from tinker_cookbook.supervised.types import ChatDatasetBuilder, SupervisedDataset

logger = logging.getLogger(__name__)

Row = TypeVar("Row")

_EXPECTED = 'expected {"messages": [{"role": "user", "content": "..."}, ...]}'
_MESSAGE_KEYS = {"role", "content", "tool_calls", "trainable", "tool_call_id", "name"}
_PART_TEXT_KEYS = {"text": "text", "thinking": "thinking"}


def conversation_to_datum(
    conversation: list[Message],
    renderer: Renderer,
    max_length: int | None,
    train_on_what: TrainOnWhat = TrainOnWhat.ALL_ASSISTANT_MESSAGES,
    reduction: Reduction = "mean",
) -> tinker.Datum:
    """One conversation as a cross_entropy datum of at most `max_length` - 1 positions.

    Raises RendererError when it cannot be rendered or nothing is selected, and DataValidationError when truncation
    leaves nothing to train on (reduction="mean").
    """
    model_input, weights = renderer.build_supervised_example(conversation, train_on_what)
    return datum_from_model_input_weights(model_input, weights, max_length, reduction)


class SupervisedDatasetFromList(SupervisedDataset, Generic[Row]):
    """Rows in memory, turned into datums when their batch is asked for.

    Rows keep their order until set_epoch, which shuffles anew from the given order. The last batch holds what is left
    and may be smaller: no row is dropped.
    """

    def __init__(self, rows: Sequence[Row], batch_size: int, to_datum: Callable[[Row], tinker.Datum]) -> None:
        if not rows:
            raise ConfigurationError("rows is empty: a dataset needs at least one example")
        if batch_size < 1:
            raise ConfigurationError(f"batch_size={batch_size}: must be at least 1")
        self._rows = rows
        self._batch_size = batch_size
        self._to_datum = to_datum
        self._order = list(range(len(rows)))

    def get_batch(self, index: int) -> list[tinker.Datum]:
        if not 0 <= index < len(self):
            raise IndexError(f"batch {index} of a dataset with {len(self)} batches")
        chosen = self._order[index * self._batch_size : (index + 1) * self._batch_size]
        return [self._to_datum(self._rows[i]) for i in chosen]

    def __len__(self) -> int:
        return -(-len(self._rows) // self._batch_size)

    def set_epoch(self, seed: int = 0) -> None:
        self._order = list(range(len(self._rows)))
        random.Random(seed).shuffle(self._order)


class ConversationRow(NamedTuple):
    """A conversation and where it stands, for error messages."""

    place: str
    messages: list[Message]


@chz.chz(typecheck=True)
class FromConversationFileBuilder(ChatDatasetBuilder):
    """Conversations from a JSONL file. All assistant messages are trained unless common_config says otherwise."""

    file_path: str = chz.field(doc="JSONL file, one conversation per line.")
    test_size: int = chz.field(default=0, doc="Conversations held out as the test set; 0: no test set.")
    shuffle_seed: int | None = chz.field(default=0, doc="Shuffles before the split; None keeps the order of the file.")

    @chz.validate
    def _check_test_size(self) -> None:
        if self.test_size < 0:
            raise ConfigurationError(f"test_size={self.test_size}: must be 0 (no test set) or more")

    def __call__(self) -> tuple[SupervisedDataset, SupervisedDataset | None]:
        rows = read_conversations(self.file_path)
        if self.test_size >= len(rows):
            raise ConfigurationError(
                f"test_size={self.test_size} leaves nothing to train on: {self.file_path} has {len(rows)} conversations; "
                "lower test_size"
            )
        if self.shuffle_seed is not None:
            random.Random(self.shuffle_seed).shuffle(rows)
        renderer, config = self.renderer, self.common_config
        train_on_what = config.train_on_what or TrainOnWhat.ALL_ASSISTANT_MESSAGES
        _warn_of_rewritten_history(rows, renderer, train_on_what)
        to_datum = partial(_row_to_datum, renderer=renderer, max_length=config.max_length, train_on_what=train_on_what)
        test, train = rows[: self.test_size], rows[self.test_size :]
        return (
            SupervisedDatasetFromList(train, config.batch_size, to_datum),
            SupervisedDatasetFromList(test, config.batch_size, to_datum) if test else None,
        )


def _row_to_datum(
    row: ConversationRow, renderer: Renderer, max_length: int | None, train_on_what: TrainOnWhat
) -> tinker.Datum:
    try:
        return conversation_to_datum(row.messages, renderer, max_length, train_on_what)
    except (RendererError, DataError) as error:
        # The same error, told where it comes from.
        raise type(error)(f"{row.place}: {error}") from error


def _warn_of_rewritten_history(rows: list[ConversationRow], renderer: Renderer, train_on_what: TrainOnWhat) -> None:
    if train_on_what is not TrainOnWhat.ALL_ASSISTANT_MESSAGES or renderer.has_extension_property:
        return
    several = sum(sum(m["role"] == "assistant" for m in row.messages) > 1 for row in rows)
    if several:
        logger.warning(
            "%d of %d conversations have several assistant messages, and %s renders earlier ones differently from how "
            "the model writes them (without thinking): train_on_what=last_assistant_turn trains exactly what it writes",
            several,
            len(rows),
            type(renderer).__name__,
        )


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
    if "messages" not in line:
        raise wrong(f"the key 'messages' is missing (keys: {sorted(line)})")
    if extra := sorted(set(line) - {"messages"}):
        raise wrong(f"unknown keys {extra}")
    if not isinstance(line["messages"], list) or not line["messages"]:
        raise wrong("'messages' must be a list with at least one message")
    messages: list[Message] = []
    for i, message in enumerate(line["messages"]):
        try:
            messages.append(_parse_message(message))
        except ValueError as error:
            raise wrong(f"messages[{i}]: {error}") from error
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
