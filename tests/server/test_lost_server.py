"""A server that dies in mid-run: it is named, the run ends, and with the server back it goes on where it was."""

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.child import ROOT, python_path
from tests.server.serving import KEY, TINY_CHAT, Serving, Wire
from tests.waiting import HANG_SECONDS, until
from tinker_cookbook.utils.files import read_jsonl

pytestmark = pytest.mark.server

LIMIT_SECONDS = 30.0


class Run:
    """A recipe in a process of its own, and what it says."""

    def __init__(self, folder: Path, url: str, *keys: str, limit: float = LIMIT_SECONDS):
        command = [
            sys.executable,
            "-m",
            "recipes.sl_basic",
            f"log_path={folder}",
            f"model_name={TINY_CHAT}",
            "lora_rank=4",
        ]
        command += ["backend=tinker", f"base_url={url}", "save_every=1", "eval_every=0", *keys]
        command += [f"server_timeout_seconds={limit}", "behavior_if_log_dir_exists=resume"]
        env = {
            **os.environ,
            "PYTHONPATH": python_path(),
            "OMP_NUM_THREADS": "1",
            "TINKER_API_KEY": KEY,
            "COLUMNS": "500",
        }
        env["TINKER_LOCAL_HOME"] = str(folder / "unused")
        self._child = subprocess.Popen(
            command, env=env, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._child.stdout is not None
        for line in self._child.stdout:
            self.lines.append(line)

    @property
    def text(self) -> str:
        return "".join(self.lines)

    def wait(
        self,
    ) -> int:
        code = self._child.wait(HANG_SECONDS)
        self._reader.join(HANG_SECONDS)
        return code


def wait_for(condition: Callable[[], bool], run: Run) -> None:
    until(lambda: condition() or run._child.poll() is not None, lambda: run.text)
    assert condition(), run.text


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def test_a_run_survives_the_death_of_its_server(tmp_path: Path) -> None:
    pytest.importorskip("fastapi", reason="the extra `server` is not installed")
    folder, home, port = tmp_path / "run", tmp_path / "home", free_port()
    saved = folder / "checkpoints.jsonl"
    serving = Serving(home, port=port).start()
    run = Run(folder, serving.url, "max_steps=500")
    wait_for(lambda: saved.exists() and saved.read_text().count("\n") >= 3, run)
    assert serving.stop(signal.SIGKILL) == -signal.SIGKILL
    assert run.wait() != 0
    before, given_up, _ = run.text.partition(
        f"base_url={serving.url} has not answered for server_timeout_seconds={LIMIT_SECONDS:g}"
    )
    assert given_up and "does not answer" in before, run.text
    assert "Traceback" not in run.text, run.text

    steps = [row["step"] for row in read_jsonl(folder / "metrics.jsonl", tolerate_torn_tail=True)]
    with Serving(home, port=port) as again:
        wire = Wire(again.url)
        for record in read_jsonl(saved, tolerate_torn_tail=True):
            assert wire.post("/weights_info", tinker_path=record["state_path"])[0] == 200
        resumed = Run(folder, again.url, f"max_steps={max(steps) + 2}")
        assert resumed.wait() == 0, resumed.text
    assert "resuming from tinker://" in resumed.text
    rows = read_jsonl(folder / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(max(steps) + 2)), resumed.text


def test_a_server_that_comes_back_without_the_runs_session(tmp_path: Path) -> None:
    """It is started again before the run gives up: the run says in a few lines what is lost and how it goes on."""
    pytest.importorskip("fastapi", reason="the extra `server` is not installed")
    folder, home, port = tmp_path / "run", tmp_path / "home", free_port()
    saved = folder / "checkpoints.jsonl"
    serving = Serving(home, port=port).start()
    run = Run(folder, serving.url, "max_steps=500", limit=600.0)
    wait_for(lambda: saved.exists() and saved.read_text().count("\n") >= 1, run)
    assert serving.stop(signal.SIGKILL) == -signal.SIGKILL
    with Serving(home, port=port):
        assert run.wait() == 1
    assert "the server was restarted" in run.text and "behavior_if_log_dir_exists=resume" in run.text, run.text
    assert "Traceback" not in run.text and "non-retryable" not in run.text, run.text
    # What the watch says last: the run may end before it asks again, and says that the server answers.
    later = run.text[run.text.rindex("Requests are retried") :].splitlines()
    assert len(later) < 12, later
