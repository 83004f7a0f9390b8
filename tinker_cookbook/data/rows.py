"""Rows of a dataset with their places, read from a file of one JSON object per line, and errors that name the place."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from tinker_cookbook.exceptions import ConfigurationError, DataError, DataFormatError, RendererError
from tinker_cookbook.utils.files import iterate_jsonl

T = TypeVar("T")


class Row(NamedTuple):
    """One object of a dataset.

    Attributes:
        place: for error messages: `mine.jsonl:3`, `owner/name[train][2]`.
        number: of the line in its file, from 1; of the row in its split, from 0.
        content: the object. Keys that nobody asks for do not matter.
    """

    place: str
    number: int
    content: Mapping[str, Any]

    def text(self, *names: str) -> str:
        """What the first of these keys that the row has says; a number as text. Raises DataFormatError without any."""
        name = next((name for name in names if name in self.content), None)
        if name is None:
            raise DataFormatError(f"has no {names[0]!r} (it has {sorted(self.content)})")
        value = self.content[name]
        if isinstance(value, int | float) and not isinstance(value, bool):
            value = str(value)
        if not isinstance(value, str) or not value.strip():
            raise DataFormatError(f"{name!r} must be a string that is not blank")
        return value


def parse_rows(rows: Iterable[Row], parse: Callable[[Row], T], source: str, expected: str) -> list[T]:
    """Every row as `parse` reads it, in order.

    Args:
        parse: raises ValueError (DataFormatError is one) for a row that it cannot read.
        source: what the rows come from.
        expected: how a right row looks; ends each error message.

    Raises:
        DataFormatError: `place: what is wrong; expected ...`; or there is no row at all.
    """
    parsed = []
    for row in rows:
        try:
            parsed.append(parse(row))
        except ValueError as error:
            raise DataFormatError(f"{row.place}: {error}; expected {expected}") from error
    if not parsed:
        raise DataFormatError(f"{source}: there is no row in it; expected {expected} in each")
    return parsed


def read_file(file_path: str | Path, parse: Callable[[Row], T], expected: str, field: str = "file_path") -> list[T]:
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
    return parse_rows(_lines(path, expected), parse, str(path), expected)


def _lines(path: Path, expected: str) -> Iterator[Row]:
    try:
        for line in iterate_jsonl(path):
            yield Row(f"{path}:{line.number}", line.number, line.row)
    except DataFormatError as error:
        raise DataFormatError(f"{error}; expected {expected}") from error


@contextmanager
def located(place: str) -> Iterator[None]:
    """Errors of data and renderers that leave the body begin with `place: `; their type stays."""
    try:
        yield
    except (RendererError, DataError) as error:
        raise type(error)(f"{place}: {error}") from error
