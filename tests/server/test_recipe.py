"""A recipe runs the same on the server as in process."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.child import python_path
from tests.server.serving import KEY, TINY_CHAT, Serving

pytestmark = pytest.mark.server

SMALL = (
    "max_steps=1",
    "lora_rank=4",
    "on_zero_advantages=skip",
    "num_rollouts=16",
    "num_groups=2",
    "max_eval_items=4",
    "seed=3",
)


def run(folder: Path, **environment: str) -> list[dict[str, Any]]:
    """The transcripts of the first step, without what a clock says."""
    command = [sys.executable, "-m", "recipes.debate_rs_grpo", f"model_name={TINY_CHAT}", f"log_path={folder}", *SMALL]
    command.append("backend=tinker" if environment else "backend=local")
    env = {**os.environ, "PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(file.read_text()) for file in sorted(folder.glob("iteration_000000/debate_*.json"))]


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
