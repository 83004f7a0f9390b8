"""Operations in parts: a long operation yields so that others may run, and continues at its next turn."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TypeVar

T = TypeVar("T")

Parts = Generator[int | None, None, T]
"""An operation that yields between its parts the tokens of the last one, if known, and returns its result."""


def in_one(operation: Callable[[], T]) -> Parts[T]:
    """An operation of a single part."""
    yield from ()
    return operation()


def finish(parts: Parts[T]) -> T:
    """Run all parts at once."""
    while True:
        try:
            next(parts)
        except StopIteration as end:
            return end.value
