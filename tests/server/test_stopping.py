"""How a server ends by a signal to all of its processes, as supervisors and terminals send it."""

import os
import re
import signal
from pathlib import Path

import httpx
import pytest

from tests.child import python_path
from tests.server.serving import Serving, Wire
from tests.waiting import HANG_SECONDS

pytest.importorskip("fastapi", reason="the extra `server` is not installed")
pytestmark = pytest.mark.server


def get(url: str) -> httpx.Response:
    return httpx.get(url, timeout=HANG_SECONDS)


def until_stopping(serving: Serving) -> None:
    """Return once the signal has arrived."""
    while get(f"{serving.url}/ready").status_code == 200:
        pass


def test_a_signal_to_all_processes_lets_what_runs_end(tmp_path: Path) -> None:
    with Serving(tmp_path / "home", own_group=True, shutdown_seconds=3600.0) as serving:
        wire = Wire(serving.url)
        _, running = wire.sample(wire.sampler(wire.session()), max_tokens=600)
        os.killpg(serving.process.pid, signal.SIGTERM)
        until_stopping(serving)
        answer = get(f"{serving.url}/health")
        assert (answer.status_code, answer.json()) == (503, {"status": "stopping"})
        assert isinstance(wire.result(running), bytes)
        assert serving.process.wait(HANG_SECONDS) == 0
    assert "Traceback" not in "".join(serving.lines)


def test_what_had_ended_before_the_signal_can_be_fetched_after_it(tmp_path: Path) -> None:
    with Serving(tmp_path / "home", own_group=True, fetch_seconds=3600.0) as serving:
        wire = Wire(serving.url)
        accepted = [wire.sample(wire.sampler(wire.session()))[1] for _ in range(2)]
        ended = r'tinker_operations_total\{kind="sample",outcome="ok"\} 2\.0'
        while not re.search(ended, get(f"{serving.url}/metrics").text):
            pass
        os.killpg(serving.process.pid, signal.SIGTERM)
        until_stopping(serving)
        assert all(isinstance(wire.result(request), bytes) for request in accepted)
        assert serving.process.wait(HANG_SECONDS) == 0  # at once: nothing is left to be fetched


def test_what_does_not_end_in_time_leaves_no_traceback(tmp_path: Path) -> None:
    with Serving(tmp_path / "home", own_group=True, shutdown_seconds=0.0, fetch_seconds=0.0) as serving:
        wire = Wire(serving.url)
        wire.optim_step(wire.model(wire.session()), 5)  # number 1 never comes
        os.killpg(serving.process.pid, signal.SIGTERM)
        assert serving.process.wait(HANG_SECONDS) == 0
    said = "".join(serving.lines)
    assert "Traceback" not in said and "never retrieved" not in said, said


def test_a_server_that_loads_says_so_and_stops_at_once(tmp_path: Path) -> None:
    """The engine's process waits before its first line, for a writer who never comes."""
    os.mkfifo(tmp_path / "fifo")
    wait = "import sys\nif 'tinker_local_backend.server.engine_process' in sys.orig_argv: open({!r})\n"
    (tmp_path / "sitecustomize.py").write_text(wait.format(str(tmp_path / "fifo")))
    path = os.pathsep.join([str(tmp_path), python_path()])
    serving = Serving(tmp_path / "home", {"PYTHONPATH": path}, own_group=True)
    serving.begin()
    try:
        assert serving.listening.wait(HANG_SECONDS), "".join(serving.lines)
        health, ready = get(f"{serving.url}/health"), get(f"{serving.url}/ready")
        assert (health.status_code, ready.status_code, health.json()) == (200, 503, {"status": "loading"})
        assert Wire(serving.url).post("/create_session")[0] == 503
        os.killpg(serving.process.pid, signal.SIGTERM)
        assert serving.process.wait(HANG_SECONDS) == 0
    finally:
        if serving.process.poll() is None:
            os.killpg(serving.process.pid, signal.SIGKILL)
    assert "Traceback" not in "".join(serving.lines)
