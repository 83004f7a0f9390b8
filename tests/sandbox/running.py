"""What tests of sandboxes share."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.sandbox import Sandbox, SandboxLimits, SandboxResult, get_sandbox

LIMITS = SandboxLimits(wall_s=60.0, cpu_s=60.0, memory_mb=128, processes=32, output_kb=16, disk_mb=8)
"""Small ones, with time enough for a machine that is busy."""

Run = Callable[..., SandboxResult]


def usable(name: str = "bubblewrap") -> Sandbox:
    """The sandbox, or the reason why the test is skipped here."""
    sandbox = get_sandbox(name)
    try:
        sandbox.check()
    except ConfigurationError as error:
        pytest.skip(str(error))
    return sandbox


def running(sandbox: Sandbox) -> Run:
    """Runs a command in it, to its end: `run(command, files={}, limits=LIMITS, **more)`."""

    def run(
        command: Any, files: Any = None, stdin: Any = b"", limits: SandboxLimits = LIMITS, **more: Any
    ) -> SandboxResult:
        return asyncio.run(sandbox.run(files or {}, command, stdin, limits, **more))

    return run
