"""Decorators for functions and coroutine functions alike."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])


def in_context(function: F, enter: Callable[[], AbstractContextManager[Any]]) -> F:
    """The function, with each call run in a new context made by `enter`."""
    if inspect.iscoroutinefunction(function):

        @wraps(function)
        async def call_async(*args: Any, **kwargs: Any) -> Any:
            with enter():
                return await function(*args, **kwargs)

        return cast(F, call_async)

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with enter():
            return function(*args, **kwargs)

    return cast(F, call)
