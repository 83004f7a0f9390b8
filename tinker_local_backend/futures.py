"""Futures of the local clients: await them, or call `.result()`, as with the SDK's."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from functools import update_wrapper
from typing import Any, Generic, ParamSpec, TypeVar

import tinker

from tinker_local_backend.errors import RequestError

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

    returns = f"EngineFuture[{method.__annotations__['return']}]"
    update_wrapper(call, method)
    call.__annotations__ = {**method.__annotations__, "return": returns}
    call.__signature__ = inspect.signature(method).replace(return_annotation=returns)  # pyright: ignore
    return call


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
