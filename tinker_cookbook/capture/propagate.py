"""Tags for threads: a thread, or a function in a pool, inherits the tags of its creator."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tinker_cookbook.capture.scope import current_scope, replace_scope

_originals: dict[tuple[type, str], Callable[..., Any]] = {}


def instrument_threads() -> None:
    """From now on threads and thread pools of this process inherit tags. A second call does nothing."""
    if threads_instrumented():
        return
    start, submit = threading.Thread.start, ThreadPoolExecutor.submit

    @functools.wraps(start)
    def start_tagged(self: threading.Thread) -> None:
        self.run = _tagged(self.run)
        start(self)

    @functools.wraps(submit)
    def submit_tagged(self: ThreadPoolExecutor, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        return submit(self, _tagged(function), *args, **kwargs)

    for owner, name, replacement in (
        (threading.Thread, "start", start_tagged),
        (ThreadPoolExecutor, "submit", submit_tagged),
    ):
        _originals[owner, name] = getattr(owner, name)
        setattr(owner, name, replacement)


def _tagged(function: Callable[..., Any]) -> Callable[..., Any]:
    tags = dict(current_scope())

    def call(*args: Any, **kwargs: Any) -> Any:
        with replace_scope(tags):
            return function(*args, **kwargs)

    return call


def threads_instrumented() -> bool:
    """Whether threads inherit tags."""
    return bool(_originals)


def uninstrument_threads() -> None:
    """Threads no longer inherit tags; running ones keep theirs."""
    while _originals:
        (owner, name), original = _originals.popitem()
        setattr(owner, name, original)
