"""Modal, against a stand-in for its package with the calls that its documentation shows; a sandbox is a process here."""

import asyncio
import os
import signal
import subprocess
import sys
import types
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.sandbox.running import running
from tinker_cookbook.exceptions import MissingPackageError, SandboxError
from tinker_cookbook.sandbox import Sandbox, SandboxLimits, get_sandbox


class Both:
    """A function with its form for asyncio as `.aio`."""

    def __init__(self, function: Callable[..., Any]):
        self.aio = function


class StandIn:
    """The package, and what was asked of it."""

    def __init__(self, folder: Path):
        self.folder, self.made, self.terminated = folder, list[dict[str, Any]](), 0
        self.refuses = False
        self.running: list[asyncio.subprocess.Process] = []
        self.module: Any = types.ModuleType("modal")
        self.module.__spec__ = types.SimpleNamespace()
        self.module.App = types.SimpleNamespace(lookup=Both(self.lookup))
        self.module.Image = types.SimpleNamespace(
            debian_slim=lambda: "slim", from_registry=lambda name: f"image {name}"
        )
        self.module.Sandbox = types.SimpleNamespace(create=Both(self.create))

    async def lookup(self, name: str, create_if_missing: bool) -> str:
        return name

    async def create(self, **options: Any) -> Any:
        if self.refuses:
            raise RuntimeError("no token; modal token new")
        self.made.append(options)
        return types.SimpleNamespace(exec=Both(self.exec), terminate=Both(self.terminate))

    async def terminate(self) -> None:
        self.terminated += 1
        for process in self.running:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()

    async def exec(self, *argv: str, text: bool) -> Any:
        assert text is False
        words = [str(self.folder) if word == "/tmp" else word for word in argv]
        process = await asyncio.create_subprocess_exec(
            *words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
        self.running.append(process)
        assert process.stdin and process.stdout and process.stderr
        stdin = types.SimpleNamespace(
            write=process.stdin.write, write_eof=process.stdin.write_eof, drain=Both(process.stdin.drain)
        )
        return types.SimpleNamespace(
            stdin=stdin, stdout=chunks(process.stdout), stderr=chunks(process.stderr), wait=Both(process.wait)
        )


async def chunks(stream: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while chunk := await stream.read(1000):
        yield chunk


@pytest.fixture
def modal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    stand_in = StandIn(tmp_path / "root")
    monkeypatch.setitem(sys.modules, "modal", stand_in.module)
    return stand_in


def checked(image: str | None = None) -> Sandbox:
    sandbox = get_sandbox("modal", image=image)
    sandbox.check()
    return sandbox


def test_a_run(modal: StandIn) -> None:
    result = running(checked())("cat x -; echo oh >&2; exit 5", {"x": "1"}, "2" * 3_000_000)
    assert (result.stdout, result.exit_code, result.limit) == ("1" + "2" * ((16 << 10) - 1), 5, "output_kb")
    assert result.stderr == "oh\n" and result.truncated
    (options,) = modal.made
    assert options["block_network"] is True and options["memory"] == (128, 128)
    assert (options["timeout"], options["image"]) == (120, "slim") and modal.terminated == 1


def test_a_folder_that_lasts(modal: StandIn) -> None:
    run = running(checked("python:3.12"))
    kept = run("echo 1 > new", keep=True)
    assert kept.ok and kept.workspace and run("rm -r *; ls").stdout == ""
    assert run("cat new", workspace=kept.workspace).stdout == "1\n"
    assert modal.made[0]["image"] == "image python:3.12"


def test_time(modal: StandIn) -> None:
    result = running(checked())("sleep 3; true", limits=SandboxLimits(wall_s=0.3))
    assert (result.limit, result.timed_out, result.exit_code) == ("wall_s", True, 137) and modal.terminated == 1


def test_no_sandbox(modal: StandIn) -> None:
    modal.refuses = True
    with pytest.raises(SandboxError, match="no sandbox could be created: no token"):
        running(checked())("true")


def test_the_package_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingPackageError, match="pip install modal && modal token new"):
        checked()
