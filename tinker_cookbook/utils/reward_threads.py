"""Run reward functions, graders and judges in threads, so that blocking ones do not delay other rollouts or training.

A group's rollouts run within `in_reward_threads(n)` (`rollout.reward_threads=n`). Async functions stay in the event
loop, and so does everything if n is 0. Functions that run in threads must be thread-safe.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from functools import cache, partial
from typing import Any, TypeVar

from tinker_cookbook.utils.misc_utils import resolved

T = TypeVar("T")

_threads: ContextVar[int] = ContextVar("reward_threads", default=0)


@contextmanager
def in_reward_threads(count: int) -> Generator[None]:
    """Within the body, and in tasks started there, `call_reward` uses this many threads of this process; 0: none."""
    token = _threads.set(count)
    try:
        yield
    finally:
        _threads.reset(token)


async def call_reward(function: Callable[..., T | Awaitable[T]], *arguments: Any) -> T:
    """Call a user's function, sync or async, on a reply; in a thread if it is sync and there are any."""
    count = _threads.get()
    if count == 0 or _is_async(function):
        return await resolved(function(*arguments))
    # With the current context, so that `logtree` output goes to its member's section.
    call = partial(copy_context().run, partial(function, *arguments))
    return await resolved(await asyncio.get_running_loop().run_in_executor(_pool(count), call))


def _is_async(function: Callable[..., Any]) -> bool:
    while isinstance(function, partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


@cache
def _pool(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, thread_name_prefix="reward")
