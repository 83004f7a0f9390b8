"""A recipe runs the same on the server as in process."""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.child import ROOT, python_path
from tests.server.serving import KEY, TINY_CHAT, Serving
from tests.waiting import HANG_SECONDS

pytestmark = pytest.mark.server

SMALL = (
    "max_steps=1",
    "lora_rank=4",
    "on_zero_advantages=skip",
    "num_rollouts=16",
    "num_groups=2",
    "num_test=4",
    "seed=3",
)


def run(folder: Path, **environment: str) -> list[dict[str, Any]]:
    """The transcripts of the first step."""
    backend = "backend=tinker" if environment else "backend=local"
    return run_command(["-m", "recipes.debate_rs_grpo", f"model_name={TINY_CHAT}", backend], folder, environment)


def run_command(words: Sequence[str], folder: Path, environment: Mapping[str, str]) -> list[dict[str, Any]]:
    command = [sys.executable, *words, f"log_path={folder}", *SMALL]
    env = {**os.environ, "PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=HANG_SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(file.read_text()) for file in sorted(folder.glob("debate_*.json"))]


def assert_alike(found: Any, expected: Any, where: str = "") -> None:
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key in expected.keys() - {"timestamp", "judge_time_s"}:
            assert_alike(found[key], expected[key], f"{where}.{key}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), where
        for i, (left, right) in enumerate(zip(found, expected, strict=True)):
            assert_alike(left, right, f"{where}[{i}]")
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, abs=1e-5), where
    else:
        assert found == expected, where


def test_debates_over_the_server_are_those_in_process(tmp_path: Path) -> None:
    pytest.importorskip("fastapi", reason="the extra `server` is not installed")
    with Serving(tmp_path / "home") as serving:
        over_the_server = run(tmp_path / "server", TINKER_BASE_URL=serving.url, TINKER_API_KEY=KEY)
    in_process = run(tmp_path / "local")
    assert len(in_process) == 8
    turns = [turn for record in in_process for turn in record["agent_a"]["transitions"]]
    assert all(len(turn["completion_tokens"]) == len(turn["completion_logprobs"]) > 0 for turn in turns)
    assert_alike(over_the_server, in_process)  # ids are the same, logprobs to 1e-5


def test_the_commands_of_the_page_for_two_machines(tmp_path: Path) -> None:
    """As docs/server.md has them, in two processes, but for the model, the port and the size of the run."""
    pytest.importorskip("fastapi", reason="the extra `server` is not installed")
    page = (ROOT / "docs" / "server.md").read_text()
    lines = [line.strip() for line in page.partition("## Two machines")[2].splitlines() if line.startswith("    ")]
    server, *exports, recipe = (shlex.split(line.replace("Qwen/Qwen3-4B-Instruct-2507", TINY_CHAT)) for line in lines)
    variables = dict(word.split("=", 1) for _, word in exports)
    keys = dict(word.split("=", 1) for word in server[3:])
    assert server[:3] == ["python", "-m", "tinker_local_backend.server"] and keys["api_keys_file"] == "keys.txt"
    assert recipe[:2] == ["python", "-m"] and "backend=tinker" in recipe
    (tmp_path / "keys.txt").write_text(f"alice={variables['TINKER_API_KEY']}\n")
    (tmp_path / "keys.txt").chmod(0o600)
    with Serving(tmp_path / "home", **{**keys, "api_keys_file": tmp_path / "keys.txt"}) as serving:
        port = serving.url.rpartition(":")[2]
        variables["TINKER_BASE_URL"] = variables["TINKER_BASE_URL"].replace("gpu-machine:8000", f"127.0.0.1:{port}")
        assert len(run_command(recipe[1:], tmp_path / "run", variables)) == 8
