"""Rollout settings as one value, from the config of a run down to the env: every setting, in training and evaluation."""

import asyncio
import pickle
from pathlib import Path
from typing import Any

import pytest

from tests.fakes import FakeServiceClient, said
from tests.rl.arena import Members, TalkEnv, Talker, ToldEnv, run
from tests.rl.loop import NumberDatasetBuilder, NumberEnv, make_config, trains_nothing, untimed
from tinker_cookbook import backends
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.rl import train
from tinker_cookbook.rl.rollout_limits import ParseErrorPolicy, RolloutLimits, TerminationRewardPolicy
from tinker_cookbook.rl.rollout_presets import (
    RolloutConfig,
    agentic,
    default_rollout_config_for_model,
    default_rollout_strategy_for_model,
    simple,
)
from tinker_cookbook.rl.rollout_runner import RolloutHooks, RolloutState, run_rollout
from tinker_cookbook.rl.rollout_strategy import FailFast, MinViableGroup, RetryOnFailure, RolloutStrategy
from tinker_cookbook.rl.rollouts import do_group_rollout
from tinker_cookbook.rl.types import StepResult


def test_presets() -> None:
    assert simple() == RolloutConfig()
    config = agentic()
    assert config.limits == RolloutLimits(max_turns=10, max_trajectory_tokens=65536, max_tool_calls=30)
    assert config.parse_errors == ParseErrorPolicy(max_consecutive=2)
    assert config.termination == TerminationRewardPolicy(
        zero_reward_on_limit=True, skip_grading_on_timeout=True, grader_timeout_seconds=900.0
    )
    assert config.tool_execution == "sequential"
    assert pickle.loads(pickle.dumps(config)) == config


def test_models_made_for_agents_have_settings_of_their_own() -> None:
    for name in ("thinkingmachines/Inkling", "thinkingmachines/Inkling-Small", "thinkingmachines/Inkling:peft:131072"):
        assert default_rollout_config_for_model(name) == agentic()
        assert default_rollout_strategy_for_model(name) == MinViableGroup()
    for name in ("Qwen/Qwen3-8B", "thinkingmachines/Another"):
        assert default_rollout_config_for_model(name) == simple()
        assert default_rollout_strategy_for_model(name) == FailFast()


class StopsAtTwo(RolloutHooks):
    """Ends the rollout at a limit by a name of its own."""

    async def on_stop_reason(self, reason: str, state: RolloutState) -> str:
        return f"{reason}_at_{state.turn_index}"


def test_an_env_is_told_of_its_tools_only_what_is_asked_for() -> None:
    for config, told in ((simple(), []), (agentic(), ["max_tool_calls 30", "max_consecutive 2", "sequential"])):
        env = ToldEnv()
        run(run_rollout(Talker(said([4])), env, config=config))
        assert env.log[: env.log.index("first")] == told
    with pytest.raises(ConfigurationError, match="tool_execution=sequential: TalkEnv has no method set_tool_execution"):
        run(run_rollout(Talker(), TalkEnv(), config=RolloutConfig(tool_execution="sequential")))


@pytest.mark.parametrize("strategy", [FailFast(), RetryOnFailure(), MinViableGroup()])
def test_every_strategy_hands_it_on(strategy: RolloutStrategy) -> None:
    clamp = TerminationRewardPolicy(zero_reward_on_limit=True)
    config = RolloutConfig(limits=RolloutLimits(max_turns=2), hooks=RolloutHooks, termination=clamp)
    builder = Members(2, lambda call, member: TalkEnv(turns=5))
    group = run(do_group_rollout(builder, Talker(*[said([4])] * 4), strategy, config=config))
    assert [trajectory.stop_reason for trajectory in group.trajectories_G] == ["max_turns"] * 2
    assert group.get_total_rewards() == [0.0, 0.0]
    kept = TerminationRewardPolicy()
    group = run(do_group_rollout(builder, Talker(*[said([4])] * 4), strategy, kept, config=config))
    assert group.get_total_rewards() == [12.0, 12.0]


PACINGS: dict[str, dict[str, Any]] = {
    "sync": {},
    "stream": {"stream_minibatch_config": train.StreamMinibatchConfig(num_minibatches=3)},
    "ahead": {"async_config": train.AsyncConfig(max_steps_off_policy=2)},
}


@pytest.fixture
def unending(monkeypatch: pytest.MonkeyPatch) -> None:
    async def step(self: NumberEnv, action: list[int], *, extra: Any = None) -> StepResult:
        return StepResult(float(action[0]), False, self.prompt, [0])

    monkeypatch.setattr(backends, "create_service_client", lambda *_: FakeServiceClient())
    monkeypatch.setattr(NumberEnv, "step", step)


@pytest.mark.usefixtures("unending")
class TestConfig:
    @pytest.mark.parametrize("pacing", PACINGS)
    def test_limits_hooks_and_termination_reach_training_and_evaluation(self, tmp_path: Path, pacing: str) -> None:
        reasons = ("max_turns_at_2",)
        clamp = TerminationRewardPolicy(zero_reward_on_limit=True, limit_stop_reasons=reasons)
        rollout = RolloutConfig(limits=RolloutLimits(max_turns=2), hooks=StopsAtTwo, termination=clamp)
        data = NumberDatasetBuilder(batches=1, with_test=True)
        with trains_nothing():
            asyncio.run(train.main(make_config(tmp_path, data, eval_every=1, rollout=rollout, **PACINGS[pacing])))
        row = untimed(tmp_path)[0]
        for prefix in ("", "test/"):
            assert row[f"{prefix}env/all/turns_per_episode"] == 2
            assert row[f"{prefix}env/all/stop/max_turns_at_2"] == 1
            assert row[f"{prefix}env/all/zero_reward_on_limit"] > 0.5
            assert row[f"{prefix}env/all/reward/total"] == 0

    def test_what_an_env_cannot_do_ends_the_run(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigurationError, match="max_tool_calls=30: NumberEnv has no method set_max_tool_calls"):
            asyncio.run(train.main(make_config(tmp_path, rollout=agentic())))

    def test_termination_is_said_once(self, tmp_path: Path) -> None:
        own = TerminationRewardPolicy()
        config = make_config(tmp_path, termination=own, rollout=agentic())
        with pytest.raises(ConfigurationError, match=r"termination and rollout\.termination are both set"):
            train.check_config(config)
        assert make_config(tmp_path, rollout=agentic()).effective_termination() == agentic().termination
        assert make_config(tmp_path, termination=own, rollout=simple()).effective_termination() == own
        assert make_config(tmp_path).effective_termination() is None

    @pytest.mark.parametrize("given", [{"retries": 2}, {"strategy": RetryOnFailure()}])
    @pytest.mark.parametrize("tolerance", [False, True, MinViableGroup()])
    def test_what_a_failure_means_is_said_once(self, tmp_path: Path, tolerance: Any, given: dict[str, Any]) -> None:
        config = make_config(tmp_path, rollout=RolloutConfig(**given), rollout_error_tolerance=tolerance)
        with pytest.raises(ConfigurationError, match=r"rollout_error_tolerance and rollout\.\w+ are both set"):
            train.check_config(config)
        assert make_config(tmp_path, rollout=RolloutConfig(retries=2)).effective_rollout_strategy() == RetryOnFailure(
            max_retries=2
        )
