"""Prompts to distil on: from a text file, a JSONL file or the Hugging Face hub, as conversations without their reply."""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from tinker_cookbook.exceptions import ConfigurationError, DataFormatError
from tinker_cookbook.renderers import Message
from tinker_cookbook.supervised.conversations import messages_of_row, read_conversations

DEEPMATH, TULU3 = "zwhe99/DeepMath-103K", "allenai/tulu-3-sft-mixture"
HUB_ALIASES = {"deepmath": DEEPMATH, "tulu3": TULU3}

COLUMNS = ("messages", "prompt", "question")
"""Where a row may have its prompt: a conversation (up to its last user message), or a text."""


def load_prompts(source: str, split: str = "train") -> list[list[Message]]:
    """The prompts of a source, in its order, each a conversation that ends in a user message.

    Args:
        source: a .txt file (a prompt per line), a .jsonl file (an object per line with one of COLUMNS), deepmath, tulu3, or
            a hub dataset id with one of COLUMNS.
        split: of a hub dataset.

    Raises:
        ConfigurationError: there is no such source.
        DataFormatError: a row has no prompt; the message says where.
    """
    path = Path(source).expanduser()
    if path.suffix in (".txt", ".jsonl") or path.exists():
        return list(_from_text(path) if path.suffix == ".txt" else _from_jsonl(path))
    if source in HUB_ALIASES or source.count("/") == 1:
        return list(_from_hub(HUB_ALIASES.get(source, source), split))
    raise ConfigurationError(
        f"dataset_name={source!r} is unknown; use a .txt file with a prompt per line, a .jsonl file with one of "
        f"{', '.join(COLUMNS)} per line, {', '.join(HUB_ALIASES)}, or a Hugging Face dataset id (owner/name)"
    )


def load_deepmath_prompts(split: str = "train") -> list[list[Message]]:
    """The questions of DeepMath-103K (He et al. 2025)."""
    return load_prompts("deepmath", split)


def load_tulu3_prompts(split: str = "train") -> list[list[Message]]:
    """The conversations of the Tulu 3 SFT mixture (Lambert et al. 2024), up to their last user message."""
    return load_prompts("tulu3", split)


def read_lines(path: Path) -> list[str]:
    """The lines of a text file that are not blank, stripped.

    Raises ConfigurationError without such a file, DataFormatError when it is not UTF-8 or has no line.
    """
    if not path.is_file():
        raise ConfigurationError(f"{str(path)!r}: there is no such file; name a text file with one item per line")
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").split("\n")]
    except UnicodeDecodeError as error:
        raise DataFormatError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from error
    lines = [line for line in lines if line]
    if not lines:
        raise DataFormatError(f"{path}: the file holds no line of text")
    return lines


def _from_text(path: Path) -> Iterator[list[Message]]:
    for line in read_lines(path):
        yield [{"role": "user", "content": line}]


def _from_jsonl(path: Path) -> Iterator[list[Message]]:
    if not path.is_file():
        raise ConfigurationError(f"dataset_name={str(path)!r}: there is no such file")
    found = False
    for number, raw in enumerate(path.read_bytes().split(b"\n"), start=1):
        if not raw.strip():
            continue
        found = True
        try:
            row = json.loads(raw.decode("utf-8"))
        except ValueError as error:  # also UnicodeDecodeError
            raise DataFormatError(f"{path}:{number}: not JSON in UTF-8 ({error})") from None
        if isinstance(row, dict) and "messages" in row:
            break
        yield _prompt(row, f"{path}:{number}")
    else:
        if not found:
            raise DataFormatError(f"{path}: the file holds no prompt")
        return
    for conversation in read_conversations(str(path)):
        yield _up_to_last_question(conversation.messages, conversation.place)


def _from_hub(name: str, split: str) -> Iterator[list[Message]]:
    import datasets

    try:
        rows = datasets.load_dataset(name, split=split)
    except Exception as error:  # the hub raises many kinds, all of which mean that the dataset is not to be had
        raise ConfigurationError(
            f"dataset_name={name!r} (split {split!r}) could not be loaded from the Hugging Face hub: {error}"
        ) from error
    for i, row in enumerate(cast(Iterable[Any], rows)):
        yield _prompt(row, f"{name}[{split}][{i}]")


def _prompt(row: object, where: str) -> list[Message]:
    if not isinstance(row, Mapping):
        raise DataFormatError(f"{where}: not an object; expected one of {', '.join(COLUMNS)}")
    if "messages" in row:
        try:
            messages = messages_of_row(row)
        except DataFormatError as error:
            raise DataFormatError(f"{where}: {error}") from error
        return _up_to_last_question(messages, where)
    column = next((column for column in COLUMNS if column in row), None)
    if column is None:
        raise DataFormatError(f"{where}: has none of {', '.join(COLUMNS)} (it has {sorted(row)})")
    text = row[column]
    if not isinstance(text, str) or not text.strip():
        raise DataFormatError(f"{where}: {column!r} must be a string that is not blank")
    return [{"role": "user", "content": text}]


def _up_to_last_question(messages: list[Message], where: str) -> list[Message]:
    """The conversation without what follows its last user message."""
    last = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=None)
    if last is None:
        raise DataFormatError(f"{where}: the conversation has no user message")
    return messages[: last + 1]
