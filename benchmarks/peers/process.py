"""Every peer in its own process, as in real use.

Tools that share a process disturb each other: OpenMP keeps a pool for every thread that has called it, and once there are more
pool threads than cores they sleep between operations instead of spinning, which slows small models by a third to a half. A child
builds its contenders once and then does one run per command.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from multiprocessing.connection import Connection

import torch

from benchmarks.errors import BenchmarkError
from benchmarks.harness import Contender, describe
from benchmarks.peers.setup import Setup

Build = Callable[[Setup], list[Contender]]
CLOSE_SECONDS = 30.0


def isolated(build: Build, setup: Setup) -> list[Contender]:
    """The contenders that `build` makes, in a new process that ends with the setup's stack.

    Raises BenchmarkError with the child's message if it cannot build them; a failed run also raises it.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, build, replace(setup, stack=ExitStack(), versions={})))
    process.start()
    theirs.close()

    def close() -> None:
        ours.close()
        process.join(CLOSE_SECONDS)
        process.kill()

    setup.stack.callback(close)
    names, versions = _receive(ours)
    setup.versions.update(versions)

    def contender(index: int, name: str) -> Contender:
        def run(round_number: int) -> int:
            ours.send((index, round_number))
            return _receive(ours)

        return Contender(name, run)

    return [contender(index, name) for index, name in enumerate(names)]


def _receive(connection: Connection):
    try:
        answer, error = connection.recv()
    except EOFError:
        raise BenchmarkError("its process ended without an answer (see above)") from None
    if error is not None:
        raise BenchmarkError(error)
    return answer


def _serve(connection: Connection, build: Build, setup: Setup) -> None:
    """In the child process: build, then run on command until the parent closes the connection."""
    torch.set_num_threads(setup.config.threads)
    with setup.stack:
        try:
            contenders = build(setup)
        except Exception as error:
            connection.send((None, describe(error)))
            return
        connection.send((([contender.name for contender in contenders], setup.versions), None))
        while True:
            try:
                index, round_number = connection.recv()
            except EOFError:
                return
            try:
                connection.send((contenders[index].run(round_number), None))
            except Exception as error:
                connection.send((None, describe(error)))
