"""Run functions in separate processes, a limited number at a time; when the program ends, they end as by Ctrl-C.

Not `ProcessPoolExecutor`: its workers share a lock for their results and wait for more work after a signal has ended
their task. A program that ends a run early by a signal would wait for them forever, or for a lock whose holder has
died.
"""

from __future__ import annotations

import asyncio
import ctypes
import multiprocessing
import os
import pickle
import signal
import traceback
from collections.abc import Callable, Coroutine, Generator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, ParamSpec, Protocol, TypeVar

T = TypeVar("T")
P = ParamSpec("P")

_PR_SET_PDEATHSIG = 1
"""Linux: prctl(2)."""


class ProcessDiedError(RuntimeError):
    """A process ended without a result: it was killed, or the interpreter crashed."""


class RemoteTracebackError(Exception):
    """The cause of an error in another process: its traceback there."""


class Start(Protocol):
    """`await start(function, *arguments)`: runs `function(*arguments)` in a new process; returns its result or raises
    its error.
    """

    def __call__(
        self, function: Callable[P, T], /, *arguments: P.args, **keywords: P.kwargs
    ) -> Coroutine[Any, Any, T]: ...


@contextmanager
def processes(at_once: int) -> Generator[Start]:
    """Context with a function that starts others in new interpreters, `at_once` of them at a time; the rest wait.

    Functions, arguments, results and errors are pickled. When the body is left early, running functions get SIGTERM
    (see `interruptible`) and are awaited. They also get it when this process dies, for any reason (on Linux).

    Raises:
        ProcessDiedError: (from the call of `start`) the process ended without a result.
    """
    # New interpreters, not forks: a fork copies locks held by other threads.
    context = multiprocessing.get_context("spawn")
    slots = asyncio.Semaphore(at_once)
    alive: set[BaseProcess] = set()

    async def start(function: Callable[P, T], /, *arguments: P.args, **keywords: P.kwargs) -> T:
        async with slots:
            receiving, sending = context.Pipe(duplex=False)
            process = context.Process(target=_call, args=(sending, os.getpid(), function, arguments, keywords))
            alive.add(process)
            process.start()
            sending.close()  # only the child has the other end, so the child's death ends the receive
            # If cancelled here, the end of the body handles the process.
            outcome = await asyncio.to_thread(_receive_outcome, receiving)
            process.join()
            alive.discard(process)
        return _result_of(outcome, process)

    try:
        yield start
    except BaseException:
        for process in alive:
            process.terminate()
        raise
    finally:
        for process in alive:
            process.join()


def end_with(parent: int) -> None:
    """(In a new process, on Linux.) Get SIGTERM when the process `parent` dies, for any reason, because nothing else
    would end it.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it died before the call above
        os.kill(os.getpid(), signal.SIGTERM)


def describe_exit(code: int) -> str:
    """An exit code in words: "killed by SIGKILL", "exit code 3"."""
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _call(
    sending: Connection, parent: int, function: Callable[..., Any], arguments: tuple[Any, ...], keywords: dict[str, Any]
) -> None:
    """Runs in the child process."""
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # a terminal sends Ctrl-C to both; the parent passes it on as one SIGTERM
    if os.uname().sysname == "Linux":
        end_with(parent)
    try:
        outcome = (function(*arguments, **keywords), None, "")
    except Exception as error:
        outcome = (None, error, traceback.format_exc())
    try:
        packed = pickle.dumps(outcome)
    except Exception as unpicklable:
        reason = f"{type(outcome[1] or outcome[0]).__name__} cannot be sent to the parent process ({unpicklable})"
        packed = pickle.dumps((None, TypeError(reason), outcome[2]))
    sending.send_bytes(packed)


def _receive_outcome(receiving: Connection) -> bytes | None:
    with receiving:
        try:
            return receiving.recv_bytes()
        except EOFError:
            return None


def _result_of(outcome: bytes | None, process: BaseProcess) -> Any:
    if outcome is None:
        raise ProcessDiedError(f"a process ended without a result: {describe_exit(process.exitcode or 0)}")
    result, error, trace = pickle.loads(outcome)
    if error is not None:
        raise error from RemoteTracebackError(trace)
    return result
