"""The keys that all training recipes take reach the loop's config: none is taken from the command line and then forgotten."""

import importlib
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import chz
import pytest

from recipes import rl_basic
from recipes.common import CommonConfig, for_model
from recipes.distillation.teacher import teacher_run
from recipes.preference import rlhf_pipeline
from tinker_cookbook import cli_utils
from tinker_cookbook.data.shipped import EXAMPLE_DATA
from tinker_cookbook.models.hyperparameters import get_lr
from tinker_cookbook.runs.config import RunConfig
from tinker_cookbook.runs.ml_log import TrackerConfig, tracker_settings
from tinker_cookbook.runs.prices import PriceConfig


def make_evaluator() -> Any:
    raise AssertionError("nothing is evaluated here")


GIVEN: dict[str, Any] = {
    "lora_rank": 3,
    "train_mlp": False,
    "server_timeout_seconds": 77.0,
    "session_name": "session_name",
    "seed": 5,
    "max_steps": 2,
    "lr_schedule": "cosine",
    "lr_warmup_steps": 1,
    "load_checkpoint_path": "tinker://run/weights/start",
    "eval_every": 4,
    "infrequent_eval_every": 6,
    "evaluator_builders": [make_evaluator],
    "infrequent_evaluator_builders": [make_evaluator],
    "save_every": 7,
    "save_every_tokens": 1000,
    "save_every_seconds": 60.0,
    "ttl_seconds": 90,
    "rolling_save_every": 3,
    "rolling_ttl_seconds": 30,
    "on_nonfinite": "skip",
    "async_periodic_saves": True,
    "enable_trace": True,
    "span_chart_every": 8,
    **{key: True if value is False else key for key, value in tracker_settings(TrackerConfig()).items()},
    "trackers": "tensorboard",
    "prices": PriceConfig(sample=1.5, prefill=0.5, train=1.0),
}
RECIPES = (
    "sl_basic", "chat_sl", "rl_basic", "math_rl", "shorter", "debate_rs_grpo", "single_turn", "preference.train",
    "distillation.on_policy", "distillation.off_policy",
)  # fmt: skip


@pytest.fixture(autouse=True)
def tensorboard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether its package is there is looked at, and nothing more."""
    monkeypatch.setitem(sys.modules, "tensorboard", ModuleType("tensorboard"))


def test_every_key_is_looked_at() -> None:
    elsewhere = {"model_name", "backend", "base_url", "renderer_name", "log_path", "name", "behavior_if_log_dir_exists"}
    elsewhere |= {"learning_rate"}  # each stage of a pipeline has its own
    settings = set(chz.chz_fields(CommonConfig)) & set(chz.chz_fields(RunConfig))
    assert settings - elsewhere == set(GIVEN) - elsewhere


def values(config: Any) -> dict[str, Any]:
    given = {key: getattr(config, key) for key in GIVEN}
    # Some recipes add evaluators of their own.
    return given | {"evaluator_builders": [build for build in config.evaluator_builders if build is make_evaluator]}


def test_an_evaluator_is_named_on_the_command_line() -> None:
    recipe = importlib.import_module("recipes.sl_basic")
    name = f"{__name__}:make_evaluator"
    cli = cli_utils.parse(recipe.CLIConfig, [f"evaluator_builders={name}", "infrequent_eval_every=7"])
    assert (cli.evaluator_builders, cli.infrequent_eval_every) == ([make_evaluator], 7)


@pytest.mark.parametrize("name", RECIPES)
def test_they_reach_the_loop(name: str, tmp_path: Path) -> None:
    recipe = importlib.import_module(f"recipes.{name}")
    built = recipe.build_config(recipe.CLIConfig(log_path=str(tmp_path / "log"), **GIVEN))
    config = built[0] if isinstance(built, tuple) else built
    assert isinstance(config, RunConfig)
    assert values(config) == GIVEN


def test_they_reach_every_stage_of_the_pipeline(tmp_path: Path) -> None:
    cli = rlhf_pipeline.CLIConfig(**GIVEN)
    stages = {
        "sft": rlhf_pipeline.sft_config(cli, tmp_path),
        "preference_model": rlhf_pipeline.preference_model_config(cli, tmp_path, "tinker://run/weights/warm"),
        "rl": rlhf_pipeline.rl_config(cli, tmp_path, "tinker://run/weights/warm", None),
    }
    for stage, config in stages.items():
        start = GIVEN["load_checkpoint_path"] if stage == "sft" else "tinker://run/weights/warm"
        assert values(config) == GIVEN | {"wandb_name": f"wandb_name-{stage}", "load_checkpoint_path": start}
        assert (config.log_path, config.recipe_name) == (str(tmp_path / stage), f"rlhf_pipeline/{stage}")


@pytest.mark.parametrize("name", ["sl_basic", "chat_sl", "preference.train", "prompt_distillation.train"])
def test_supervised_recipes_keep_the_schedule_of_their_loop(name: str) -> None:
    """The class of common keys stands before the loop's options, and has the default of reinforcement learning."""
    config_class = importlib.import_module(f"recipes.{name}").CLIConfig
    assert config_class().lr_schedule == "linear"


def test_so_do_the_supervised_stages_of_other_recipes(tmp_path: Path) -> None:
    cli = rlhf_pipeline.CLIConfig()
    assert rlhf_pipeline.sft_config(cli, tmp_path).lr_schedule == "linear"
    assert rlhf_pipeline.preference_model_config(cli, tmp_path, None).lr_schedule == "linear"
    assert rlhf_pipeline.rl_config(cli, tmp_path, None, None).lr_schedule == "constant"
    off_policy = importlib.import_module("recipes.distillation.off_policy")
    cli = off_policy.CLIConfig(log_path=str(tmp_path / "log"))
    config, _ = off_policy.build_config(cli)
    assert teacher_run(cli, config, config.dataset_configs[0].dataset_builder).lr_schedule == "linear"


def test_a_tiny_model_is_one_in_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a base made by the same tool would get the learning rate of a real model, which does not move it."""
    monkeypatch.chdir(EXAMPLE_DATA.parent)
    shutil.copytree(EXAMPLE_DATA / "tiny_debate", tmp_path / "base_of_mine")
    for name in (
        "tiny_chat",
        "example_data/tiny_chat",
        str(EXAMPLE_DATA / "tiny_debate"),
        str(tmp_path / "base_of_mine"),
    ):
        assert CommonConfig(model_name=name).is_tiny, name
        assert for_model(rl_basic.CLIConfig(model_name=name)).learning_rate == 1e-3
    config = tmp_path / "base_of_mine" / "config.json"
    config.write_text(config.read_text().replace('"tiny_model": true', '"tiny_model": false'))
    for name in ("Qwen/Qwen3-8B", "./tiny_chat", str(tmp_path / "base_of_mine"), str(tmp_path)):
        assert not CommonConfig(model_name=name).is_tiny, name
    real = str(tmp_path / "base_of_mine")
    assert for_model(rl_basic.CLIConfig(model_name=real)).learning_rate == pytest.approx(0.1 * get_lr(real))
    assert get_lr(real) < 1e-3
