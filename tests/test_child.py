"""What a forked process does is what `python -m` does: words, environment, folder, streams and exit code are its own."""

import subprocess
import sys
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from tests.child import run_forked
from tests.waiting import until

PROGRAM = """\
import os, sys
if __name__ == "__main__":
    print(sys.argv[1:], os.environ.get("GIVEN"), os.environ.get("HOME"), os.getcwd(), input(), __spec__.name)
    print("said", file=sys.stderr)
    sys.exit(int(sys.argv[1]))
"""
HANGS = "import threading, pathlib; print('here', flush=True); pathlib.Path('here').touch(); threading.Event().wait()"
LOADED = "import sys; print({'torch', 'transformers', 'tinker_local_backend'} <= set(sys.modules))"


def test_it_is_what_a_process_of_its_own_is(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    words, env = ["-m", "program", "3", "key=value"], {"GIVEN": "yes"}
    forked = run_forked(words, env=env, cwd=tmp_path, typed="typed\n")
    real = subprocess.run(
        [sys.executable, *words], env=env, cwd=tmp_path, input="typed\n", capture_output=True, text=True
    )
    assert (forked.stdout, forked.stderr, forked.returncode) == (real.stdout, real.stderr, real.returncode)
    assert forked.stdout == f"['3', 'key=value'] yes None {tmp_path} typed program\n" and forked.returncode == 3


def test_it_has_the_libraries_from_the_start_and_ends_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "loaded.py").write_text(LOADED)
    assert run_forked(["-m", "loaded"], env={}, cwd=tmp_path).stdout == "True\n"
    (tmp_path / "fails.py").write_text("raise ValueError('mine')")
    failed = run_forked(["-m", "fails"], env={}, cwd=tmp_path)
    assert failed.returncode == 1 and failed.stderr.endswith("ValueError: mine\n")
    (tmp_path / "hangs.py").write_text(HANGS)
    join = BaseProcess.join

    def up_once_it_is_here(process: BaseProcess, timeout: float | None = None) -> None:
        until((tmp_path / "here").exists) if timeout == 7.0 else join(process, timeout)

    monkeypatch.setattr(BaseProcess, "join", up_once_it_is_here)
    with pytest.raises(subprocess.TimeoutExpired) as raised:
        run_forked(["-m", "hangs"], env={}, cwd=tmp_path, timeout=7.0)
    assert raised.value.output == "here\n"
