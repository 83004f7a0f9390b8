"""Ctrl-C and SIGTERM end a program the same way: its coroutines clean up, wherever they wait."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")

BLOCKED_SECONDS = 5.0
"""An event loop that has not moved this long after an interrupt is blocked by a call that it waits for."""


@contextmanager
def sigterm_as_ctrl_c() -> Iterator[list[int]]:
    """Within the body SIGTERM does what Ctrl-C does. Yields the list that it is noted in."""
    received: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        received.append(number)
        # Asked now: while asyncio runs it has a handler of its own, which cancels the main task.
        handler = signal.getsignal(signal.SIGINT)
        (handler if callable(handler) else signal.default_int_handler)(signal.SIGINT, frame)

    if threading.current_thread() is not threading.main_thread():
        yield received  # signals are for the main thread
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield received
    finally:
        signal.signal(signal.SIGTERM, before)


def run_interruptibly(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run`, except that an interrupt also ends a call that blocks the event loop.

    On Ctrl-C asyncio cancels the main task, which has no effect while a blocking call (an SDK that retries, say) keeps the
    loop from running. Such a call gets the KeyboardInterrupt itself, as it would from a second Ctrl-C.
    """

    async def watched() -> T:
        loop, main_thread = asyncio.get_running_loop(), threading.main_thread()
        cancel = signal.getsignal(signal.SIGINT)
        if threading.current_thread() is not main_thread or not callable(cancel):
            return await main  # asyncio has no handler here

        moved, blocked, interrupted = threading.Event(), threading.Event(), threading.Event()

        def stop() -> None:
            if not blocked.is_set():
                moved.set()
                cancel(signal.SIGINT, None)

        def watch() -> None:
            if not moved.wait(BLOCKED_SECONDS) and main_thread.ident is not None:
                blocked.set()
                signal.pthread_kill(main_thread.ident, signal.SIGINT)

        def interrupt(number: int, frame: FrameType | None) -> None:
            if interrupted.is_set():
                raise KeyboardInterrupt  # the user insists, or the loop is blocked
            interrupted.set()
            # Not at once: a task that is cancelled as well could not wait for anything while it cleans up.
            loop.call_soon_threadsafe(stop)
            threading.Thread(target=watch, name="interrupt", daemon=True).start()

        signal.signal(signal.SIGINT, interrupt)
        try:
            return await main
        finally:
            signal.signal(signal.SIGINT, cancel)

    return asyncio.run(watched())
