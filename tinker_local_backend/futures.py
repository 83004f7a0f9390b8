"""How the clients' methods give their results: futures, to await or to ask for `.result()`, as with the SDK's.

For scripts written for older SDKs a method also has a coroutine, `sample_async = awaited(sample)`.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from functools import update_wrapper
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

import tinker

from tinker_local_backend.errors import RequestError

C = TypeVar("C")
T = TypeVar("T")
P = ParamSpec("P")


class EngineFuture(tinker.APIFuture[T], Generic[T]):
    """The result of an operation that runs elsewhere, as a rule on the engine's worker.

    Args:
        future: what is waited for.
        waiting: makes the context of a blocking wait, in which the engine sees to it that the wait can end.
        cancellable: (sampling) an awaiting task that stops waiting, by a timeout or by being cancelled, also cancels the
            request; `result(timeout)` does not. A training operation is never cancelled that way: those after it were
            submitted on the assumption that it runs.
    """

    def __init__(
        self,
        future: Future[T],
        waiting: Callable[[], AbstractContextManager[object]] = nullcontext,
        cancellable: bool = False,
    ):
        self._future = future
        self._waiting = waiting
        self._cancellable = cancellable

    async def result_async(self, timeout: float | None = None) -> T:
        waiting = asyncio.wrap_future(self._future)
        async with asyncio.timeout(timeout):
            return await (waiting if self._cancellable else asyncio.shield(waiting))

    def result(self, timeout: float | None = None) -> T:
        """Block until the result is there. On an event loop's thread this blocks the loop: prefer `await`."""
        with self._waiting():
            return self._future.result(timeout)

    def future(self) -> Future[T]:
        return self._future


class ClientFuture(EngineFuture[T]):
    """A future of a client that can also be used as the client itself, as scripts for older SDKs do (this waits for it)."""

    def __init__(self, source: EngineFuture[T]):
        super().__init__(source._future, source._waiting)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.result(), name)


def completed(function: Callable[[], T]) -> EngineFuture[T]:
    """The result or error of a function that is called at once, as a future."""
    future: Future[T] = Future()
    settle(future, function)
    return EngineFuture(future)


def at_once(method: Callable[P, T]) -> Callable[P, EngineFuture[T]]:
    """A method that does its work when it is called and returns a future of it. Only RequestErrors are raised at the call."""

    def call(*args: P.args, **kwargs: P.kwargs) -> EngineFuture[T]:
        future = completed(lambda: method(*args, **kwargs))
        if isinstance(error := future.future().exception(), RequestError):
            raise error
        return future

    return _described(call, method, f"EngineFuture[{method.__annotations__['return']}]")


def on_a_thread(function: Callable[[], T], name: str) -> EngineFuture[T]:
    """The result or error of a function that runs on a thread of its own; a program that ends waits for it."""
    future: Future[T] = Future()
    threading.Thread(target=settle, args=(future, function), name=name).start()
    return EngineFuture(future)


def settle(future: Future[T], function: Callable[[], T]) -> None:
    """Give a future the function's result or error, unless somebody has cancelled it."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(function())
    except Exception as error:
        future.set_exception(error)


def as_coroutine(method: Callable[Concatenate[C, P], T]) -> Callable[Concatenate[C, P], Coroutine[Any, Any, T]]:
    """The method's `_async` twin: a coroutine that returns what the method returns; the caller awaits a future in turn.

    A twin calls whatever the object has under the method's name, so that a subclass overrides both.
    """

    async def twin(self: C, *args: P.args, **kwargs: P.kwargs) -> T:
        return getattr(self, method.__name__)(*args, **kwargs)

    return _named_async(twin, method, f"`{method.__name__}(...)`", method.__annotations__["return"])


def awaited(method: Callable[Concatenate[C, P], Awaitable[T]]) -> Callable[Concatenate[C, P], Coroutine[Any, Any, T]]:
    """The method's `_async` twin: a coroutine that awaits the method's future and returns its result."""

    async def twin(self: C, *args: P.args, **kwargs: P.kwargs) -> T:
        return await getattr(self, method.__name__)(*args, **kwargs)

    result = method.__annotations__["return"].partition("[")[2].removesuffix("]")  # of "EngineFuture[...]"
    return _named_async(twin, method, f"`await {method.__name__}(...)`", result)


def _named_async(twin: Any, method: Callable, call: str, returns: str) -> Any:
    _described(twin, method, returns)
    twin.__name__, twin.__qualname__ = f"{method.__name__}_async", f"{method.__qualname__}_async"
    twin.__doc__ = f"{call}, as older scripts spell it."
    return twin


def _described(function: Any, method: Callable, returns: str) -> Any:
    """The function with the name, docstring and signature of the method, as `inspect` shows them, but for its result."""
    update_wrapper(function, method)
    function.__annotations__ = {**method.__annotations__, "return": returns}
    function.__signature__ = inspect.signature(method).replace(return_annotation=returns)
    return function
