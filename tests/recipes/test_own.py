"""Own parts reach the recipes from the command line, in a folder outside of the repository, as the docs say."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tinker_cookbook.data.shipped import EXAMPLE_DATA
from tinker_cookbook.utils.files import read_jsonl

ROOT = Path(__file__).parents[2]
PARTS = """
    from tinker_cookbook.tasks.qa import QATask


    def rows():
        numbers = [{"question": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(12)]
        return numbers[:10], numbers[10:]


    async def score(question, reply, answer):
        return float(answer in reply) + 0.01 * (sum(map(ord, reply)) % 97), {"characters": len(reply)}


    class Successors(QATask):
        name = "successors"
        system_prompt = "Add one. Put the answer between <SOLUTION> and </SOLUTION>."


    def judge(view):
        a, b = len(" ".join(view.rounds_a)), len(" ".join(view.rounds_b))
        return "TIE" if a == b else "A" if a < b else "B"
"""
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
    (tmp_path / "my_parts.py").write_text(textwrap.dedent(PARTS))
    return tmp_path


def step_row(folder: Path) -> dict:
    """The row of the one training step."""
    return next(row for row in read_jsonl(folder / "run" / "metrics.jsonl") if "optim/grad_norm" in row)


def run(folder: Path, recipe: str, *keys: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "TINKER_LOCAL_HOME": str(folder / "home"),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", f"recipes.{recipe}", *keys, f"log_path={folder / 'run'}"]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


def test_reward_task_and_dataset(folder: Path) -> None:
    done = run(
        folder,
        "single_turn",
        "task=my_parts.py:Successors",
        "dataset=my_parts.py:rows",
        "reward_fn=my_parts.py:score:2,length_penalty:0.5",
        "num_rollouts=8",
        *SMALL,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    row = step_row(folder)
    assert {"env/all/reward/score", "env/all/reward/score/characters", "env/all/reward/length_penalty"} <= row.keys()
    assert row["env/all/reward/score/characters"] > 1
    config = json.loads((folder / "run" / "config.json").read_text())
    assert config["dataset_builder"]["reward_fn"] == "my_parts.py:score:2,length_penalty:0.5"


def test_judge(folder: Path) -> None:
    done = run(folder, "debate_rs_grpo", "judge=my_parts.py:judge", "debate_train=rejection", "num_rollouts=8", *SMALL)
    assert done.returncode == 0, done.stderr[-3000:]
    row = step_row(folder)
    assert row["env/all/debate/won"] > 0


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


def test_from_python(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same objects as callables in a config."""
    program = f"""
        import asyncio
        from recipes.single_turn import CLIConfig, main
        from tinker_cookbook.tasks.qa import QATask

        def score(question, reply, answer):
            return 0.25 + 0.01 * (sum(map(ord, reply)) % 97)

        def rows():
            return [{{"question": f"What is {{n}} + 1?", "answer": str(n + 1)}} for n in range(4)]

        class Mine(QATask):
            name = "mine"

        if __name__ == "__main__":
            config = CLIConfig(
                model_name={str(EXAMPLE_DATA / "tiny_chat")!r}, task=Mine, dataset=rows, reward_fn=score, num_rollouts=4,
                num_groups=2, max_steps=1, max_tokens=16, temperature=1.5, learning_rate=1e-4, log_path={str(folder / "run")!r},
            )
            asyncio.run(main(config))
    """
    script = folder / "mine.py"
    script.write_text(textwrap.dedent(program))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TINKER_LOCAL_HOME": str(folder / "home")}
    done = subprocess.run(
        [sys.executable, str(script)], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert 0.25 <= step_row(folder)["env/all/reward/score"] < 1.22
