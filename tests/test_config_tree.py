"""Nested configs on a command line: given in part, switched on, preset, filled by name."""

import logging
from pathlib import Path
from typing import Any

import chz
import pytest

from recipes import debate_rs_grpo, rl_basic, single_turn
from recipes.common import settle
from recipes.rl_common import preset_keys
from tinker_cookbook import config_tree
from tinker_cookbook.debate.dataset import Debates
from tinker_cookbook.debate.judges import JudgeConfig
from tinker_cookbook.env.dataset import DatasetBuilder
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.rl.advantages import AdvantageConfig
from tinker_cookbook.rl.config import AsyncConfig
from tinker_cookbook.rl.rollout_strategy import MinViableGroup, RetryOnFailure


@chz.chz(typecheck=True)
class Source:
    rounds: int = 3
    name: str = "mine"
    extra: float = 0.5


@chz.chz(typecheck=True)
class Target:
    rounds: int = chz.field(doc="rounds")
    name: str = "none"


def test_fill_takes_fields_of_the_same_name_and_what_is_given() -> None:
    assert config_tree.fill(Target, Source()) == Target(rounds=3, name="mine")
    assert config_tree.fill(Target, Source(), name="other") == Target(rounds=3, name="other")
    with pytest.raises(TypeError):
        config_tree.fill(Target, Source(), nme="other")


def parsed(recipe: Any, *argv: str) -> Any:
    return config_tree.parse(recipe.CLIConfig, argv)


def test_a_part_of_a_nested_config_keeps_what_the_recipe_chose_for_the_rest() -> None:
    assert parsed(single_turn).advantage == AdvantageConfig(baseline="zscore", scale="sequence")
    assert parsed(single_turn, "advantage.scale=token").advantage == AdvantageConfig(baseline="zscore", scale="token")
    assert parsed(single_turn, "advantage=AdvantageConfig").advantage == AdvantageConfig()
    config = parsed(rl_basic, "async_config.max_steps_off_policy=2", "rollout_error_tolerance=RetryOnFailure",
                    "rollout_error_tolerance.max_retries=1", "rollout.limits.max_turns=4")  # fmt: skip
    assert config.async_config == AsyncConfig(max_steps_off_policy=2)
    assert config.rollout_error_tolerance == RetryOnFailure(max_retries=1)
    assert config.rollout.limits.max_turns == 4 and config.rollout.termination is None


def test_retries_are_a_key_of_the_rollout() -> None:
    config = parsed(rl_basic, "rollout.retries=2")
    assert config.effective_rollout_strategy() == RetryOnFailure(max_retries=2)
    config = parsed(rl_basic, "rollout.strategy=MinViableGroup", "rollout.strategy.min_successful=3")
    assert config.effective_rollout_strategy() == MinViableGroup(min_successful=3)
    with pytest.raises(ConfigurationError, match=r"retries=2 and strategy=.*give one of the two"):
        parsed(rl_basic, "rollout.retries=2", "rollout.strategy=FailFast")
    with pytest.raises(ConfigurationError, match="retries=-1: must be at least 0"):
        parsed(rl_basic, "rollout.retries=-1")
    with pytest.raises(ConfigurationError, match=r"rollout_retries=2: this key is now rollout\.retries"):
        parsed(rl_basic, "rollout_retries=2")


def test_a_judge_is_given_whole_or_in_part() -> None:
    assert parsed(debate_rs_grpo).judge == JudgeConfig(name="mock")
    assert parsed(debate_rs_grpo, "judge=lm").judge == parsed(debate_rs_grpo, "judge.name=lm").judge == JudgeConfig()
    given = parsed(debate_rs_grpo, "judge=lm", "judge.max_retries=3", "judge.system_prompt=Decide.").judge
    assert (given.name, given.max_retries, given.system_prompt, given.max_tokens) == ("lm", 3, "Decide.", 96)
    with pytest.raises(ConfigurationError, match=r"judge=lm and judge\.name=mock: give one of the two"):
        parsed(debate_rs_grpo, "judge=lm", "judge.name=mock")


def test_a_judge_runs_where_the_policy_does_with_the_run_s_seed(tmp_path: Path) -> None:
    cli = parsed(debate_rs_grpo, "judge=lm", "seed=7", f"log_path={tmp_path}/run", "judge.weights.base_url=http://j")
    builder = debate_rs_grpo.build_config(chz.replace(cli, judge=JudgeConfig())).dataset_builder
    assert isinstance(builder, DatasetBuilder) and isinstance(builder.env, Debates)
    assert (builder.env.judge.seed, builder.seed) == (None, 7)
    weights = builder.env.judge.weights
    assert (weights.base_model, weights.renderer_name) == (builder.model_name, builder.renderer_name)
    assert cli.judge.weights.base_url == "http://j"


def test_a_preset_stands_below_the_keys_and_above_the_recipe() -> None:
    config = parsed(single_turn, "preset=dapo")
    assert {key: getattr(config, key) for key in preset_keys("dapo")} == preset_keys("dapo")
    config = parsed(single_turn, "preset=dapo", "advantage.scale=sum", "loss_fn_config.clip_high_threshold=1.5")
    assert config.advantage == AdvantageConfig(baseline="zscore", scale="sum")
    assert config.loss_fn_config == {"clip_low_threshold": 0.8, "clip_high_threshold": 1.5}
    # The clip of one loss is nothing that another loss takes over.
    assert parsed(single_turn, "preset=dapo", "loss_fn=importance_sampling").loss_fn_config is None
    with pytest.raises(ConfigurationError, match="preset='grop' is unknown"):
        parsed(single_turn, "preset=grop")


def test_a_preset_works_from_python() -> None:
    config = single_turn.CLIConfig(preset="dapo")
    assert {key: getattr(config, key) for key in preset_keys("dapo")} == preset_keys("dapo")
    own = AdvantageConfig(baseline="zscore", scale="sum")
    settled = settle(single_turn.CLIConfig(preset="dapo", advantage=own, remove_constant_reward_groups=False))
    assert (settled.advantage, settled.remove_constant_reward_groups) == (own, False)
    assert settled.loss_fn_config == preset_keys("dapo")["loss_fn_config"]
    # A key that is given counts, even if it is what it would be without a preset.
    other = single_turn.CLIConfig(preset="dapo", loss_fn="importance_sampling")
    assert (other.loss_fn, other.loss_fn_config) == ("importance_sampling", None)
    plain, default = single_turn.CLIConfig(), chz.chz_fields(single_turn.CLIConfig)["advantage"]
    assert (plain.loss_fn, plain.loss_fn_config) == ("importance_sampling", None)
    assert plain.advantage == config_tree.default_of(default) and plain.remove_constant_reward_groups is False
    with pytest.raises(ConfigurationError, match="preset='grop' is unknown"):
        single_turn.CLIConfig(preset="grop")


def test_accepted_replies_train_alike_unless_told_otherwise() -> None:
    """A threshold over rewards of 0 and 1 leaves replies of one reward, whose z-scores are all zero."""
    constant = AdvantageConfig(baseline="constant", scale="sequence")
    assert parsed(single_turn, "accept_min_reward=1").advantage == constant
    assert single_turn.CLIConfig(accept_min_reward=1.0).advantage == constant
    zscore = AdvantageConfig(baseline="zscore", scale="sequence")
    assert parsed(single_turn, "accept_min_reward=None").advantage == zscore
    assert parsed(single_turn, "accept_require_parse=true").advantage == zscore
    assert parsed(single_turn, "accept_min_reward=1", "advantage.baseline=zscore").advantage == zscore
    own = AdvantageConfig(baseline="leave_one_out")
    assert single_turn.CLIConfig(accept_min_reward=1.0, advantage=own).advantage == own
    for config in (parsed(single_turn, "accept_min_reward=1", "preset=dapo"),
                   single_turn.CLIConfig(accept_min_reward=1.0, preset="dapo")):  # fmt: skip
        assert config.advantage == preset_keys("dapo")["advantage"]


def test_a_reference_needs_its_path_alone() -> None:
    argv = ("kl_penalty_coef=0.1", "kl_reference_config.load_checkpoint_path=tinker://a/sampler_weights/b")
    assert parsed(rl_basic, *argv).kl_reference_config.base_model == settle(rl_basic.CLIConfig()).model_name
    assert parsed(rl_basic, *argv, "kl_reference_config.base_model=x").kl_reference_config.base_model == "x"


def test_rejection_takes_no_other_advantages(tmp_path: Path) -> None:
    cli = debate_rs_grpo.CLIConfig(debate_train="rejection", log_path=str(tmp_path / "run"))
    assert debate_rs_grpo.build_config(cli).advantage == AdvantageConfig(baseline="constant", scale="sequence")
    with pytest.raises(ConfigurationError, match="leave preset and advantage out"):
        debate_rs_grpo.build_config(chz.replace(cli, advantage=AdvantageConfig(baseline="zscore")))


def test_truncated_sampling_is_said_and_reaches_the_evaluations(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cli = single_turn.CLIConfig(log_path=str(tmp_path / "run"), top_k=5, top_p=0.9, min_p=0.1)
    with caplog.at_level(logging.WARNING):
        config = single_turn.build_config(cli)
    assert "top_k=5, top_p=0.9, min_p=0.1: rollouts are drawn from fewer tokens" in caplog.text
    evaluator: Any = config.evaluator_builders[0]
    assert (config.top_k, config.top_p, config.min_p) == (5, 0.9, 0.1)
    assert (evaluator.top_k, evaluator.top_p, evaluator.min_p) == (5, 0.9, 0.1)
    for wrong in (-0.1, 1.5):
        with pytest.raises(ConfigurationError, match=f"min_p={wrong}: must be between"):
            single_turn.build_config(single_turn.CLIConfig(min_p=wrong))
    for wrong in ("top_k=0", "top_p=0", "top_p=1.5"):
        with pytest.raises(ConfigurationError, match=wrong):
            parsed(single_turn, wrong)


def test_of_a_key_that_is_given_twice_the_last_counts_and_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING"):
        assert config_tree.parse(rl_basic.CLIConfig, ["seed=1", "max_steps=3", "seed=2", "max_steps=3"]).seed == 2
    assert [message for message in caplog.messages if "twice" in message] == [
        "seed is given twice, as 1 and 2: the last counts"
    ]
