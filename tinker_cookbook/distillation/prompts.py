"""Prompts to distil on: from a text file, a JSONL file or the Hugging Face hub, as conversations without their reply."""

from pathlib import Path

from tinker_cookbook.data import hub
from tinker_cookbook.data.jsonl import read_rows
from tinker_cookbook.data.rows import Row
from tinker_cookbook.exceptions import ConfigurationError, DataFormatError
from tinker_cookbook.renderers import Message
from tinker_cookbook.supervised.conversations import MESSAGES, messages_of_row

HUB_PROMPTS = ("deepmath", "tulu3")
"""Short names of datasets on the hub."""

COLUMNS = ("messages", "prompt", "question")
"""Where a row may have its prompt: a conversation (up to its last user message), or a text."""
_EXPECTED = f"an object with one of {', '.join(COLUMNS)}"


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
    if path.suffix == ".txt":
        return [[{"role": "user", "content": line}] for line in read_lines(path)]
    if path.suffix == ".jsonl" or path.is_file():
        return read_rows(path, _prompt, _EXPECTED, "dataset_name")
    if (found := hub.find(source, HUB_PROMPTS)) is not None:
        rows = hub.load(found.repository, split, found.config)
        return hub.read_rows(rows, f"{source}[{split}]", _prompt, _EXPECTED)
    raise ConfigurationError(
        f"dataset_name={source!r} is unknown; use a .txt file with a prompt per line, a .jsonl file with one of "
        f"{', '.join(COLUMNS)} per line, {', '.join(HUB_PROMPTS)}, or a Hugging Face dataset id (owner/name)"
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


def _prompt(row: Row) -> list[Message]:
    """The text of a row as a message, or its conversation without what follows the last user message."""
    if MESSAGES not in row.content:
        return [{"role": "user", "content": row.text(*COLUMNS[1:])}]
    messages = messages_of_row(row.content)
    last = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=None)
    if last is None:
        raise DataFormatError("the conversation has no user message")
    return messages[: last + 1]
