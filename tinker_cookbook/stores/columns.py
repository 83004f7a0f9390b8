"""Columns of parquet files, built from buffers.

`pyarrow.array`, `parquet.read_table` and `to_numpy` import pandas to check for pandas inputs: half a second in every run,
which does not need it otherwise. The functions here do not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tinker_cookbook.utils.lazy import np

if TYPE_CHECKING:
    import pyarrow

_LARGEST_OFFSET = 2**31 - 1


def numbers(values: Sequence[Any], kind: str) -> pyarrow.Array:
    """A column of numbers.

    Args:
        values: numbers, or None.
        kind: `int32`, `float32`, `float64` or another name that numpy and Arrow share, or `bool`.

    Raises:
        TypeError: a value is of another kind, such as a fraction in a column of integers.
        OverflowError: an integer is too large for the column.
    """
    allowed = (bool, np.bool_) if kind == "bool" else (int, np.integer) if "int" in kind else (int, float, np.number)
    for value in values:
        if value is not None and not isinstance(value, allowed):
            raise TypeError(f"{value!r} is a {type(value).__name__}, in a column of {kind}")
    is_there = [value is not None for value in values]
    filled = np.array([0 if value is None else value for value in values], dtype=kind)
    content = _bits(filled) if kind == "bool" else filled
    return _array(kind, len(filled), [_validity(is_there), content])


def texts(values: Sequence[str | bytes | None], kind: str) -> pyarrow.Array:
    """A column of texts (kind `string`), or of bytes (kind `binary`)."""
    parts = [value.encode() if isinstance(value, str) else value or b"" for value in values]
    content = np.frombuffer(b"".join(parts), dtype=np.uint8)
    validity = _validity([value is not None for value in values])
    return _array(kind, len(parts), [validity, _offsets([len(part) for part in parts]), content])


def lists(values: Sequence[np.ndarray | None], kind: str) -> pyarrow.Array:
    """A column of lists of numbers: an array per row, or None."""
    import pyarrow

    offsets = _offsets([0 if value is None else len(value) for value in values])
    flat = np.concatenate([np.zeros(0, dtype=kind), *(value for value in values if value is not None)]).astype(kind)
    is_missing = _array("bool", len(values), [None, _bits(np.array([value is None for value in values], dtype=bool))])
    starts = _array("int32", len(offsets), [None, offsets])
    return pyarrow.ListArray.from_arrays(starts, _array(kind, len(flat), [None, flat]), mask=is_missing)


def arrays_of(column: pyarrow.ChunkedArray) -> list[np.ndarray | None]:
    """The rows of a column made by `lists`, each a read-only array, or None."""
    rows: list[np.ndarray | None] = []
    for chunk in column.chunks:
        flat, offsets = _view(chunk.values), _view(chunk.offsets)
        there = chunk.is_valid().to_pylist()
        rows += [flat[a:b] if one else None for a, b, one in zip(offsets[:-1], offsets[1:], there, strict=True)]
    return rows


def read_file(content: Any, columns: Sequence[str] | None = None) -> pyarrow.Table:
    """Read a parquet file, or some of its columns.

    Args:
        content: a path, or a pyarrow file.

    Raises:
        OSError, ValueError, pyarrow.ArrowException: the file is missing or damaged.
    """
    from pyarrow import parquet

    with parquet.ParquetFile(content) as file:
        return file.read(columns=None if columns is None else list(columns))


def _array(kind: str, length: int, buffers: Sequence[np.ndarray | None]) -> pyarrow.Array:
    import pyarrow

    wrapped = [None if one is None else pyarrow.py_buffer(np.ascontiguousarray(one)) for one in buffers]
    return pyarrow.Array.from_buffers(pyarrow.type_for_alias(kind), length, wrapped)


def _view(array: pyarrow.Array) -> np.ndarray:
    """The numbers of an array without nulls, without a copy."""
    kind, buffer = array.type.to_pandas_dtype(), array.buffers()[1]
    flat = np.zeros(0, dtype=kind) if buffer is None else np.frombuffer(buffer, dtype=kind)
    return flat[array.offset : array.offset + len(array)]


def _validity(is_there: Sequence[bool]) -> np.ndarray | None:
    """A bit per row; None where all rows have a value."""
    return None if all(is_there) else _bits(np.array(is_there, dtype=bool))


def _bits(flags: np.ndarray) -> np.ndarray:
    return np.packbits(flags, bitorder="little")


def _offsets(lengths: Sequence[int]) -> np.ndarray:
    """The start of each row, and the end of the last one, int32. Raises ValueError beyond 32 bits."""
    ends = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    if ends[-1] > _LARGEST_OFFSET:
        raise ValueError(f"a column of {ends[-1]} values or bytes is larger than a file can have ({_LARGEST_OFFSET})")
    return ends.astype(np.int32)
