"""Shared by the backends that start a command on this machine: the input archive, supervision, the result."""

import asyncio
import secrets
import threading
from abc import abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import cache
from typing import TypeVar

from tinker_cookbook.exceptions import SandboxError
from tinker_cookbook.sandbox.packing import pack, script_argv, split_output
from tinker_cookbook.sandbox.sandbox_interface import Command, Files, Sandbox, SandboxLimits, SandboxResult
from tinker_cookbook.sandbox.supervision import Outcome, Supervised, supervise

T = TypeVar("T")

CONCURRENT_RUNS = 8
"""Concurrent runs of this process; further ones are queued, and their time limits start when they do."""


class HostSandbox(Sandbox):
    """A sandbox whose runs are commands on this machine."""

    root = "/tmp"
    """the folder of SCRIPT, in the sandbox"""
    sweeps = True
    """its processes have a private namespace, so the script can kill all that are left"""

    @abstractmethod
    def opened(
        self, script: "ScriptMaker", limits: SandboxLimits, payload_bytes: int, keep: bool
    ) -> AbstractContextManager[Supervised]:
        """The command of a run; on exit its resources are removed. Raises SandboxError."""

    async def run(
        self,
        files: Files,
        command: Command,
        stdin: str | bytes = b"",
        limits: SandboxLimits | None = None,
        *,
        workspace: bytes | None = None,
        keep: bool = False,
    ) -> SandboxResult:
        limits, payload = limits or SandboxLimits(), pack(files, stdin, workspace)
        mark = secrets.token_hex(16)
        stop = threading.Event()

        def in_thread() -> SandboxResult:
            def script(root: str) -> list[str]:
                return [*script_argv(root, mark, command, keep, self.sweeps)]

            with self.opened(ScriptMaker(script, mark), limits, len(payload), keep) as supervised:
                try:
                    outcome = supervise(supervised, payload, limits, stop)
                except OSError as error:
                    raise SandboxError(
                        f"sandbox={self.name}: {supervised.argv[0]} cannot be started: {error}"
                    ) from error
                return self.result(outcome, mark, limits, keep)

        return await _in_thread(in_thread, stop)

    def result(self, outcome: Outcome, mark: str, limits: SandboxLimits, keep: bool) -> SandboxResult:
        """The result of a run that has ended. Raises SandboxError if the command was never started."""
        parts = split_output(outcome.stdout, mark)
        if not parts.started and outcome.limit is None:
            stderr = outcome.stderr.decode(errors="replace").strip()[-500:]
            raise SandboxError(
                f"sandbox={self.name} did not start the program (exit code {outcome.exit_code}): {stderr}"
            )
        most = limits.output_kb << 10
        full = "disk_mb" if parts.disk_full else None
        return SandboxResult(
            stdout=parts.stdout[:most].decode(errors="replace"),
            stderr=outcome.stderr[:most].decode(errors="replace"),
            exit_code=outcome.exit_code,
            timed_out=outcome.limit in ("wall_s", "cpu_s"),
            truncated=outcome.limit == "output_kb",
            limit=outcome.limit or full,
            wall_s=outcome.wall_s,
            cpu_s=outcome.cpu_s,
            workspace=parts.workspace if keep and parts.ended and outcome.limit is None else None,
        )


class ScriptMaker:
    """The script of a run, for a folder.

    Attributes:
        end_mark: separates the program's stdout from the rest.
    """

    def __init__(self, make: Callable[[str], list[str]], mark: str):
        self.argv, self.end_mark = make, f"\n{mark} end ".encode()


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(CONCURRENT_RUNS, thread_name_prefix="sandbox")


async def _in_thread(function: Callable[[], T], stop: threading.Event) -> T:
    """Call in a thread. Cancellation stops the run, and is raised once the run has been cleaned up."""
    job = _threads().submit(function)
    future = asyncio.wrap_future(job)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        stop.set()
        if not job.cancel():
            await asyncio.wait([future])
        raise
