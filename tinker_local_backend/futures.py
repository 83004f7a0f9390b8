"""Futures of the clients' methods, with `await` and `.result()` as in the SDK.

For scripts written for older SDKs, methods also exist as coroutines: `sample_async = awaited(sample)`.
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
    """The result of an operation that runs elsewhere, usually on the engine's worker.

    Args:
        future: the result.
        waiting: context manager around a blocking wait, in which the engine makes sure that the wait can end.
        cancellable: (sampling) a timeout or a cancellation while awaiting also cancels the request; `result(timeout)` does
            not. Training operations are never cancelled like this, because later ones were submitted on the assumption
            that they run.
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
        """Block until the result is available. On an event loop's thread this blocks the loop: prefer `await`."""
        with self._waiting():
            return self._future.result(timeout)

    def future(self) -> Future[T]:
        return self._future


class ClientFuture(EngineFuture[T]):
    """A future of a client that also works as the client, as scripts for older SDKs expect: access to an attribute waits,
    and `isinstance(future, client_class)` is true."""

    def __init__(self, source: EngineFuture[T], client_class: type[T]):
        super().__init__(source._future, source._waiting)
        self._client_class = client_class

    @property
    def __class__(self) -> type[T]:  # pyright: ignore[reportIncompatibleMethodOverride, reportIncompatibleVariableOverride]
        return self._client_class

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.result(), name)


def completed(function: Callable[[], T]) -> EngineFuture[T]:
    """Call a function at once, and return its result or error as a future."""
    future: Future[T] = Future()
    resolve(future, function)
    return EngineFuture(future)


def at_once(method: Callable[P, T]) -> Callable[P, EngineFuture[T]]:
    """Run a method during the call, and return its result or error as a future. The call itself raises only RequestErrors."""

    def call(*args: P.args, **kwargs: P.kwargs) -> EngineFuture[T]:
        future = completed(lambda: method(*args, **kwargs))
        if isinstance(error := future.future().exception(), RequestError):
            raise error
        return future

    return _with_metadata(call, method, f"EngineFuture[{method.__annotations__['return']}]")


def on_a_thread(function: Callable[[], T], name: str) -> EngineFuture[T]:
    """Run a function on a new thread, which Python joins at exit. Returns a future."""
    future: Future[T] = Future()
    threading.Thread(target=resolve, args=(future, function), name=name).start()
    return EngineFuture(future)


def resolve(future: Future[T], function: Callable[[], T]) -> None:
    """Set a future to the function's result or error, unless it is cancelled."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(function())
    except Exception as error:
        future.set_exception(error)


def as_coroutine(method: Callable[Concatenate[C, P], T]) -> Callable[Concatenate[C, P], Coroutine[Any, Any, T]]:
    """The method's `_async` twin: a coroutine that returns the method's future, which the caller awaits in turn.
    A twin looks the method up by name, so that a subclass overrides both."""

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
    _with_metadata(twin, method, returns)
    twin.__name__, twin.__qualname__ = f"{method.__name__}_async", f"{method.__qualname__}_async"
    twin.__doc__ = f"{call}, under its older name."
    return twin


def _with_metadata(function: Any, method: Callable, returns: str) -> Any:
    """Give the function the method's name, docstring and signature, as `inspect` shows them, with another return type."""
    update_wrapper(function, method)
    function.__annotations__ = {**method.__annotations__, "return": returns}
    function.__signature__ = inspect.signature(method).replace(return_annotation=returns)
    return function
