"""Flags of the earlier scripts: which keys they stand for, and what is refused."""

import os
import sys

import chz
import pytest

from recipes import debate_rs_grpo, flags, single_turn
from recipes.flags import LOGPROB_FLAGS, RECIPES, RUN_FLAGS, UnknownFlagError, recipe_and_keys, to_keys
from tinker_cookbook import config_tree
from tinker_cookbook.cli_utils import run_recipe
from tinker_local_backend import check_logprobs


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[str]]]:
    """What would have been run."""
    calls: list[tuple[str, list[str]]] = []
    monkeypatch.setattr("recipes.flags.run", lambda module, keys: calls.append((module, list(keys))))
    monkeypatch.setenv("TINKER_DEBATE_LOG_ROOT", "elsewhere")
    return calls


def test_every_flag_stands_for_a_key_that_there_is() -> None:
    recipes = {**chz.chz_fields(single_turn.CLIConfig), **chz.chz_fields(debate_rs_grpo.CLIConfig)}
    assert {text.partition("=")[0] for text in RUN_FLAGS.values()} - recipes.keys() == {"mode", ""}
    assert {text.partition("=")[0] for text in LOGPROB_FLAGS.values()} <= chz.chz_fields(check_logprobs.Config).keys()


def test_flags_become_the_recipe_s_keys() -> None:
    words = [
        "--no-proxy",
        "--mode",
        "debate",
        "--env",
        "qa",
        "--dataset",
        "test",
        "-n",
        "256",
        "--num-groups=4",
        "-s",
        "10",
        "--mock-judge",
        "lora_rank=8",
    ]
    module, keys = recipe_and_keys(
        [*words, "--debate-train", "rs_grpo", "--debate-grpo-reward", "task", "--name", "a b"]
    )
    assert module == "recipes.debate_rs_grpo"
    config = config_tree.parse(debate_rs_grpo.CLIConfig, keys)
    assert (config.num_rollouts, config.num_groups, config.max_steps, config.lora_rank) == (256, 4, 10, 8)
    assert (config.task, config.dataset, config.judge.name, config.name) == ("qa", "test", "mock", "a b")
    assert (config.debate_train, config.debate_reward) == ("rs_grpo", "task")
    words = (
        "--mode single_turn --temperature 0.7 --max-tokens 9 --min-p .1 --accept-min-reward 1 --accept-require-parse"
    )
    module, keys = recipe_and_keys(words.split())
    chosen = config_tree.parse(single_turn.CLIConfig, keys)
    assert module == "recipes.single_turn"
    assert (chosen.temperature, chosen.max_tokens, chosen.min_p) == (0.7, 9, 0.1)
    assert (chosen.accept_min_reward, chosen.accept_require_parse) == (1.0, True)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            "--mode debate --turbo",
            r"'--turbo' is not known; there are --mode, .*--no-proxy, and the recipe's own key=value",
        ),
        ("--mode debate qa", "'qa' is not known"),
        ("--mode debate -n", "-n needs a value"),
        ("--mode debate -n --mock-judge", "-n needs a value"),
        ("--mode debate --mock-judge=yes", "--mock-judge takes no value, got 'yes'"),
        ("-n 4", "no --mode: give --mode debate or --mode single_turn"),
        ("--mode chess", "--mode chess: give --mode debate"),
    ],
)
def test_what_is_no_flag_is_told_which_there_are(
    words: str, told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UnknownFlagError, match=told):
        recipe_and_keys(words.split())
    monkeypatch.setattr(sys, "argv", ["train.py", *words.split()])
    with pytest.raises(SystemExit) as raised:
        flags.run_train()
    assert raised.value.code == 2 and capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "added"),
    [
        ("--mode debate", ["num_groups_to_log=-1"]),
        ("--mode debate num_groups_to_log=2", []),
        ("--mode single_turn --env summary", ["num_groups_to_log=-1"]),
        ("--mode single_turn --env qa", ["num_groups_to_log=-1", "advantage.baseline=constant"]),
        ("--mode single_turn", ["num_groups_to_log=-1", "advantage.baseline=constant"]),
        ("--mode single_turn --accept-min-reward 1", ["num_groups_to_log=-1"]),
        ("--mode single_turn advantage.scale=sum", ["num_groups_to_log=-1"]),
    ],
)
def test_the_habits_of_the_script(
    words: str, added: list[str], ran: list[tuple[str, list[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", *words.split()])
    flags.run_train()
    module, keys = recipe_and_keys(words.split())
    assert ran == [(module, [*keys, *added])]
    assert os.environ["TINKER_DEBATE_LOG_ROOT"] == "elsewhere"


def test_the_check_s_flags(ran: list[tuple[str, list[str]]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        sys, "argv", ["check.py", "--max-tokens", "32", "--prompt", "What is 7 * 8?", "--temperature", "0.5"]
    )
    flags.run_check_logprobs()
    ((module, keys),) = ran
    config = config_tree.parse(check_logprobs.Config, keys)
    assert module == "tinker_local_backend.check_logprobs"
    assert (config.max_tokens, config.prompt, [*config.temperatures]) == (32, "What is 7 * 8?", [0.5])
    assert to_keys(["--prompt=a=b"], LOGPROB_FLAGS) == ["prompt=a=b"]


class TestRecipesTakeThemToo:
    @pytest.mark.parametrize("recipe", [debate_rs_grpo, single_turn])
    def test_translated(self, recipe: object, capsys: pytest.CaptureFixture[str]) -> None:
        mode = next(mode for mode, module in RECIPES.items() if module.endswith(recipe.__name__.split(".")[-1]))  # pyright: ignore
        seen = []
        prepare = flags.read_by(mode)
        arguments = ["-n", "256", "--num-groups", "4", "lora_rank=2"]
        run_recipe(recipe.CLIConfig, seen.append, argv=arguments, prog="x", prepare=prepare)  # pyright: ignore
        assert (seen[0].num_rollouts, seen[0].num_groups, seen[0].lora_rank) == (256, 4, 2)
        assert capsys.readouterr().out == f"Runs: python -m {RECIPES[mode]} num_rollouts=256 num_groups=4 lora_rank=2\n"

    def test_of_another_mode(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit):
            flags.read_by("debate")(["--mode", "single_turn", "-n", "8"])
        assert "run python -m recipes.single_turn num_rollouts=8" in capsys.readouterr().err

    def test_keys_pass_through(self) -> None:
        arguments = ["--lora_rank=2", "--help", "num_rollouts=4"]
        assert flags.read_by("debate")(arguments) == arguments
