"""A server in a process of its own, as a user starts it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from tests.child import python_path

TINY_CHAT = str(Path(__file__).resolve().parents[2] / "example_data" / "tiny_chat")
KEY = "tml-for-tests"


class Serving:
    """`python -m tinker_local_backend.server` on a free port. Use `with`, or `start` and `stop`."""

    def __init__(self, home: Path, environment: Mapping[str, str] | None = None, **keys: Any):
        keys = {"model": TINY_CHAT, "port": 0, "home": home, **keys}
        self._command = [sys.executable, "-m", "tinker_local_backend.server"]
        self._command += [f"{key}={value}" for key, value in keys.items() if value is not None]
        self._environment = {**os.environ, "PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1", **(environment or {})}
        self.lines: list[str] = []
        self.url = ""

    def start(self) -> Self:
        self.process = subprocess.Popen(
            self._command, env=self._environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        ready = threading.Event()
        threading.Thread(target=self._read, args=(ready,), daemon=True).start()
        assert ready.wait(120) and self.url, "".join(self.lines)
        return self

    def _read(self, ready: threading.Event) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if found := re.search(r"TINKER_BASE_URL=(\S+)", line):
                self.url = found[1]
            if "TINKER_API_KEY" in line:
                ready.set()
        ready.set()

    def stop(self, sign: signal.Signals = signal.SIGTERM) -> int:
        """The exit code."""
        if self.process.poll() is None:
            self.process.send_signal(sign)
        return self.process.wait(60)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *exception: object) -> None:
        self.stop()
