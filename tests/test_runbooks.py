"""Every command of docs/runbooks.md runs, with small settings; every key that it names is one."""

import importlib
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from recipes import debate_rs_grpo, flags, single_turn
from tests.engine.conftest import TINY_CHAT
from tests.hub_articles import stand_in_for_the_hub
from tinker_cookbook import cli_utils
from tinker_cookbook.cli_help import FLAGS
from tinker_cookbook.cli_utils import run_recipe
from tinker_cookbook.env.qa import QATask
from tinker_cookbook.env.task import Score
from tinker_cookbook.utils.files import read_jsonl
from tinker_local_backend import check_logprobs

ROOT = Path(__file__).parents[1]
SPAN = re.compile(r"`([^`]+)`")
RL = ("max_steps=2", "num_rollouts=16", "num_groups=2", "max_tokens=32", "lora_rank=4", "num_test=2")
SMALL = {
    "recipes.single_turn": (*RL, "on_zero_advantages=skip"),
    "recipes.debate_rs_grpo": (*RL, "on_zero_advantages=skip"),
    "recipes.sl_basic": ("max_steps=2", "lora_rank=4"),
    "recipes.rl_basic": ("max_steps=2", "groups_per_batch=4", "num_test=4", "lora_rank=4", "on_zero_advantages=skip"),
    "tinker_local_backend.check_logprobs": ("max_tokens=4",),
}
ELSEWHERE = {"recipes.validate_gpu": "run by the smoke test of the recipes"}


def cells() -> Iterator[str]:
    """What stands on the right of the debate table; tests/recipes/test_experiment_harness.py has the other."""
    page = (ROOT / "docs" / "runbooks.md").read_text().partition("## Commands of the experiment harness")[0]
    for line in page.splitlines():
        if line.startswith("| ") and not line.startswith("| earlier"):
            yield line.split(" | ", 1)[1]


def commands() -> list[str]:
    spans = [span for cell in cells() for span in SPAN.findall(cell)]
    return [span for span in spans if span.startswith(("python -m recipes.", "python -m tinker_local_backend."))]


def key_spans() -> list[str]:
    """Spans such as `task=qa dataset=test`, which belong to the debate and the single-turn recipe."""
    spans = [span for cell in cells() for span in SPAN.findall(cell)]
    return [span for span in spans if all(re.fullmatch(r"[a-z_.]+=\S*", word) for word in span.split())]


@pytest.fixture(autouse=True)
def a_machine_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the data set of the hub that the table names."""
    monkeypatch.delenv("TINKER_BACKEND", raising=False)
    monkeypatch.setenv("TINKER_LOCAL_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TINKER_DEBATE_LOG_ROOT", str(tmp_path / "logs"))
    stand_in_for_the_hub(monkeypatch)


def filled(argument: str) -> str:
    """With the placeholders of the table filled in."""
    if "=" not in argument:
        return argument
    key, _, value = argument.partition("=")
    names = {"PATH": str(TINY_CHAT), "ID": "tiny_chat", "M": "tiny_chat", "X": "mine"}
    names["F"] = str(ROOT / "example_data" / "conversations.jsonl")
    return f"{key}={names.get(value, value)}"


def with_small(arguments: list[str], small: tuple[str, ...]) -> list[str]:
    """The small settings in place of those that the command gives: a key given twice is refused."""
    keys = {setting.partition("=")[0] for setting in small}
    return [*(argument for argument in arguments if argument.partition("=")[0] not in keys), *small]


@pytest.mark.slow
@pytest.mark.parametrize("command", [command for command in commands() if command.split()[2] not in ELSEWHERE])
def test_it_runs(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, _, name, *arguments = shlex.split(command)
    arguments = [filled(argument) for argument in arguments]
    if any(word in FLAGS for word in arguments):
        _, arguments = flags.recipe_and_keys(["--mode", "debate", *arguments])
    module, arguments = importlib.import_module(name), with_small(arguments, SMALL[name])
    if module is check_logprobs:
        check_logprobs.main(cli_utils.parse(check_logprobs.Config, arguments))
        assert capsys.readouterr().out.splitlines()[-1] == "ok"
        return
    run_recipe(module.CLIConfig, module.main, argv=[*arguments, f"log_path={tmp_path / 'run'}"])
    rows = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows][:2] == [0, 1]


def test_the_table_has_commands_and_keys() -> None:
    modules = {command.split()[2] for command in commands()}
    assert modules == SMALL.keys() | ELSEWHERE.keys()
    assert len(commands()) >= 9 and len(key_spans()) >= 8


@pytest.mark.parametrize("span", key_spans())
def test_a_key_that_it_names_is_one(span: str) -> None:
    arguments = [filled(word) for word in span.split()]
    refused = []
    for recipe in (debate_rs_grpo, single_turn):
        try:
            cli_utils.parse(recipe.CLIConfig, [argument for argument in arguments if not argument.endswith("=")])
        except Exception as error:
            refused.append(error)
    assert len(refused) < 2, refused


def test_the_smoke_test_of_qa_passes_on_a_model_that_answers_everything_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = Score(1.0, {"correct": 1.0, "parsed": 1.0, "task_reward": 1.0}, correct=True)
    monkeypatch.setattr(QATask, "score", lambda self, item, text: right)
    (command,) = (command for command in commands() if "name=smoke_qa" in command)
    arguments = [*shlex.split(command)[3:], "max_tokens=16", "lora_rank=4", "num_test=2"]
    run_recipe(single_turn.CLIConfig, single_turn.main, argv=[*arguments, f"log_path={tmp_path / 'run'}"])
    row = read_jsonl(tmp_path / "run" / "metrics.jsonl")[0]
    assert row["env/all/correct"] == 1.0
    assert row["train/trained_tokens_sum"] > 0 and row["optim/grad_norm"] > 0

    default = [argument for argument in arguments if not argument.startswith("advantage.")]
    with pytest.raises(SystemExit):
        run_recipe(single_turn.CLIConfig, single_turn.main, argv=[*default, f"log_path={tmp_path / 'default'}"])
    assert "advantage" in capsys.readouterr().err
