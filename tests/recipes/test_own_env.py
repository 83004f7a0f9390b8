"""docs/environments.md as it stands, from a folder outside of the repository, with small keys."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from recipes import rl
from tests.child import run_forked
from tests.waiting import HANG_SECONDS
from tinker_cookbook.cli_utils import run_recipe
from tinker_cookbook.utils.files import read_jsonl
from tinker_local_backend.engine.model.base_model import BaseModel

ROOT = Path(__file__).parents[2]
DOCS = (ROOT / "docs" / "environments.md").read_text()
ENVS, FROM_PYTHON = re.findall(r"```python\n(.*?)```", DOCS, re.DOTALL)
COMMANDS = re.findall(r"^python -m recipes\.rl (.*)$", DOCS, re.MULTILINE)
SMALL = ("groups_per_batch=2", "group_size=4", "max_steps=1", "num_test=2", "max_tokens=12", "seed=1")
UNTRAINED = ("on_zero_advantages=skip",)
"""So few and short replies may all be worth the same."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder that one works in; what is imported from it is forgotten afterwards."""
    (tmp_path / "my_envs.py").write_text(ENVS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TINKER_LOCAL_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    sys.modules.pop("my_envs", None)


def run(folder: Path, keys: str) -> None:
    last = dict(key.split("=", 1) for key in [*keys.split(), *SMALL, *UNTRAINED])  # a key is given once
    argv = [f"{key}={value}" for key, value in last.items()]
    run_recipe(rl.CLIConfig, rl.main, argv=[*argv, f"log_path={folder / 'run'}"])


def first_row(folder: Path) -> dict:
    return next(row for row in read_jsonl(folder / "run" / "metrics.jsonl") if "env/all/reward/total" in row)


def test_the_page_is_short_and_has_commands() -> None:
    assert len(COMMANDS) == 4 and len(DOCS.splitlines()) < 80


@pytest.mark.parametrize(
    "command",
    [pytest.param(command, marks=pytest.mark.slow if "env.highest" in command else ()) for command in COMMANDS],
)
def test_a_command_of_the_page(command: str, folder: Path) -> None:
    run(folder, command)
    row, config = first_row(folder), json.loads((folder / "run" / "config.json").read_text())
    if "sums" in command:
        assert "env/all/reward/reward/right" in row
        assert ("env/all/used_tools" in row) is ("tool" in command)
        assert config["dataset_builder"]["env"]["reward_fn"] == "my_envs.reward"
    if "Guess" in command:
        assert row["env/all/turns_per_episode"] > 1
        assert config["dataset_builder"]["env"]["env_args"] == {"highest": 20}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            "env=my_envs.py:reward",
            "error: env=my_envs.py:reward: reward(question, reply, answer): missing a required argument",
        ),
        ("env=my_envs.py:ROWS", "is neither a class nor a function, but list"),
        ("env=my_envs.py:Gess", "my_envs.py has no Gess"),
        (
            "env=gess",
            "guess_number, twenty_questions, tool_use, code_rl, code_lines, terminal, reverse_text, alphabet_sort, wordle, "
            "package.module:object",
        ),
        (
            "env=my_envs.py:Guess env_args.hihest=3",
            "unexpected keyword argument 'hihest'; it takes env_args.highest",
        ),
        ("env=my_envs.py:Guess env.hihest=3", "error: env.hihest: Guess(rng, highest: int = 9): got an unexpected"),
        (
            "env=my_envs.py:Guess env.hihest=3",
            "unexpected keyword argument 'hihest'; it takes env.highest",
        ),
        ("env=my_envs.py:Guess env.highest=ten", "env.highest='ten': is str, but Guess takes highest: int"),
        ("env=guess_number env.play=True", "env.play: is unknown to guess_number; it takes env.max_turns, env.highest"),
        ("env=guess_number env.highest=1", "Expected env.highest to be greater than 1, got 1"),
        ("env=my_envs.py:Guess env_args.highest=ten", "env_args.highest='ten': is str, but Guess takes highest: int"),
        (
            "env=my_envs.py:sums env_args.a=1",
            "env_args.a: my_envs.py:sums is a finished environment and takes no arguments",
        ),
        (
            "env=guess_number env_args.play=True",
            "env_args.play: is unknown to guess_number; it takes env_args.max_turns, env_args.highest",
        ),
        ("env=guess_number env_args.highest=1", "Expected env_args.highest to be greater than 1, got 1"),
    ],
)
def test_a_wrong_one_is_named_before_a_model_loads(
    folder: Path, keys: str, message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BaseModel, "__init__", None)
    with pytest.raises(SystemExit) as raised:
        run(folder, keys)
    shown = capsys.readouterr().err
    assert raised.value.code == 2 and message in shown
    if "env_args" not in keys and "env." not in keys:
        assert "def step(self, message)" in shown, "the error shows an example"
    assert not (folder / "run").exists()


@pytest.mark.slow
def test_from_python(folder: Path) -> None:
    small = ", ".join(key for key in SMALL if "max_steps" not in key)
    script = FROM_PYTHON.replace("max_steps=2", f"max_steps=1, {small}, log_path={str(folder / 'run')!r}")
    assert script != FROM_PYTHON
    (folder / "mine.py").write_text(script)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "mine.py"], cwd=folder, env=environment, capture_output=True, text=True, timeout=HANG_SECONDS
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert first_row(folder)["env/all/turns_per_episode"] > 1


def test_a_person_can_play(folder: Path) -> None:
    words = ["-m", "recipes.rl", "env=my_envs.py:Guess", "env_args.highest=1", "play=True"]
    done = run_forked(words, env=os.environ, cwd=folder, typed="2\n\n1\n\n")
    assert done.returncode == 0, done.stderr
    assert "No. Which one?" in done.stdout and "total reward 0.99, ended by: completed" in done.stdout
