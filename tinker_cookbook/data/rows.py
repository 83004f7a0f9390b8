"""Rows of a dataset with their places, read from files, and what becomes of those that cannot be used."""

import csv
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

from tinker_cookbook.data.shipped import shipped_path
from tinker_cookbook.exceptions import ConfigurationError, DataError, DataFormatError, RendererError
from tinker_cookbook.utils.files import iterate_jsonl

logger = logging.getLogger(__name__)

T = TypeVar("T")

OnBadRow: TypeAlias = Literal["raise", "skip"]

SHOWN_BAD_ROWS = 3


class Row(NamedTuple):
    """One object of a dataset.

    Attributes:
        place: for error messages: `mine.jsonl:3`, `owner/name[train][2]`.
        number: of the line in its file, from 1; of the row in its split or table, from 0.
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


class BadRows:
    """What becomes of rows that cannot be used.

    Args:
        on_bad_row: `raise` the first one's error, or `skip` them: they are left out and counted, and the first few logged.

    Attributes:
        count: how often one was left out, over all epochs.
        examples: what was wrong with the first ones, by place.
    """

    def __init__(self, on_bad_row: OnBadRow = "raise") -> None:
        self.skips = on_bad_row == "skip"
        self.count = 0
        self.examples: dict[str, str] = {}

    @contextmanager
    def left_out(self, place: str) -> Iterator[None]:
        """Errors of data and renderers that leave the body are about the row at `place`."""
        try:
            with located(place):
                yield
        except (RendererError, DataError) as error:
            self.note(place, error)  # raises, unless such rows are left out

    def note(self, place: str, error: Exception) -> None:
        """A row that cannot be used. Raises the error unless such rows are left out."""
        if not self.skips:
            raise error
        self.count += 1
        if place not in self.examples and len(self.examples) < SHOWN_BAD_ROWS:
            logger.warning("a row is left out (on_bad_row=skip): %s", error)
            self.examples[place] = str(error)


def count_bad_rows(bad_rows: Iterable[BadRows]) -> int:
    """How many rows were left out so far. A training and a test set may share what counts them."""
    return sum({id(bad): bad.count for bad in bad_rows}.values())


def tell_bad_rows(bad_rows: Iterable[BadRows]) -> None:
    """Log the first rows that were left out once more: those that were found before a run had a log."""
    for bad in bad_rows:
        for example in bad.examples.values():
            logger.warning("a row is left out (on_bad_row=skip): %s", example)


def parse_rows(
    rows: Iterable[Row], parse: Callable[[Row], T], source: str, expected: str, bad: BadRows | None = None
) -> list[T]:
    """Every row as `parse` reads it, in order.

    Args:
        parse: raises ValueError (DataFormatError is one) for a row that it cannot read.
        source: what the rows come from.
        expected: how a right row looks; ends each error message.
        bad: what becomes of rows that it cannot read; None: the first ends the reading.

    Raises:
        DataFormatError: `place: what is wrong; expected ...`; or there is no row at all.
    """
    bad = bad or BadRows()
    parsed, before = [], bad.count
    for row in rows:
        try:
            parsed.append(parse(row))
        except ValueError as error:
            bad.note(row.place, DataFormatError(f"{row.place}: {error}; expected {expected}"))
    left_out = bad.count - before
    if not parsed:
        reason = f"none of its {left_out} rows can be read" if left_out else "there is no row in it"
        raise DataFormatError(f"{source}: {reason}; expected {expected} in each")
    if left_out:
        logger.warning("%s: %d of %d rows cannot be read and are left out", source, left_out, left_out + len(parsed))
    return parsed


def is_data_file(name: str) -> bool:
    """Whether a dataset's name is that of a file of rows, by its ending."""
    return Path(name).suffix in _READERS


def read_file(
    file_path: str | Path,
    parse: Callable[[Row], T],
    expected: str,
    field: str = "file_path",
    bad: BadRows | None = None,
) -> list[T]:
    """Every row of a file as `parse` reads it (see `parse_rows`), in order.

    Args:
        file_path: .jsonl (an object per line; blank lines are skipped, not counted out), .csv (with a header) or .parquet;
            another ending is read as .jsonl.
        expected: how a right row looks, for error messages.
        field: the setting that names the file, for error messages.
        bad: as `parse_rows`.

    Raises:
        ConfigurationError: there is no such file.
        DataFormatError: `path:line: what is wrong; expected ...` for the first wrong line; or the file has no row.
    """
    path = existing_file(file_path, expected, field)
    bad = bad or BadRows()
    rows = _READERS.get(path.suffix, _read_jsonl)(path, expected, bad)
    return parse_rows(rows, parse, str(path), expected, bad)


def existing_file(file_path: str | Path, expected: str, field: str) -> Path:
    """Where the file of a setting is. Raises ConfigurationError, with the form of its rows, when there is none."""
    path = Path(shipped_path(file_path)).expanduser()
    if not path.is_file():
        raise ConfigurationError(
            f"{field}={str(file_path)!r}: there is no such file; name a {', '.join(_READERS)} file with {expected} in each row"
        )
    return path


def _read_jsonl(path: Path, expected: str, bad: BadRows) -> Iterator[Row]:
    def note(number: int, error: DataFormatError) -> None:
        bad.note(f"{path}:{number}", DataFormatError(f"{error}; expected {expected}"))

    for line in iterate_jsonl(path, on_bad_line=note):
        yield Row(f"{path}:{line.number}", line.number, line.row)


def _read_csv(path: Path, expected: str, bad: BadRows) -> Iterator[Row]:
    """An empty cell is a key that the row does not have."""
    with open(path, encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, strict=True)
        try:
            for cells in reader:
                place = f"{path}:{reader.line_num}"
                if None in cells or None in cells.values():
                    bad.note(place, DataFormatError(f"{place}: another number of cells than the header has"))
                    continue
                yield Row(place, reader.line_num, {key: cell for key, cell in cells.items() if cell})
        except (csv.Error, UnicodeDecodeError) as error:
            raise DataFormatError(f"{path}:{reader.line_num}: not a CSV table in UTF-8 ({error})") from error


def _read_parquet(path: Path, expected: str, bad: BadRows) -> Iterator[Row]:
    """A null is a key that the row does not have."""
    import pyarrow
    from pyarrow import parquet

    try:
        number = 0
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches():
                for cells in batch.to_pylist():
                    yield Row(f"{path}[{number}]", number, {k: cell for k, cell in cells.items() if cell is not None})
                    number += 1
    except pyarrow.ArrowException as error:
        raise DataFormatError(f"{path}: not a parquet table ({error})") from error


_READERS: dict[str, Callable[[Path, str, BadRows], Iterator[Row]]] = {
    ".jsonl": _read_jsonl,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}


@contextmanager
def located(place: str) -> Iterator[None]:
    """Errors of data and renderers that leave the body begin with `place: ` (where it is not empty); their type stays."""
    try:
        yield
    except (RendererError, DataError) as error:
        raise type(error)(f"{place}: {error}" if place else str(error)) from error
