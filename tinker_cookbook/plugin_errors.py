"""Failures of a user's reward code: one line with the location and the input."""

from __future__ import annotations

import inspect
import reprlib
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tinker_cookbook.backends import is_engine_error
from tinker_cookbook.exceptions import RewardError, TinkerCookbookError

LONGEST = 100
"""Characters that a value takes in a message."""

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = LONGEST
_SHORT.maxlevel, _SHORT.maxlist, _SHORT.maxdict = 3, 2, 4


@contextmanager
def naming_what_was_given(what: str, function: Callable[..., Any], given: Mapping[str, Any]) -> Iterator[None]:
    """Turn an exception of the body into a RewardError: `what`, the exception, its line in `function`, and the `given`
    input.

    Errors of this library and of the engine are clear already, and pass through.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, TinkerCookbookError) or is_engine_error(error):
            raise
        told = ", ".join(f"{name}: {_told(value)}" for name, value in given.items()) or "nothing"
        raise RewardError(
            f"{what} failed: {type(error).__name__}: {error}{_line(error, function)}; it was given {told}"
        ) from error


def _line(error: Exception, function: Callable[..., Any]) -> str:
    """The last line of the traceback in the function's file."""
    code = getattr(inspect.unwrap(function), "__code__", None) or getattr(type(function).__call__, "__code__", None)
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if code and frame.filename == code.co_filename]
    return f" ({Path(own[-1].filename).name}, line {own[-1].lineno})" if own else ""


def _told(value: Any) -> str:
    """Type and beginning of a value, on one line."""
    short = " ".join(_SHORT.repr(value).split())
    if len(short) > LONGEST:
        short = f"{short[:LONGEST]}..."
    return f"{_type(value)} {short}" if value is not None else short


def _type(value: Any) -> str:
    if isinstance(value, list):
        is_message = [isinstance(one, Mapping) and "role" in one for one in value]
        kinds = sorted({"message" if said else _type(one) for one, said in zip(value, is_message, strict=True)})
        return f"list of {len(value)} ({' or '.join(kinds)})" if value else "empty list"
    return type(value).__name__
