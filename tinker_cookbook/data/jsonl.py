"""Datasets in JSONL files: one JSON object per line."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from tinker_cookbook.data.rows import Row, parse_rows
from tinker_cookbook.exceptions import ConfigurationError, DataFormatError
from tinker_cookbook.utils.files import iterate_jsonl

T = TypeVar("T")


def read_rows(file_path: str | Path, parse: Callable[[Row], T], expected: str, field: str = "file_path") -> list[T]:
    """Every line of a file as `parse` reads it (see `parse_rows`), in order. Blank lines are skipped, not counted out.

    Args:
        expected: how a right line looks, for error messages.
        field: the setting that names the file, for error messages.

    Raises:
        ConfigurationError: there is no such file.
        DataFormatError: `path:line: what is wrong; expected ...` for the first wrong line; or the file has no line.
    """
    path = Path(file_path).expanduser()
    if not path.is_file():
        raise ConfigurationError(
            f"{field}={str(file_path)!r}: there is no such file; name a JSONL file with {expected} on each line"
        )
    return parse_rows(_rows(path, expected), parse, str(path), expected)


def _rows(path: Path, expected: str) -> Iterator[Row]:
    try:
        for line in iterate_jsonl(path):
            yield Row(f"{path}:{line.number}", line.number, line.row)
    except DataFormatError as error:
        raise DataFormatError(f"{error}; expected {expected}") from error
