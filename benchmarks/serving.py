"""Servers of the Tinker protocol as processes: ours, and any other that is started with a port."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from benchmarks.errors import BenchmarkError
from benchmarks.machine import descendants, process_seconds

KEY = "tml-for-benchmarks"
FLOOD_KEY = "tml-for-the-flood"
"""key of another tenant of our server"""
START_SECONDS = 120.0
END_SECONDS = 30.0


class ServerProcess:
    """A server on a free loopback port. Use as a context manager; entering waits until it answers.

    Args:
        command: without the interpreter; `{port}` stands for the port.
        environment: variables added to those of this process.
    """

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str]):
        self._name = name
        self.port = _free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._command = [sys.executable, *(part.format(port=self.port) for part in command)]
        self._environment = {**os.environ, **environment}

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(self._command, env=self._environment, stdout=subprocess.DEVNULL)
        try:
            self._wait_until_it_answers()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _wait_until_it_answers(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise BenchmarkError(f"{self._name} ended with exit code {self._process.returncode}; see above")
            try:
                self._get("/api/v1/get_server_capabilities")
                return
            except OSError:
                time.sleep(0.1)
        raise BenchmarkError(f"{self._name} did not answer at {self.url} within {START_SECONDS:g} s")

    def _get(self, route: str) -> bytes:
        request = urllib.request.Request(self.url + route, headers={"X-API-Key": KEY})
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.read()

    def cpu_seconds(self) -> float:
        """CPU time of all of its processes so far."""
        return sum(process_seconds(pid) for pid in [self._process.pid, *descendants(self._process.pid)])

    def metric(self, name: str) -> float:
        """A number of the server's `/metrics`, labels included in the name. Raises BenchmarkError when it is not there."""
        match = re.search(rf"^{re.escape(name)} (\S+)$", self._get("/metrics").decode(), re.MULTILINE)
        if match is None:
            raise BenchmarkError(f"{self._name} has no metric {name}")
        return float(match[1])


def our_server(model: Path, home: Path, threads: int) -> ServerProcess:
    """`python -m tinker_local_backend.server` with its default limits."""
    command = ["-m", "tinker_local_backend.server", f"model={model}", "port={port}", f"home={home}"]
    keys = f"benchmarks={KEY} operator,flood={FLOOD_KEY}"
    environment = {"OMP_NUM_THREADS": str(threads), "TINKER_LOCAL_API_KEYS": keys}
    return ServerProcess("the server", command, environment)


def stub_server(script: str, model: Path) -> ServerProcess:
    """A program that speaks the protocol and computes nothing: `python SCRIPT PORT`. STUB_MODEL names its model."""
    if not Path(script).expanduser().is_file():
        raise BenchmarkError(f"stub={script!r} is not a file; name a script that is started as `python SCRIPT PORT`")
    return ServerProcess("the stub", [str(Path(script).expanduser()), "{port}"], {"STUB_MODEL": str(model)})


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]
