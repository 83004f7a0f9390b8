"""How long requests wait in the engine before they are begun."""

from __future__ import annotations

import itertools
import time
from typing import NamedTuple


class Wait(NamedTuple):
    """What requests of one kind waited."""

    begun: int
    """how many have been begun"""
    waiting: int
    """how many have not"""
    longest_seconds: float
    """the longest wait so far, also of those that still wait"""


class Waits:
    """Waits by kind of request. Clients enter and anyone reads, on any thread; the worker begins."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._waiting: dict[int, tuple[str, float]] = {}
        self._begun: dict[str, tuple[int, float]] = {}

    def enter(self, kind: str, since: float | None = None) -> int:
        """A request has come, now or at this time of the monotonic clock. Returns its number."""
        number = next(self._numbers)
        self._waiting[number] = kind, time.monotonic() if since is None else since
        return number

    def begin(self, number: int) -> None:
        """The request is being worked on. A second call for the same one changes nothing."""
        if (entered := self._waiting.pop(number, None)) is not None:
            kind, since = entered
            count, longest = self._begun.get(kind, (0, 0.0))
            self._begun[kind] = count + 1, max(longest, time.monotonic() - since)

    def leave(self, number: int) -> None:
        """The request was cancelled, or failed before its turn came."""
        self._waiting.pop(number, None)

    def now(self) -> dict[str, Wait]:
        """Of each kind there has been."""
        waits = {kind: Wait(count, 0, longest) for kind, (count, longest) in self._begun.copy().items()}
        for kind, since in self._waiting.copy().values():
            wait = waits.get(kind, Wait(0, 0, 0.0))
            longest = max(wait.longest_seconds, time.monotonic() - since)
            waits[kind] = Wait(wait.begun, wait.waiting + 1, longest)
        return waits
