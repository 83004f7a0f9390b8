"""Read and write the files of a run so that a kill at any moment leaves them usable.

Whole files are written to a temporary name and renamed; log lines are appended in one write. `to_jsonable` defines the
JSON form of every object. The callers define which files exist and what they mean.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import errno
import io
import json
import math
import os
import sys
import uuid
from collections.abc import Callable, Iterable, Iterator
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple, cast

import chz

from tinker_cookbook.exceptions import DataFormatError, DataValidationError
from tinker_cookbook.utils.lazy import np
from tinker_cookbook.utils.narrowing import is_list_or_tuple, is_object

CLASS_KEY = "class"
"""Key under which a chz object names its class. A Python keyword, so that no field can have the same name."""

_TEMPORARY = ".tmp"


def to_jsonable(obj: Any, key_path: str = "") -> Any:
    """Convert the object to plain JSON types.

    numpy and torch values become numbers or nested lists, enums their value, dataclasses and pydantic models dicts, chz
    objects dicts with their class name under "class", sets sorted lists, paths and dates strings, functions and classes
    their qualified name. Anything else becomes `str(type(obj))`, so that a config with an unusual member can be
    written.

    Raises:
        DataValidationError: a number is NaN or infinite (JSON has neither), or two keys of a dict have the same text.
            The message names the key path.
    """
    if obj is None or isinstance(obj, bool):
        return obj
    if isinstance(obj, enum.Enum):
        return to_jsonable(obj.value, key_path)
    if isinstance(obj, str):
        return str(obj)
    if isinstance(obj, int):
        return int(obj)
    if isinstance(obj, float):
        if not math.isfinite(obj):
            raise DataValidationError(
                f"{key_path or 'value'}: {obj} cannot be written as JSON; leave the key out or convert the value first"
            )
        return float(obj)
    if isinstance(obj, np.generic | np.ndarray) or _is_torch_tensor(obj):
        return to_jsonable(obj.tolist(), key_path)
    if is_object(obj):
        return _dict_to_jsonable(obj, key_path)
    if is_list_or_tuple(obj):
        if _are_finite_numbers(obj):
            return list(obj)
        return [to_jsonable(item, f"{key_path}[{i}]") for i, item in enumerate(obj)]
    if isinstance(obj, set | frozenset):
        items = cast(Iterable[Any], obj)
        return sorted((to_jsonable(item, f"{key_path}[...]") for item in items), key=lambda x: json.dumps(x))
    if isinstance(obj, Path | date):
        return str(obj) if isinstance(obj, Path) else obj.isoformat()
    if isinstance(obj, type) or (callable(obj) and hasattr(obj, "__qualname__")):
        return qualified_name(obj)
    if chz.is_chz(obj):
        fields = {name: getattr(obj, name) for name in chz.chz_fields(obj)}
        return {CLASS_KEY: qualified_name(type(obj)), **_dict_to_jsonable(fields, key_path)}
    if dataclasses.is_dataclass(obj):
        fields = {field.name: getattr(obj, field.name) for field in dataclasses.fields(obj)}
        return _dict_to_jsonable(fields, key_path)
    dump = getattr(obj, "model_dump", None)  # pydantic
    if dump is not None:
        return to_jsonable(dump(), key_path)
    return f"{type(obj)}"


def qualified_name(obj: Any) -> str:
    """`package.module.Name` of a class or function; a module run with `python -m` keeps its real name."""
    module = getattr(obj, "__module__", None) or "?"
    if module == "__main__":
        spec = getattr(sys.modules["__main__"], "__spec__", None)
        module = spec.name if spec is not None else module
    return f"{module}.{obj.__qualname__}"


def flatten(obj: Any, key_path: str = "") -> dict[str, Any]:
    """The leaves of nested dicts by dotted key. Lists are leaves."""
    if not is_object(obj) or not obj:
        return {key_path: obj}
    leaves: dict[str, Any] = {}
    for key, value in obj.items():
        leaves.update(flatten(value, f"{key_path}.{key}" if key_path else str(key)))
    return leaves


def write_bytes(path: str | Path, content: bytes | memoryview) -> None:
    """Write a file atomically: readers see the old content or the new, never a part."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}{_TEMPORARY}")
    try:
        with open(temporary, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def is_temporary(path: Path) -> bool:
    """Whether a file is an unfinished temporary file of `write_bytes`."""
    return path.name.startswith(".") and path.name.endswith(_TEMPORARY)


def write_text(path: str | Path, text: str) -> None:
    """Like `write_bytes`, in UTF-8."""
    write_bytes(path, text.encode())


def write_json(path: str | Path, obj: Any, indent: int | None = 2) -> None:
    """Write one object as JSON, atomically; indent=None: compact.

    Raises:
        DataValidationError: as in `to_jsonable`; nothing is written then.
    """
    write_bytes(path, json_bytes(obj, indent))


def json_bytes(obj: Any, indent: int | None = 2) -> bytes:
    """The bytes that `write_json` writes."""
    separators = (",", ":") if indent is None else None
    text = json.dumps(to_jsonable(obj), indent=indent, separators=separators, ensure_ascii=False, allow_nan=False)
    return text.encode() + b"\n"


def json_line(row: dict[str, Any]) -> bytes:
    """The line that `append_jsonl` appends, with its line end."""
    return json.dumps(to_jsonable(row), ensure_ascii=False, allow_nan=False).encode() + b"\n"


def read_json_object(path: str | Path, fix: str) -> dict[str, Any]:
    """Read the object of a JSON file. Raises DataFormatError, `path: what is wrong; fix`, if there is none."""
    return parse_json_object(Path(path).read_bytes(), path, fix)


def parse_json_object(content: bytes, path: str | Path, fix: str) -> dict[str, Any]:
    """`read_json_object` for bytes in memory; `path` names them in errors."""
    try:
        return _parse_object(content)[1]
    except ValueError as error:
        raise DataFormatError(f"{path}: {error}; {fix}") from error


def write_jsonl(path: str | Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write rows as JSON lines, atomically. Raises DataValidationError as in `to_jsonable`; nothing is written then."""
    write_bytes(path, b"".join([json_line(row) for row in rows]))


def append_jsonl(path: str | Path, row: dict[str, Any]) -> None:
    """Append one line and flush it to disk before returning.

    If the file ends in the torn line of a killed writer, that line is removed first, so that the new one is not
    appended to it.

    Raises:
        DataValidationError: as in `to_jsonable`; nothing is written then.
        OSError: only part of the line could be written; the part is removed again.
    """
    line = json_line(row)
    with open(path, "a+b", buffering=0) as file:
        end = file.seek(0, os.SEEK_END)
        if end > 0:
            file.seek(end - 1)
            if file.read(1) != b"\n":
                file.seek(0)
                content = file.read()
                whole = without_torn_tail(content)
                line = whole[len(content) :] + line
                file.truncate(min(len(content), len(whole)))
        _append(file, line, path)


def append_bytes(path: str | Path, content: bytes) -> None:
    """Append bytes in one write and flush them to disk. Raises OSError as in `append_jsonl`."""
    with open(path, "ab", buffering=0) as file:
        _append(file, content, path)


def without_torn_tail(content: bytes) -> bytes:
    """The lines with a complete last one: a missing line end is added, a torn line is dropped."""
    tail = content[content.rfind(b"\n") + 1 :]
    if not tail:
        return content
    return content + b"\n" if _is_object(tail) else content[: len(content) - len(tail)]


def read_jsonl(path: str | Path, tolerate_torn_tail: bool = False) -> list[dict[str, Any]]:
    """All rows of a JSON-lines file; blank lines are skipped.

    Args:
        path: the file.
        tolerate_torn_tail: drop a last line that has no line end and does not parse, as left by a writer that was
            killed in the middle of a write.

    Raises:
        DataFormatError: a line is not a JSON object in UTF-8. The message begins with `path:line:`.
        FileNotFoundError: there is no such file.
    """
    return [line.row for line in iterate_jsonl(path, tolerate_torn_tail)]


class JsonLine(NamedTuple):
    """A line of a JSON-lines file: its number, from 1, its text without the line end, and its object."""

    number: int
    text: str
    row: dict[str, Any]


def iterate_jsonl(
    path: str | Path,
    tolerate_torn_tail: bool = False,
    on_bad_line: Callable[[int, DataFormatError], None] | None = None,
) -> Iterator[JsonLine]:
    """The nonblank lines of a JSON-lines file. Arguments and errors as in `read_jsonl`.

    Args:
        on_bad_line: called with the number and the error of each invalid line, which is then skipped unless the call
            raises.
    """
    yield from parse_jsonl(Path(path).read_bytes(), path, tolerate_torn_tail, on_bad_line)


def parse_jsonl(
    content: bytes,
    path: str | Path,
    tolerate_torn_tail: bool = False,
    on_bad_line: Callable[[int, DataFormatError], None] | None = None,
    first: int = 1,
) -> Iterator[JsonLine]:
    """`iterate_jsonl` for bytes in memory; `path` names them in errors, `first` is the number of their first line."""
    # Split on b"\n" alone: str.splitlines also splits at U+2028 and others, which JSON strings may contain.
    lines = content.split(b"\n")
    for number, raw in enumerate(lines, start=first):
        if not raw.strip():
            continue
        try:
            text, row = _parse_object(raw)
        except ValueError as error:
            if tolerate_torn_tail and number == first + len(lines) - 1:
                return
            problem = DataFormatError(f"{path}:{number}: {error}")
            if on_bad_line is None:
                raise problem from error
            on_bad_line(number, problem)
            continue
        yield JsonLine(number, text, row)


def truncate_jsonl(path: str | Path, keep: Callable[[dict[str, Any]], bool]) -> int:
    """Drop the rows that `keep` rejects, and a torn last line (`kept_lines`). A missing file counts as an empty one.

    Returns:
        The number of rows dropped, not counting a torn line.

    Raises:
        DataFormatError: as in `read_jsonl`; the file is unchanged then.
    """
    path = Path(path)
    content = path.read_bytes() if path.exists() else b""
    kept, dropped = kept_lines(content, path, keep)
    if kept != content:
        write_bytes(path, kept)
    return dropped


def kept_lines(content: bytes, path: str | Path, keep: Callable[[dict[str, Any]], bool]) -> tuple[bytes, int]:
    """The lines of a JSON-lines file whose rows `keep` accepts, unchanged and without a torn last line; and the number of
    other rows. Raises DataFormatError as `read_jsonl`; `path` names the file.
    """
    lines = list(parse_jsonl(content, path, tolerate_torn_tail=True))
    kept = [line.text for line in lines if keep(line.row)]
    return "".join(line + "\n" for line in kept).encode(), len(lines) - len(kept)


def _append(file: io.FileIO, content: bytes, path: str | Path) -> None:
    # Unbuffered: one write call, hence all of it or a short count, never two interleaved halves.
    end = file.seek(0, os.SEEK_END)
    written = file.write(content)
    if written != len(content):
        file.truncate(end)
        raise OSError(errno.ENOSPC, "only part of the line could be written", str(path))
    os.fsync(file.fileno())


def _parse_object(raw: bytes) -> tuple[str, dict[str, Any]]:
    """The text of a line and its object. Raises ValueError with the reason."""
    try:
        text = raw.decode("utf-8")
        row = json.loads(text, parse_constant=_reject_constant)
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 text ({error.reason} at byte {error.start})") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not valid JSON ({error})") from error
    if not is_object(row):
        raise ValueError(f"a {type(row).__name__} and not an object")
    return text, row


def _is_object(raw: bytes) -> bool:
    try:
        _parse_object(raw)
    except ValueError:
        return False
    return True


def _reject_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _dict_to_jsonable(obj: dict[Any, Any], key_path: str) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in obj.items():
        text = str(key.value if isinstance(key, enum.Enum) else key)
        if text in result:
            raise DataValidationError(f"{key_path or 'value'}: two keys of the dict have the same text {text!r}")
        result[text] = to_jsonable(value, f"{key_path}.{text}" if key_path else text)
    return result


def _are_finite_numbers(items: list[Any] | tuple[Any, ...]) -> bool:
    """Whether the list needs no check of each item: token ids, logprobs, ... can be millions."""
    return set(map(type, items)) <= {int, float} and all(map(math.isfinite, items))


def _is_torch_tensor(obj: Any) -> bool:
    # If torch is not loaded, nothing can be a tensor; a script that only uses the API should not import it.
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(obj, torch.Tensor)


def _sync_folder(folder: Path) -> None:
    # Makes the rename itself durable. Folders cannot be opened on every platform; the rename is atomic regardless.
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
