"""The `_async` spelling of a client's methods, for scripts written for older SDKs:

    sample_async = awaited(sample)

A twin has the method's parameters and calls whatever the object has under the method's name, so that a subclass overrides both.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, TypeVar

C = TypeVar("C")
P = ParamSpec("P")
T = TypeVar("T")


def as_coroutine(method: Callable[Concatenate[C, P], T]) -> Callable[Concatenate[C, P], Coroutine[Any, Any, T]]:
    """A coroutine that returns what the method returns; a future is left for the caller to await in turn."""

    async def twin(self: C, *args: P.args, **kwargs: P.kwargs) -> T:
        return getattr(self, method.__name__)(*args, **kwargs)

    return _described(twin, method, f"`{method.__name__}(...)`", method.__annotations__["return"])


def awaited(method: Callable[Concatenate[C, P], Awaitable[T]]) -> Callable[Concatenate[C, P], Coroutine[Any, Any, T]]:
    """A coroutine that awaits the method's future and returns its result."""

    async def twin(self: C, *args: P.args, **kwargs: P.kwargs) -> T:
        return await getattr(self, method.__name__)(*args, **kwargs)

    result = method.__annotations__["return"].partition("[")[2].removesuffix("]")  # of "EngineFuture[...]"
    return _described(twin, method, f"`await {method.__name__}(...)`", result)


def _described(twin: Any, method: Callable, call: str, returns: str) -> Any:
    """The twin with the name, docstring and signature that `inspect` shows."""
    functools.update_wrapper(twin, method)
    twin.__name__, twin.__qualname__ = f"{method.__name__}_async", f"{method.__qualname__}_async"
    twin.__doc__ = f"{call}, as older scripts spell it."
    twin.__annotations__ = {**method.__annotations__, "return": returns}
    twin.__signature__ = inspect.signature(method).replace(return_annotation=returns)
    return twin
