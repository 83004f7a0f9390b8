"""Where the worker's time goes, told to whoever listens: a program that draws it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

Opener = Callable[[str], AbstractContextManager[Any]]

_opener: Opener | None = None


def listen(opener: Opener | None) -> None:
    """Have `opener(name)` opened around each thing that an engine of this process does, on its thread; None: no longer.

    Names are `scheduler/take_in`, `scheduler/deliver`, `sampler/step` and `trainer/<kind>`, one for each part of an operation.
    """
    global _opener
    _opener = opener


def span(name: str) -> AbstractContextManager[Any]:
    """Around what has this name."""
    return nullcontext() if _opener is None else _opener(name)
