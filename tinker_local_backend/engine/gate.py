"""Lockstep with an event loop: concurrent asyncio code gets the same batches, and so the same bits, every time.

Only a deterministic engine runs in lockstep. By default the worker takes requests as they arrive and answers at once, so the
composition of its batches, and thus the last bit of every logprob, depends on timing. In lockstep the gate holds the requests
of an event loop until the loop is idle, and delivers results together; then the worker waits until the loop is idle again.
This is for programs with one loop. Waits are bounded: a loop that is never idle, or is blocked, delays work by at most
`MAX_PASSES` or `BACKSTOP_SECONDS`, and with several loops the worker waits for none.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import contextmanager, suppress
from typing import Generic, TypeVar

W = TypeVar("W")

QUIET_PASSES = 24
"""Passes of the event loop without a new request after which it counts as idle: longer than any chain of wake-ups between a
result and the next request in our loops (future -> task -> barrier -> task group -> task)."""

MAX_PASSES = 50 * QUIET_PASSES
"""Passes after which held requests are released even if new ones keep arriving: a program that submits one every few passes is
never idle."""

BACKSTOP_SECONDS = 60.0
"""Seconds after which a loop that is not idle (blocked in user code) no longer delays the worker or its requests."""

POLL_SECONDS = 0.02
"""Interval at which a waiting worker checks whether the loop has ended."""


class LoopGate(Generic[W]):
    """Holds the requests of one event loop. `release` is called with the held work in order of submission."""

    def __init__(self, loop: asyncio.AbstractEventLoop, release: Callable[[list[W]], None]):
        self.loop = loop
        self._release = release
        self._held: deque[W] = deque()
        self._results: deque[Callable[[], None]] = deque()
        self._quiet = 0
        self._passes = 0
        self._held_since = math.inf
        self._ticking = False
        self._blocked = 0
        self._idle = threading.Event()
        self._idle.set()

    # On the loop's thread

    def submit(self, work: W) -> None:
        """Hold work until the loop is idle."""
        if not self._held:
            self._passes, self._held_since = 0, time.monotonic()
        self._held.append(work)
        self._quiet = 0
        self._start_ticking()

    @contextmanager
    def blocking(self):
        """Wrap a blocking wait on the loop's thread: the loop cannot become idle, so nothing is held."""
        self._blocked += 1
        self.flush()
        self._apply_results()
        self._idle.set()
        try:
            yield
        finally:
            self._blocked -= 1

    def _start_ticking(self) -> None:
        if not self._ticking:
            self._ticking = True
            self.loop.call_soon(self._tick)

    def _tick(self) -> None:
        self._quiet += 1
        self._passes += 1
        if self._held and self._passes >= MAX_PASSES:
            self.flush()
        if self._quiet < QUIET_PASSES:
            self.loop.call_soon(self._tick)
            return
        self._ticking = False
        self.flush()
        self._idle.set()

    def _receive(self) -> None:
        self._apply_results()
        self._quiet = 0
        self._start_ticking()

    # On any thread

    def flush(self) -> None:
        """Release all held work, because the loop is idle, blocked, or has ended."""
        self._held_since = math.inf
        held: list[W] = []
        while self._held:
            with suppress(IndexError):  # another thread may flush too
                held.append(self._held.popleft())
        if held:
            self._release(held)

    def _apply_results(self) -> None:
        while True:
            try:
                apply = self._results.popleft()
            except IndexError:
                return
            apply()

    # On the worker's thread

    def is_late(self) -> bool:
        """Whether requests have been held for longer than BACKSTOP_SECONDS."""
        return time.monotonic() - self._held_since > BACKSTOP_SECONDS

    def deliver(self, results: list[Callable[[], None]]) -> None:
        """Deliver results together, in order. Call `wait_until_idle` next."""
        self._results.extend(results)
        self._idle.clear()
        try:
            self.loop.call_soon_threadsafe(self._receive)
        except RuntimeError:  # the loop is closed; no task waits, but a thread may
            self._apply_results()
            self._idle.set()
        if self._blocked:
            self._apply_results()
            self._idle.set()

    def wait_until_idle(self, others_wait: Callable[[], bool]) -> None:
        """Return when the loop is idle, has ended or blocks on the engine, when others wait, or after BACKSTOP_SECONDS."""
        deadline = time.monotonic() + BACKSTOP_SECONDS
        while not self._idle.wait(POLL_SECONDS):
            if others_wait():
                return
            if not self.loop.is_running() or time.monotonic() > deadline:
                self._apply_results()  # the loop will not; another thread may be waiting
                return


def running_loop() -> asyncio.AbstractEventLoop | None:
    """The event loop that runs on this thread, if any."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
