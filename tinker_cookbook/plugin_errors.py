"""Errors of a user's reward code: one line with the location and the input."""

from __future__ import annotations

import inspect
import reprlib
import traceback
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tinker_cookbook.backends import is_engine_error
from tinker_cookbook.exceptions import RewardError, TinkerCookbookError
from tinker_cookbook.utils.narrowing import is_list

LONGEST = 100
"""Maximum characters of a value in a message."""

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = LONGEST
_SHORT.maxlevel, _SHORT.maxlist, _SHORT.maxdict = 3, 2, 4


@contextmanager
def plugin_errors(what: str, function: Callable[..., Any], given: Mapping[str, Any]) -> Generator[None]:
    """Turn an exception of the body into a RewardError: `what`, the exception, its line in `function`, and the `given`
    input.

    Errors of this library and of the engine are clear already, and pass through.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, TinkerCookbookError) or is_engine_error(error):
            raise
        inputs = ", ".join(f"{name}: {_described(value)}" for name, value in given.items()) or "nothing"
        raise RewardError(
            f"{what} failed: {type(error).__name__}: {error}{_line(error, function)}; it was given {inputs}"
        ) from error


def _line(error: Exception, function: Callable[..., Any]) -> str:
    """The last line of the traceback in the function's file."""
    code = getattr(inspect.unwrap(function), "__code__", None) or getattr(type(function).__call__, "__code__", None)
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if code and frame.filename == code.co_filename
    ]
    return f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""


def _described(value: Any) -> str:
    """Type and beginning of a value, on one line."""
    short = " ".join(_SHORT.repr(value).split())
    if len(short) > LONGEST:
        short = f"{short[:LONGEST]}..."
    return f"{_type(value)} {short}" if value is not None else short


def _type(value: Any) -> str:
    if is_list(value):
        is_message = [isinstance(one, Mapping) and "role" in one for one in value]
        kinds = sorted({"message" if is_one else _type(item) for item, is_one in zip(value, is_message, strict=True)})
        return f"list of {len(value)} ({' or '.join(kinds)})" if value else "empty list"
    return type(value).__name__
