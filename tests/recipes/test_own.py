"""Own parts reach the recipes from a folder outside of the repository: the commands of docs/plugins.md, with small keys.

The page as it stands is read by tests/test_pages.py.
"""

import importlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from recipes import single_turn
from tests.pages import ROOT, blocks, commands, own_modules
from tinker_cookbook import cli_utils
from tinker_cookbook.cli_utils import run_recipe
from tinker_cookbook.runs.evaluation import SamplingClientEvaluator
from tinker_cookbook.utils.files import read_jsonl

BLOCKS = blocks(ROOT / "docs" / "plugins.md")
PARTS = next(block for block in BLOCKS if block.file == "my_parts.py")
COMMANDS = [words[2:] for block in BLOCKS if block.language == "bash" for words in commands(block)]
SMALL = [
    "num_rollouts=8",
    "num_groups=2",
    "max_steps=1",
    "num_test=2",
    "max_tokens=16",
    "seed=1",
    "learning_rate=1e-4",
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the reader is: with the file of the page."""
    (tmp_path / "my_parts.py").write_text(PARTS.text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("TINKER_LOCAL_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("TINKER_BACKEND", raising=False)
    with own_modules(tmp_path):
        yield tmp_path


def run(name: str, *keys: str) -> None:
    module = importlib.import_module(name)
    last = dict(key.split("=", 1) for key in keys)  # a key is given once
    run_recipe(module.CLIConfig, module.main, argv=[*(f"{k}={v}" for k, v in last.items()), "log_path=run"])


def test_the_page_has_commands() -> None:
    assert len(COMMANDS) == 4


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(
            command, marks=pytest.mark.slow if "recipes.debate_rs_grpo" in command else (), id=" ".join(command)
        )
        for command in COMMANDS
    ],
)
def test_a_command_of_the_page(command: list[str], folder: Path) -> None:
    name, *keys = command
    rejection = ["debate_train=rejection"] if "judge" in keys[0] else ["advantage.baseline=constant"]
    run(name, *keys, *rejection, *SMALL, "temperature=1" if "loss" in keys[0] else "temperature=1.5")
    row = next(row for row in read_jsonl(folder / "run" / "metrics.jsonl") if "optim/grad_norm" in row)
    config = json.loads((folder / "run" / "config.json").read_text())
    given = " ".join(keys)
    if "score" in given:
        assert {"env/all/reward/score", "env/all/reward/length_penalty"} <= row.keys()
        assert row["env/all/reward/score/characters"] > 1
        assert config["dataset_builder"]["env"]["reward_fn"] == "my_parts.py:score:2,length_penalty:0.5"
    if "Successors" in given:
        assert config["dataset_builder"]["env"]["task"] == "my_parts.py:Successors"
    if "judge" in given:
        assert row["env/all/debate/won"] > 0
    if "loss" in given:
        assert config["loss_fn"] == "my_parts.py:loss" and row["optim/lr"] == pytest.approx(0.5e-4)


def test_evaluators_of_a_file(folder: Path) -> None:
    page = blocks(ROOT / "docs" / "evaluation.md")
    (folder / "my_evals.py").write_text(next(block.text for block in page if block.file == "my_evals.py"))
    keys = [
        "evaluator_builders=my_evals.py:Greeting,my_evals:Greeting",
        "infrequent_evaluator_builders=my_evals.py:Greeting",
    ]
    cli = cli_utils.parse(single_turn.CLIConfig, keys)
    assert {build.__name__ for build in (*cli.evaluator_builders, *cli.infrequent_evaluator_builders)} == {"Greeting"}
    assert [len(cli.evaluator_builders), len(cli.infrequent_evaluator_builders)] == [2, 1]
    assert isinstance(cli.evaluator_builders[0](), SamplingClientEvaluator)


@pytest.mark.parametrize(
    ("recipe", "key", "wanted"),
    [
        ("single_turn", "reward_fn=my_parts.py:rows", "def score(question: str, reply: str, answer: str) -> float"),
        ("single_turn", "task=my_parts.py:score", "a subclass of tinker_cookbook.env.task.Task"),
        ("single_turn", "dataset=my_parts.py:score", "def rows() -> list[dict]"),
        ("debate_rs_grpo", "judge=my_parts.py:rows", "def judge(view: DebateView) -> Winner"),
        ("single_turn", "task=qaa", "package.module:object or path/file.py:object"),
        ("single_turn", "evaluator_builders=my_parts.py:score", "a class, or a function without arguments, that makes"),
        ("single_turn", "evaluator_builders=nonesuch", "package.module:object or path/file.py:object"),
    ],
)
def test_a_wrong_one_is_named_before_a_model_loads(
    folder: Path, capsys: pytest.CaptureFixture[str], recipe: str, key: str, wanted: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        run(f"recipes.{recipe}", key, *SMALL)
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert wanted in told and "Traceback" not in told
    assert not (folder / "run").exists()
