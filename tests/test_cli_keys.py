"""Nested configs on a command line: given in part, switched on, preset, filled by name."""

import logging
from pathlib import Path
from typing import Any

import chz
import platformdirs
import pytest

from recipes import debate_rs_grpo, math_rl, rl_basic, single_turn
from tests.engine.conftest import TINY_CHAT
from tinker_cookbook import cli_utils
from tinker_cookbook.cli_help import help_text
from tinker_cookbook.debate.dataset import Debates
from tinker_cookbook.debate.judges import JudgeConfig
from tinker_cookbook.env.dataset import DatasetBuilder
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.rl.advantages import AdvantageConfig
from tinker_cookbook.rl.algorithms import get_preset
from tinker_cookbook.rl.config import AsyncConfig
from tinker_cookbook.rl.rollout_strategy import MinViableGroup, RetryOnFailure
from tinker_cookbook.utils.fields import REQUIRED, Defaults, FieldGroup, doc_of, docs, fill


@pytest.fixture(autouse=True)
def logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_DEBATE_LOG_ROOT", str(tmp_path))


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
    assert fill(Target, Source()) == Target(rounds=3, name="mine")
    assert fill(Target, Source(), name="other") == Target(rounds=3, name="other")
    with pytest.raises(TypeError):
        fill(Target, Source(), nme="other")


def parsed(recipe: Any, *argv: str) -> Any:
    return cli_utils.parse(recipe.CLIConfig, argv)


@chz.chz(typecheck=True)
class Parent(Defaults):
    rounds: int = chz.field(default=3, doc="rounds", validator=chz.validators.gt(0))
    name: str = chz.field(doc="name")
    made: list[str] = chz.field(default_factory=list, doc="made")


@chz.chz(typecheck=True)
class Child(Parent, rounds=5, name="child", made=lambda: ["one"]):
    pass


@chz.chz(typecheck=True)
class Grandchild(Child, rounds=6):
    extra: int = 1


def test_a_class_changes_inherited_defaults_in_its_class_statement() -> None:
    child: Any = Child
    assert (child().rounds, child().name, child().made) == (5, "child", ["one"])
    grandchild: Any = Grandchild  # a type checker does not know of the defaults
    assert (grandchild().rounds, grandchild().name, grandchild(rounds=7).rounds) == (6, "child", 7)
    assert Parent(name="parent").rounds == 3
    assert chz.chz_fields(Grandchild)["rounds"]._doc == "rounds"
    with pytest.raises(ValueError, match="greater than 0"):
        grandchild(rounds=0)
    with pytest.raises(TypeError):
        child(rounds="five")
    with pytest.raises(TypeError, match="Wrong inherits no field 'rnds'"):

        class Wrong(Parent, rnds=1):
            pass


@chz.chz(typecheck=True)
class Size(FieldGroup):
    """How much."""

    size: int = chz.field(default=2, doc="how many", validator=chz.validators.gt(0))


@chz.chz(typecheck=True)
class Seed(FieldGroup):
    """Where from."""

    seed: int = chz.field(default=0, doc="seed of everything")


@chz.chz(typecheck=True)
class Both(Size, Seed, FieldGroup):
    """How much and where from."""


@chz.chz(typecheck=True)
class Grouped(Both, size=REQUIRED):
    """Keys of a config."""

    DOCS = docs(seed="seed of the order")

    own: str = chz.field(default="x", doc="its own")


def test_a_group_of_fields_is_inherited_with_other_documentation_or_without_its_default() -> None:
    grouped: Any = Grouped
    assert (grouped(size=3).size, grouped(size=3).seed) == (3, 0)
    with pytest.raises(TypeError, match="size"):
        grouped()
    with pytest.raises(ValueError, match="greater than 0"):
        grouped(size=0)
    fields = chz.chz_fields(Grouped)
    assert [doc_of(fields[name]) for name in ("size", "seed")] == ["how many", "seed of the order"]
    assert doc_of(chz.chz_fields(Seed)["seed"]) == "seed of everything" and Both().size == 2
    with pytest.raises(TypeError, match="Wrong inherits no field 'sed'"):

        class Wrong(Seed):
            DOCS = docs(sed="misspelt")


def test_the_help_lists_the_fields_of_a_group_with_the_config_that_inherits_it() -> None:
    lines = help_text(Grouped, everything=True).splitlines()
    assert lines[0] == "Keys of a config:"
    assert [line.split()[0] for line in lines[1:]] == ["own=x", "size=", "seed=0"]


def test_keys_of_an_environment_are_nested_and_the_usual_ones_have_a_short_name() -> None:
    config = parsed(math_rl, "dataset=arithmetic", "test_dataset=test", "env.grading=exact")
    assert (config.env.dataset, config.env.test_dataset, config.env.grading) == ("arithmetic", "test", "exact")
    assert (config.env.largest, config.env.answer_style) == (20, "tags")
    with pytest.raises(ConfigurationError, match=r"dataset=test and env\.dataset=sums are the same key"):
        parsed(math_rl, "dataset=test", "env.dataset=sums")
    with pytest.raises(ConfigurationError, match=r"^largest=9: this key is now env\.largest$"):
        parsed(math_rl, "largest=9")


def test_a_part_of_a_nested_config_keeps_what_the_recipe_chose_for_the_rest() -> None:
    def advantage(*argv: str) -> AdvantageConfig:
        return single_turn.build_config(parsed(single_turn, *argv)).advantage

    assert advantage() == AdvantageConfig(baseline="zscore", scale="sequence")
    assert advantage("advantage.scale=token") == AdvantageConfig(baseline="zscore", scale="token")
    assert advantage("advantage=AdvantageConfig") == AdvantageConfig()
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
    with pytest.raises(
        ConfigurationError, match=r"judge=lm and judge\.name=mock are the same key; give one of the two"
    ):
        parsed(debate_rs_grpo, "judge=lm", "judge.name=mock")


def test_a_judge_runs_where_the_policy_does_with_the_run_s_seed(tmp_path: Path) -> None:
    cli = parsed(debate_rs_grpo, "judge=lm", "seed=7", f"log_path={tmp_path}/run", "judge.weights.base_url=http://j")
    builder = debate_rs_grpo.build_config(chz.replace(cli, judge=JudgeConfig())).dataset_builder
    assert isinstance(builder, DatasetBuilder) and isinstance(builder.env, Debates)
    assert (builder.env.judge.seed, builder.seed) == (None, 7)
    weights = builder.env.judge.weights
    assert (weights.base_model, weights.renderer_name) == (builder.model_name, builder.renderer_name)
    assert cli.judge.weights.base_url == "http://j"


def of_preset(name: str) -> dict[str, Any]:
    preset = get_preset(name)
    settings = dict(preset.loss_fn_config) if preset.loss_fn_config else None
    return {"advantage": preset.advantage, "loss_fn": preset.loss_fn, "loss_fn_config": settings,
            "remove_constant_reward_groups": preset.remove_constant_reward_groups}  # fmt: skip


def test_a_dict_within_a_config_is_given_in_parts() -> None:
    given = ("preset=gdpo", "advantage.parts.correct=1", "advantage.parts.format=0.5")
    advantage = single_turn.build_config(parsed(single_turn, *given)).advantage
    assert (advantage.baseline, advantage.parts) == ("gdpo", {"correct": 1.0, "format": 0.5})
    with pytest.raises(ConfigurationError, match=r"advantage\.baseline=gdpo needs advantage\.parts"):
        single_turn.build_config(parsed(single_turn, "preset=gdpo"))


def test_a_preset_stands_below_the_keys_and_above_the_recipe() -> None:
    config = single_turn.build_config(parsed(single_turn, "preset=dapo"))
    assert {key: getattr(config, key) for key in of_preset("dapo")} == of_preset("dapo")
    given = ("preset=dapo", "advantage.scale=sum", "loss_fn_config.clip_high_threshold=1.5")
    config = single_turn.build_config(parsed(single_turn, *given))
    assert config.advantage == AdvantageConfig(baseline="zscore", scale="sum")
    assert config.loss_fn_config == {"clip_low_threshold": 0.8, "clip_high_threshold": 1.5}
    # The clip of one loss is nothing that another loss takes over.
    other = single_turn.build_config(parsed(single_turn, "preset=dapo", "loss_fn=importance_sampling"))
    assert other.loss_fn_config is None
    with pytest.raises(ConfigurationError, match="preset='grop' is unknown"):
        parsed(single_turn, "preset=grop")


def test_a_preset_works_from_python() -> None:
    config = single_turn.build_config(single_turn.CLIConfig(preset="dapo"))
    assert {key: getattr(config, key) for key in of_preset("dapo")} == of_preset("dapo")
    own = AdvantageConfig(baseline="zscore", scale="sum")
    given = single_turn.CLIConfig(preset="dapo", advantage=own, remove_constant_reward_groups=False)
    config = single_turn.build_config(given)
    assert (config.advantage, config.remove_constant_reward_groups) == (own, False)
    assert config.loss_fn_config == of_preset("dapo")["loss_fn_config"]
    # A key that is given counts, even if it is what it would be without a preset.
    other = single_turn.build_config(single_turn.CLIConfig(preset="dapo", loss_fn="importance_sampling"))
    assert (other.loss_fn, other.loss_fn_config) == ("importance_sampling", None)
    plain = single_turn.build_config(single_turn.CLIConfig())
    assert (plain.loss_fn, plain.loss_fn_config) == ("importance_sampling", None)
    assert plain.advantage == single_turn.OF_ALL and plain.remove_constant_reward_groups is False
    with pytest.raises(ConfigurationError, match="preset='grop' is unknown"):
        single_turn.CLIConfig(preset="grop")


def test_the_temperature_of_samples_is_that_of_scores_beside_the_preset_s_settings() -> None:
    config = single_turn.build_config(parsed(single_turn, "preset=dapo", "temperature=0.5"))
    assert config.loss_fn_config == {"temperature": 0.5, **of_preset("dapo")["loss_fn_config"]}


def test_accepted_replies_train_alike_unless_told_otherwise() -> None:
    """A threshold over rewards of 0 and 1 leaves replies of one reward, whose z-scores are all zero."""

    def advantage(config: single_turn.CLIConfig) -> AdvantageConfig:
        return single_turn.build_config(config).advantage

    constant = AdvantageConfig(baseline="constant", scale="sequence")
    assert advantage(parsed(single_turn, "accept_min_reward=1")) == constant
    assert advantage(single_turn.CLIConfig(accept_min_reward=1.0)) == constant
    zscore = AdvantageConfig(baseline="zscore", scale="sequence")
    assert advantage(parsed(single_turn, "accept_min_reward=None")) == zscore
    assert advantage(parsed(single_turn, "accept_require_parse=true")) == zscore
    assert advantage(parsed(single_turn, "accept_min_reward=1", "advantage.baseline=zscore")) == zscore
    own = AdvantageConfig(baseline="leave_one_out")
    assert advantage(single_turn.CLIConfig(accept_min_reward=1.0, advantage=own)) == own
    for config in (parsed(single_turn, "accept_min_reward=1", "preset=dapo"),
                   single_turn.CLIConfig(accept_min_reward=1.0, preset="dapo")):  # fmt: skip
        assert advantage(config) == of_preset("dapo")["advantage"]


def test_a_reference_needs_its_path_alone() -> None:
    argv = ("kl_penalty_coef=0.1", "kl_reference_config.load_checkpoint_path=tinker://a/sampler_weights/b")

    assert rl_basic.build_config(parsed(rl_basic, *argv)).kl_reference_config is not None
    debate = str(TINY_CHAT.parent / "tiny_debate")
    assert parsed(rl_basic, *argv, f"kl_reference_config.base_model={debate}").kl_reference_config.base_model == debate


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


def test_a_key_that_is_given_twice_is_refused_unless_both_say_the_same() -> None:
    assert cli_utils.parse(rl_basic.CLIConfig, ["seed=2", "max_steps=3", "seed=2", "--max_steps=3"]).seed == 2
    with pytest.raises(ConfigurationError, match=r"^seed=1 and seed=2: this key is given twice; give it once$"):
        cli_utils.parse(rl_basic.CLIConfig, ["seed=1", "max_steps=3", "seed=2"])
    with pytest.raises(
        ConfigurationError, match=r"^n_batches=1 and max_steps=1 are the same key; give one of the two$"
    ):
        cli_utils.parse(rl_basic.CLIConfig, ["n_batches=1", "max_steps=1"])


class TestNames:
    def test_default_log_path(self) -> None:
        expected = Path(platformdirs.user_data_dir("tinker-cookbook")) / "debate" / "Qwen-Qwen3-8B-lr1"
        assert cli_utils.default_log_path("debate", "Qwen/Qwen3-8B-lr1") == str(expected)

    def test_the_last_model_name_counts(self) -> None:
        assert cli_utils.model_name_from_argv(["a=1", "model_name=x", "--model_name=y=z"], "d") == "y=z"
        assert cli_utils.model_name_from_argv(["a=1"], "d") == "d"
