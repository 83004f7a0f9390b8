"""Reward functions, graders and judges in threads, so that one that blocks holds up no other rollout and no training.

A group's rollouts run within `in_reward_threads(n)` (`rollout.reward_threads=n`). What is `async` stays in the event loop, and so
does everything where n is 0. Functions that run in threads must be safe to run at the same time.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from functools import cache, partial
from typing import Any, TypeVar

from tinker_cookbook.utils.misc_utils import resolved

T = TypeVar("T")

_threads: ContextVar[int] = ContextVar("reward_threads", default=0)


@contextmanager
def in_reward_threads(count: int) -> Iterator[None]:
    """Within the body, and in the tasks that it starts, `call_reward` has so many threads of this process; 0: none."""
    token = _threads.set(count)
    try:
        yield
    finally:
        _threads.reset(token)


async def call_reward(function: Callable[..., T | Awaitable[T]], *arguments: Any) -> T:
    """What a function of a user, sync or async, says of a reply; in a thread if it is sync and there are any."""
    count = _threads.get()
    if count == 0 or _is_async(function):
        return await resolved(function(*arguments))
    # In the context, so that what it writes with `logtree` stands in its member's section.
    call = partial(copy_context().run, partial(function, *arguments))
    return await resolved(await asyncio.get_running_loop().run_in_executor(_pool(count), call))


def _is_async(function: Callable[..., Any]) -> bool:
    while isinstance(function, partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


@cache
def _pool(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, thread_name_prefix="reward")
