"""A persistent working folder over separate runs: each command starts with the files that the previous one left.

Only files persist. Processes, variables and the current folder end with their command, so an idle session only costs the
bytes of its folder, and leaves nothing behind when it is dropped.
"""

import itertools
import os
import shlex

import chz

from tinker_cookbook.sandbox.sandbox_interface import (
    Command,
    Files,
    Sandbox,
    SandboxInterface,
    SandboxLimits,
    SandboxResult,
    SandboxTerminatedError,
)

MAX_SHOWN = 2000
"""Maximum length of the output shown to a model, in characters."""

_numbers = itertools.count()


class SandboxSession(SandboxInterface):
    """Commands in one working folder, one after the other. Picklable.

    Args:
        sandbox: where they run.
        limits: limits of each command.
        files: initial files of the folder.
    """

    def __init__(self, sandbox: Sandbox, limits: SandboxLimits | None = None, files: Files | None = None):
        self.sandbox, self.limits = sandbox, limits or SandboxLimits()
        self.workspace: bytes | None = None
        self._files: dict[str, str | bytes] = dict(files or {})
        self._ended = False
        self._id = f"{sandbox.name}-{os.getpid()}-{next(_numbers)}"

    @property
    def sandbox_id(self) -> str:
        return self._id

    async def run(
        self,
        command: Command,
        stdin: str | bytes = b"",
        limits: SandboxLimits | None = None,
        files: Files | None = None,
    ) -> SandboxResult:
        """Run a command. If it reaches a limit, the folder is unchanged.

        Raises SandboxTerminatedError after `cleanup`.
        """
        result = await self.try_out(command, stdin, limits, files, keep=True)
        if result.workspace is not None:
            self.workspace, self._files = result.workspace, {}
        return result

    async def try_out(
        self,
        command: Command,
        stdin: str | bytes = b"",
        limits: SandboxLimits | None = None,
        files: Files | None = None,
        keep: bool = False,
    ) -> SandboxResult:
        """Run a command, with more files, on a copy of the folder; the folder is unchanged."""
        if self._ended:
            raise SandboxTerminatedError(f"{self._id} has been removed; make a new one")
        given = {**self._files, **(files or {})}
        return await self.sandbox.run(given, command, stdin, limits or self.limits, workspace=self.workspace, keep=keep)

    async def send_heartbeat(self, timeout: int = 30) -> None:
        if self._ended:
            raise SandboxTerminatedError(f"{self._id} has been removed; make a new one")

    async def run_command(
        self, command: str, workdir: str | None = None, timeout: int = 60, max_output_bytes: int | None = None
    ) -> SandboxResult:
        line = command if workdir is None else f"cd {shlex.quote(workdir)} || exit 1\n{command}"
        return await self.run(line, limits=self._timed(timeout, max_output_bytes))

    async def read_file(self, path: str, max_bytes: int | None = None, timeout: int = 60) -> SandboxResult:
        reader = "cat" if max_bytes is None else f"head -c {max_bytes}"
        return await self.try_out(f"{reader} -- {shlex.quote(path)}", limits=self._timed(timeout, max_bytes))

    async def write_file(
        self, path: str, content: str | bytes, executable: bool = False, timeout: int = 60
    ) -> SandboxResult:
        where = shlex.quote(path)
        line = f'mkdir -p -- "$(dirname -- {where})" && cat > {where}' + (f" && chmod +x {where}" if executable else "")
        return await self.run(line, content, self._timed(timeout, None))

    async def cleanup(self) -> None:
        self._ended, self.workspace, self._files = True, None, {}

    def _timed(self, timeout: float, output_bytes: int | None) -> SandboxLimits:
        limits = chz.replace(self.limits, wall_s=float(timeout), cpu_s=max(self.limits.cpu_s, float(timeout)))
        return limits if output_bytes is None else chz.replace(limits, output_kb=max(1, -(-output_bytes // 1024)))


def shown_result(result: SandboxResult, limits: SandboxLimits) -> str:
    """The text that a model sees for the result of `SandboxSession.run`."""
    text = result.stdout + result.stderr
    if len(text) > MAX_SHOWN:
        half = MAX_SHOWN // 2
        text = f"{text[:half]}\n[{len(text) - MAX_SHOWN} characters]\n{text[-half:]}"
    if result.limit is None or result.workspace is not None:
        return f"{text.rstrip()}\n[exit code {result.exit_code}]".lstrip()
    reached = f"{result.limit}={getattr(limits, result.limit)}"
    return f"{text.rstrip()}\n[killed: {reached}; the folder is as it was before]".lstrip()
