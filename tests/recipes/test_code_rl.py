"""recipes.code_rl from its keys, and the training loop with grades that stand in for programs that run."""

import asyncio
from pathlib import Path

import chz
import pytest

from recipes import code_rl
from tests.sandbox.running import usable
from tinker_cookbook import cli_utils
from tinker_cookbook.data.shipped import EXAMPLE_DATA
from tinker_cookbook.env.shipped.code import code_env
from tinker_cookbook.env.shipped.code.code_env import CodeProblems
from tinker_cookbook.env.shipped.code.grading import Grade, Outcome
from tinker_cookbook.env.shipped.code.problems import CodeProblem
from tinker_cookbook.exceptions import ConfigurationError, DataFormatError
from tinker_cookbook.utils.files import read_jsonl

PROBLEMS = EXAMPLE_DATA / "code" / "train.jsonl"


def parsed(*argv: str) -> code_rl.CLIConfig:
    return cli_utils.parse(code_rl.CLIConfig, argv)


def test_keys() -> None:
    cli = parsed(
        "sandbox=docker", "dataset=deepcoder", "env.shown_tests=0", "env.memory_mb=256", "env.columns.question=task"
    )
    env = cli.env
    assert (env.sandbox, env.dataset, env.shown_tests, env.columns.question) == ("docker", "deepcoder", 0, "task")
    assert (env.limits.memory_mb, env.limits.wall_s) == (256, 4.0)
    assert parsed("sandbox_backend=sandboxfusion").env.sandbox == "sandboxfusion"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["sandbox=bublewrap"], "sandbox='bublewrap' is unknown"),
        (["sandbox=None"], "sandbox is not given.*without isolation only with sandbox=unsafe_subprocess"),
        (["sandbox=sandbox_fusion", "env.sandbox_url=http://127.0.0.1:1/run_code"], "does not answer"),
        (["sandbox=unsafe_subprocess", "env.sandbox_image=x"], "sandbox=unsafe_subprocess takes none"),
        (["sandbox=unsafe_subprocess", "dataset=problem"], "dataset='problem' is unknown"),
        (["sandbox=unsafe_subprocess", "groups_per_batch=60"], "groups_per_batch=60, but the dataset has 48 problems"),
        (["sandbox=unsafe_subprocess", f"dataset={PROBLEMS}", "env.columns.question=x"], "has no 'x'"),
    ],
)
def test_mistakes_are_found_before_a_model_is_loaded(
    keys: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_DEBATE_LOG_ROOT", str(tmp_path))
    with pytest.raises((ConfigurationError, DataFormatError), match=message):
        code_rl.build_config(parsed(*keys))
    assert list(tmp_path.iterdir()) == []


async def graded_by_length(problem: CodeProblem, code: str, *more: object) -> Grade:
    """A program that is read and not run: the shorter it is, the more tests it passes."""
    passed = max(0, len(problem.tests) - len(code) // 8)
    return Grade(tuple(Outcome("passed" if i < passed else "wrong") for i in range(len(problem.tests))))


def test_it_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_env, "grade", graded_by_length)
    monkeypatch.setattr(code_env, "last_code_block", lambda text: text)
    keys = [
        "groups_per_batch=2",
        "group_size=4",
        "max_steps=2",
        "eval_every=2",
        "num_test=2",
        "max_tokens=24",
        "lora_rank=4",
    ]
    cli = parsed(f"log_path={tmp_path / 'run'}", "sandbox=unsafe_subprocess", *keys)
    asyncio.run(code_rl.main(cli))
    rows = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    trained = [row for row in rows if "env/all/tests_passed" in row]
    assert len(trained) >= 2 and all(0 <= row["env/all/tests_passed"] <= 1 for row in trained)
    assert any("test/env/all/correct" in row for row in rows)
    config = (tmp_path / "run" / "config.json").read_text()
    assert '"sandbox": "unsafe_subprocess"' in config


def test_the_default_is_a_sandbox() -> None:
    assert CodeProblems().sandbox == "bubblewrap"
    usable()
    assert chz.replace(CodeProblems(), wall_s=1.0).get_sandbox().name == "bubblewrap"
