"""Own parts reach the recipes from a folder outside of the repository: docs/own_parts.md as it stands, with small keys."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tinker_cookbook.utils.files import read_jsonl

ROOT = Path(__file__).parents[2]
DOCS = (ROOT / "docs" / "own_parts.md").read_text()
PARTS, FROM_PYTHON = re.findall(r"```python\n(.*?)```", DOCS, re.DOTALL)
COMMANDS = re.findall(r"^python -m recipes\.(.*)$", DOCS, re.MULTILINE)
SMALL = [
    "num_groups=2",
    "max_steps=1",
    "max_eval_items=2",
    "max_tokens=16",
    "temperature=1.5",
    "seed=1",
    "learning_rate=1e-4",
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "my_parts.py").write_text(PARTS)
    return tmp_path


def step_row(folder: Path) -> dict:
    """The row of the one training step."""
    return next(row for row in read_jsonl(folder / "run" / "metrics.jsonl") if "optim/grad_norm" in row)


def environment(folder: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "TINKER_LOCAL_HOME": str(folder / "home"), "OMP_NUM_THREADS": "1"}


def run(folder: Path, recipe: str, *keys: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", f"recipes.{recipe}", *keys, f"log_path={folder / 'run'}"]
    return subprocess.run(command, cwd=folder, env=environment(folder), capture_output=True, text=True, timeout=300)


def test_the_page_has_commands() -> None:
    assert len(COMMANDS) == 4 and len(DOCS.splitlines()) < 80


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_page(command: str, folder: Path) -> None:
    recipe, *keys = command.split()
    rejection = ["debate_train=rejection"] if recipe == "debate_rs_grpo" else ["advantage.baseline=constant"]
    temperature = "temperature=1" if "loss" in command else "temperature=1.5"
    done = run(folder, recipe, *keys, *rejection, "num_rollouts=8", *SMALL, temperature)
    assert done.returncode == 0, done.stderr[-3000:]
    row, config = step_row(folder), json.loads((folder / "run" / "config.json").read_text())
    if "score" in command:
        assert {"env/all/reward/score", "env/all/reward/length_penalty"} <= row.keys()
        assert row["env/all/reward/score/characters"] > 1
        assert config["dataset_builder"]["reward_fn"] == "my_parts.py:score:2,length_penalty:0.5"
    if "Successors" in command:
        assert config["dataset_builder"]["task"] == "my_parts.py:Successors"
    if "judge" in command:
        assert row["env/all/debate/won"] > 0
    if "loss" in command:
        assert config["loss_fn"] == "my_parts.py:loss" and row["optim/lr"] == pytest.approx(0.5e-4)


@pytest.mark.parametrize(
    ("recipe", "key", "wanted"),
    [
        ("single_turn", "reward_fn=my_parts.py:rows", "def score(question: str, reply: str, answer: str) -> float"),
        ("single_turn", "task=my_parts.py:score", "a subclass of tinker_cookbook.tasks.types.Task"),
        ("single_turn", "dataset=my_parts.py:score", "def rows() -> list[dict]"),
        ("debate_rs_grpo", "judge=my_parts.py:rows", "def judge(view: DebateView) -> Winner"),
        ("single_turn", "task=qaa", "use qa, summary, math, package.module:object or path/file.py:object"),
    ],
)
def test_a_wrong_one_is_named_before_a_model_loads(folder: Path, recipe: str, key: str, wanted: str) -> None:
    done = run(folder, recipe, key, "num_rollouts=8", *SMALL)
    assert done.returncode == 2
    assert wanted in done.stderr and "Traceback" not in done.stderr
    assert not (folder / "run").exists()


def test_from_python(folder: Path) -> None:
    small = f"num_rollouts=4, num_groups=2, max_tokens=16, temperature=1.5, learning_rate=1e-4, log_path={str(folder / 'run')!r}"
    (folder / "mine.py").write_text(FROM_PYTHON.replace("max_steps=5", f"max_steps=1, {small}"))
    done = subprocess.run(
        [sys.executable, "mine.py"], cwd=folder, env=environment(folder), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert step_row(folder)["env/all/reward/score/characters"] > 1
