"""Ctrl-C and SIGTERM end a program the same way: its coroutines clean up, wherever they wait."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")

BLOCKED_SECONDS = 5.0
"""An event loop that has not moved this long after an interrupt is blocked by a call that it waits for."""


class Interrupts:
    """What the signals of `interruptible` do: raise KeyboardInterrupt, or cancel the coroutine that runs.

    Attributes:
        first: the signal that came first; None: none did.
    """

    def __init__(self) -> None:
        self.first: int | None = None
        self._cancel: Callable[[], None] | None = None

    def handle(self, number: int, frame: FrameType | None) -> None:
        """A signal handler."""
        self.first = number if self.first is None else self.first
        if self._cancel is None:
            raise KeyboardInterrupt
        cancel, self._cancel = self._cancel, None  # the next one raises: the user insists, or the loop is blocked
        cancel()

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        """`asyncio.run`. An interrupt cancels `main`, lets it clean up, and ends in KeyboardInterrupt, even if `main` had nothing
        left to wait for.

        Cancelling has no effect while a blocking call (an SDK that retries, say) keeps the loop from running. Such a call gets
        the KeyboardInterrupt itself.
        """
        was_cancelled = threading.Event()

        async def cancellable() -> T:
            loop, task, main_thread = asyncio.get_running_loop(), asyncio.current_task(), threading.main_thread()
            moved, blocked = threading.Event(), threading.Event()

            def stop() -> None:
                if task is not None and not blocked.is_set():
                    moved.set()
                    was_cancelled.set()
                    task.cancel()

            def watch() -> None:
                if not moved.wait(BLOCKED_SECONDS) and main_thread.ident is not None:
                    blocked.set()
                    signal.pthread_kill(main_thread.ident, signal.SIGTERM)

            def cancel() -> None:
                # Not at once: a task that is cancelled as well could not wait for anything while it cleans up.
                loop.call_soon_threadsafe(stop)
                threading.Thread(target=watch, name="interrupt", daemon=True).start()

            self._cancel = cancel
            return await main

        try:
            result = asyncio.run(cancellable())
        except asyncio.CancelledError:
            if was_cancelled.is_set():
                raise KeyboardInterrupt from None
            raise
        finally:
            self._cancel = None
        if self.first is not None:
            raise KeyboardInterrupt
        return result


@contextmanager
def interruptible() -> Iterator[Interrupts]:
    """Within the body SIGTERM does what Ctrl-C does. Ctrl-C stays without effect where the process was started to ignore it."""
    interrupts = Interrupts()
    if threading.current_thread() is not threading.main_thread():
        yield interrupts  # signals are for the main thread
        return
    numbers = [signal.SIGTERM]
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        numbers.append(signal.SIGINT)
    before = {number: signal.signal(number, interrupts.handle) for number in numbers}
    try:
        yield interrupts
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
