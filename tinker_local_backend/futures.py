"""Futures of the local clients: await them, or call `.result()`, as with the SDK's."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import tinker

from tinker_local_backend.engine.gate import LoopGate
from tinker_local_backend.errors import RequestError

T = TypeVar("T")
U = TypeVar("U")


@dataclass(frozen=True)
class EngineLink:
    """How a future's waiter reaches the engine: the gate that may hold the request, and all gates by event loop."""

    gate: LoopGate | None
    gates: Callable[[], Mapping[int, LoopGate]]
    worker: threading.Thread | None = None

    @contextmanager
    def blocking(self) -> Iterator[None]:
        """Around a blocking wait on any thread: neither a held request nor a loop that this wait blocks may stop the worker."""
        if threading.current_thread() is self.worker:
            raise RequestError(
                "a custom loss runs on the engine's thread and cannot wait for the engine: get what it needs (reference "
                "logprobs, say) before forward_backward_custom, and let the function close over it"
            )
        loop = running_loop()
        own = self.gates().get(id(loop)) if loop is not None else None
        if self.gate is not None and self.gate is not own and not self.gate.loop.is_running():
            self.gate.flush()  # the loop ended before the request was passed on
        with own.blocking() if own is not None else nullcontext():
            yield


class EngineFuture(tinker.APIFuture[T], Generic[T]):
    """The result of an operation that the engine's worker will run or has run.

    `cancellable` (sampling): an awaiting task that stops waiting, by a timeout or by being cancelled, also cancels the
    request; `result(timeout)` does not. A training
    operation is never taken back that way: those that follow it were submitted in the belief that it runs.
    """

    def __init__(self, future: Future[T], link: EngineLink, cancellable: bool = False):
        self._future = future
        self._link = link
        self._cancellable = cancellable

    async def result_async(self, timeout: float | None = None) -> T:
        waiting = asyncio.wrap_future(self._future)
        async with asyncio.timeout(timeout):
            return await (waiting if self._cancellable else asyncio.shield(waiting))

    def result(self, timeout: float | None = None) -> T:
        """Block until the result is there. On an event loop's thread this blocks the loop: prefer `await`."""
        with self._link.blocking():
            return self._future.result(timeout)

    def future(self) -> Future[T]:
        return self._future


class ClientFuture(EngineFuture[T]):
    """A future of a client that can also be used as the client itself, as scripts for older SDKs do (this waits for it)."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.result(), name)


class MappedFuture(EngineFuture[U], Generic[T, U]):
    """A future whose result is a function of another's."""

    def __init__(self, source: EngineFuture[T], convert: Callable[[T], U]):
        mapped: Future[U] = Future()
        super().__init__(mapped, source._link, source._cancellable)

        def copy(done: Future[T]) -> None:
            if done.cancelled():
                mapped.cancel()
                return
            if not mapped.set_running_or_notify_cancel():
                return
            error = done.exception()
            if error is not None:
                mapped.set_exception(error)
                return
            try:
                mapped.set_result(convert(done.result()))
            except Exception as conversion_error:
                mapped.set_exception(conversion_error)

        source.future().add_done_callback(copy)
        mapped.add_done_callback(lambda done: source.future().cancel() if done.cancelled() else None)


def running_loop() -> asyncio.AbstractEventLoop | None:
    """The event loop that runs on this thread, if one does."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
