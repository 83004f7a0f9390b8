"""Runs in docker and podman, against a stand-in for the program: it records its arguments and runs the script itself."""

import json
import os
import sys
from pathlib import Path

import pytest

from tests.sandbox.running import LIMITS, running
from tinker_cookbook.exceptions import ConfigurationError, SandboxError
from tinker_cookbook.sandbox import get_sandbox
from tinker_cookbook.sandbox.containers import IMAGE

STAND_IN = """#!{python}
import json, os, subprocess, sys
words = sys.argv[1:]
with open({folder!r} + "/calls", "a") as calls:
    calls.write(json.dumps(words) + "\\n")
if words[0] in os.environ.get("FAILS", "").split():
    sys.exit("it fails")
if words[0] == "inspect":
    print(open({folder!r} + "/oom").read())
if words[0] == "run":
    at = words.index("sh", words.index("--entrypoint"))
    script = words[at:]
    script[script.index("/tmp")] = {folder!r} + "/root"
    script[script.index("sandbox") + 4] = "0"  # it has no namespace of its own here
    sys.exit(subprocess.run(script, start_new_session=False).returncode)
"""


@pytest.fixture(params=["docker", "podman"])
def program(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "oom").write_text("false")
    file = tmp_path / "bin" / request.param
    file.parent.mkdir()
    file.write_text(STAND_IN.format(python=sys.executable, folder=str(tmp_path)))
    file.chmod(0o755)
    monkeypatch.setenv("PATH", f"{file.parent}:{os.environ['PATH']}")
    return request.param


def calls(tmp_path: Path) -> list[list[str]]:
    return [json.loads(line) for line in (tmp_path / "calls").read_text().splitlines()]


def options(words: list[str]) -> dict[str, list[str]]:
    """Option -> its values, of those before the image."""
    words = words[1 : words.index(IMAGE)]
    found: dict[str, list[str]] = {}
    for word, after in zip(words, [*words[1:], ""], strict=True):
        if word.startswith("--"):
            found.setdefault(word, []).append("" if after.startswith("--") else after)
    return found


def test_a_run_and_its_arguments(program: str, tmp_path: Path) -> None:
    result = running(get_sandbox(program))("cat x -; exit 3", {"x": "1"}, "2")
    assert (result.stdout, result.exit_code, result.limit) == ("12", 3, None)
    start, *after = calls(tmp_path)
    given = options(start)
    assert start[0] == "run"
    assert given["--network"] == ["none"] and given["--read-only"] == [""] and given["--cap-drop"] == ["ALL"]
    assert given["--user"] == ["65534:65534"] and given["--security-opt"] == ["no-new-privileges"]
    assert given["--memory"] == given["--memory-swap"] == ["128m"]
    assert given["--pids-limit"] == ["34"] and "cpu=61:62" in given["--ulimit"]
    assert given["--tmpfs"][0].startswith("/tmp:rw,exec,nosuid,nodev,mode=1777,size=")
    assert given["--pull"] == ["never"] and given["--entrypoint"] == [""]
    assert not {"--privileged", "--volume", "--mount", "--publish", "--rm"} & given.keys()
    name = given["--name"][0]
    assert ["rm", "--force", name] in after and after[-1] == ["rm", "--force", name]


def test_it_is_removed_when_it_is_killed(program: str, tmp_path: Path) -> None:
    from tinker_cookbook.sandbox import SandboxLimits

    result = running(get_sandbox(program))("sleep 1000", limits=SandboxLimits(wall_s=1.5))
    assert result.limit == "wall_s" and result.exit_code == 137
    name = options(calls(tmp_path)[0])["--name"][0]
    assert calls(tmp_path)[-1] == ["rm", "--force", name]


def test_names_differ(program: str, tmp_path: Path) -> None:
    run = running(get_sandbox(program, image=IMAGE))
    run("true")
    run("true")
    names = [options(words)["--name"][0] for words in calls(tmp_path) if words[0] == "run"]
    assert len(set(names)) == 2


def test_memory_that_ran_out_there(program: str, tmp_path: Path) -> None:
    (tmp_path / "oom").write_text("true")
    assert running(get_sandbox(program))("kill -9 $$").limit == "memory_mb"


def test_the_folder_lasts(program: str) -> None:
    run = running(get_sandbox(program))
    kept = run("echo 1 > new", keep=True)
    assert run("cat new", workspace=kept.workspace).stdout == "1\n"


def test_what_is_missing(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sandbox = get_sandbox(program)
    sandbox.check()
    monkeypatch.setenv("FAILS", "image")
    with pytest.raises(ConfigurationError, match=f"has no image {IMAGE}: {program} pull {IMAGE}"):
        sandbox.check()
    monkeypatch.setenv("FAILS", "version")
    with pytest.raises(ConfigurationError, match=rf"sandbox={program} does not work \(it fails\)"):
        sandbox.check()
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigurationError, match="is not installed; install it"):
        sandbox.check()


def test_a_start_that_fails_is_no_result(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tinker_cookbook.sandbox.packing.SCRIPT", "echo no such image >&2; exit 125")
    with pytest.raises(SandboxError, match=f"sandbox={program} did not start the program .*no such image"):
        running(get_sandbox(program))("true", limits=LIMITS)
