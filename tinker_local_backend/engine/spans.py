"""Named spans of the worker's time, for a profiler."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

Opener = Callable[[str], AbstractContextManager[Any]]

_opener: Opener | None = None


def listen(opener: Opener | None) -> None:
    """Enter `opener(name)` around every span of this process's engines, on their threads; None: stop.

    Names are `scheduler/take_in`, `scheduler/deliver`, `sampler/step` and `trainer/<kind>`, once per part of an operation.
    """
    global _opener
    _opener = opener


def span(name: str) -> AbstractContextManager[Any]:
    """A context manager that encloses a span of this name."""
    return nullcontext() if _opener is None else _opener(name)
