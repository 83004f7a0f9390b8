"""Operations in parts: what takes long yields where others may run, and goes on when it is its turn again."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TypeVar

T = TypeVar("T")

Parts = Generator[int | None, None, T]
"""An operation that yields between its parts, how many tokens the last one had where it knows, and returns its result."""


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
