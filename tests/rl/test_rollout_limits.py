"""What a rollout that hit a limit is worth, and the settings of limits, parse errors and presets."""

from typing import Any

import chz
import pytest

from tests.fakes import said
from tests.rl.arena import Members, TalkEnv, Talker, forever, run
from tinker_cookbook.exceptions import ConfigurationError, GroupFailedError, RolloutTimeoutError
from tinker_cookbook.rl.metric_util import compute_trajectory_metrics
from tinker_cookbook.rl.rollout_limits import (
    DEFAULT_LIMIT_STOP_REASONS,
    MAX_DETAILS,
    ParseErrorPolicy,
    RolloutLimits,
    TerminationRewardPolicy,
)
from tinker_cookbook.rl.rollout_presets import RolloutConfig
from tinker_cookbook.rl.rollout_strategy import RetryOnFailure
from tinker_cookbook.rl.rollouts import do_batch_rollout, do_group_rollout, finished_groups
from tinker_cookbook.rl.types import StopReason, TrajectoryGroup

CLAMP = TerminationRewardPolicy(zero_reward_on_limit=True)
IN_TIME = RolloutLimits()
TWO_TURNS = RolloutLimits(max_turns=2)
NO_TIME = RolloutLimits(rollout_timeout_seconds=5.0)


class Limited(TalkEnv):
    """Three turns of reward 0.1, within limits."""

    def __init__(self, rollout_limits: RolloutLimits, reward: float = 0.1):
        super().__init__(turns=3, on_step=self.hang if rollout_limits is NO_TIME else None)
        self.rollout_limits, self.reward = rollout_limits, reward

    async def hang(self, turn: int) -> None:
        if turn == 1:
            await forever()

    async def step(self, action, *, extra=None):
        result = await super().step(action, extra=extra)
        result.reward = self.reward
        return result


class Graded(Members):
    """Grades its members `grades`."""

    def __init__(self, limits: list[RolloutLimits], grades: list[float], reward: float = 0.1):
        super().__init__(len(limits), lambda call, i: Limited(limits[i], reward))
        self.grades = grades

    async def compute_group_rewards(self, trajectory_group, env_group):
        self.life.append("rewards")
        return [(grade, {"grade": grade}) for grade in self.grades]


class Same(Talker):
    """Says the same every time."""

    async def __call__(self, model_input, stop, **options: Any):
        return said([4])


def roll(builder: Graded, termination: TerminationRewardPolicy | None) -> TrajectoryGroup:
    return run(do_group_rollout(builder, Same(), termination=termination))


class TestClamp:
    def test_graded_first_then_total_lowered_to_at_most_zero(self) -> None:
        limits = [TWO_TURNS, TWO_TURNS, IN_TIME, NO_TIME, IN_TIME]
        group = roll(Graded(limits, [1.0, -1.0, 1.0, 0.5, -1.0]), CLAMP)
        assert group.get_total_rewards() == pytest.approx([0.0, -0.8, 1.3, 0.0, -0.7])
        assert group.get_total_rewards()[0] == group.get_total_rewards()[3] == 0.0, "exactly"
        assert [m.get("zero_reward_on_limit") for m in group.metrics_G] == [1, None, None, 1, None]
        assert [m["grade"] for m in group.metrics_G] == [1.0, -1.0, 1.0, 0.5, -1.0], "what the grader said stays"

    def test_only_when_asked_and_only_for_the_reasons_asked_for(self) -> None:
        limits = [TWO_TURNS, NO_TIME]
        for policy in (None, TerminationRewardPolicy()):
            group = roll(Graded(limits, [1.0, 1.0]), policy)
            assert group.get_total_rewards() == pytest.approx([1.2, 1.1])
            assert not any("zero_reward_on_limit" in metrics for metrics in group.metrics_G)
        only = TerminationRewardPolicy(zero_reward_on_limit=True, limit_stop_reasons=("max_turns",))
        assert roll(Graded(limits, [1.0, 1.0]), only).get_total_rewards() == pytest.approx([0.0, 1.1])

    def test_a_batch_applies_it_too(self) -> None:
        (group,) = finished_groups(
            run(do_batch_rollout([Graded([TWO_TURNS], [1.0])], Same(), RolloutConfig(termination=CLAMP)))
        )
        assert group.get_total_rewards() == [0.0]

    def test_which_reasons_are_limits(self) -> None:
        others = {StopReason.COMPLETED, StopReason.TOOL_STOPPED, StopReason.TOOL_ERROR}
        others |= {StopReason.CONTEXT_OVERFLOW, StopReason.PARSE_ERROR}
        assert set(DEFAULT_LIMIT_STOP_REASONS) == set(StopReason) - others and len(DEFAULT_LIMIT_STOP_REASONS) == 5


def test_how_episodes_ended_is_a_share_of_all() -> None:
    group = roll(Graded([TWO_TURNS, IN_TIME, NO_TIME, IN_TIME, NO_TIME, IN_TIME, IN_TIME, IN_TIME], [1.0] * 8), CLAMP)
    metrics = compute_trajectory_metrics([group], [["a"]])
    stops = {key: value for key, value in metrics.items() if key.startswith("env/all/stop/")}
    assert stops == {
        "env/all/stop/completed": 0.625,
        "env/all/stop/max_turns": 0.125,
        "env/all/stop/rollout_timeout": 0.25,
    }
    assert metrics["env/all/zero_reward_on_limit"] == 0.375 and metrics["env/all/grade"] == 1.0


class TestGrading:
    def test_it_is_skipped_only_when_all_members_timed_out(self) -> None:
        policy = TerminationRewardPolicy(zero_reward_on_limit=True, skip_grading_on_timeout=True)
        builder = Graded([NO_TIME, NO_TIME], [-1.0, 1.0])
        group = roll(builder, policy)
        assert group.get_total_rewards() == [0.0, 0.0] and "rewards" not in builder.life
        assert group.metrics_G == [{"zero_reward_on_limit": 1}] * 2
        assert roll(Graded([NO_TIME, NO_TIME], [-1.0, 1.0]), CLAMP).get_total_rewards() == pytest.approx([-0.9, 0.0])
        unbounded = Graded([NO_TIME, NO_TIME], [-1.0, 1.0])
        assert roll(unbounded, TerminationRewardPolicy(skip_grading_on_timeout=True)).get_total_rewards()[1] > 1
        some = Graded([NO_TIME, IN_TIME], [-1.0, 1.0])
        assert roll(some, policy).get_total_rewards() == pytest.approx([-0.9, 1.3]) and "rewards" in some.life

    def test_a_grader_that_hangs_is_an_error_that_names_the_builder(self) -> None:
        class Hangs(Graded):
            async def compute_group_rewards(self, trajectory_group, env_group):
                await forever()
                return []

        policy = TerminationRewardPolicy(grader_timeout_seconds=900.0)
        builder = Hangs([IN_TIME], [0.0])
        with pytest.raises(
            RolloutTimeoutError, match=r"of Hangs \[numbers\] was not done after grader_timeout_seconds=900"
        ):
            roll(builder, policy)
        assert builder.life == ["make 0", "cleanup 0"]
        with pytest.raises(GroupFailedError):
            run(do_group_rollout(Hangs([IN_TIME], [0.0]), Same(), RetryOnFailure(), policy))

    def test_its_own_timeout_is_its_own_error(self) -> None:
        class GivesUp(Graded):
            async def compute_group_rewards(self, trajectory_group, env_group):
                raise TimeoutError("judge")

        with pytest.raises(TimeoutError, match="judge"):
            roll(GivesUp([IN_TIME], [0.0]), TerminationRewardPolicy(grader_timeout_seconds=900.0))


class TestSettings:
    @pytest.mark.parametrize("name", list(chz.chz_fields(RolloutLimits)))
    def test_every_limit_is_positive(self, name: str) -> None:
        with pytest.raises(ConfigurationError, match=f"^{name}=0: must be positive, or None for no limit"):
            RolloutLimits(**{name: 0})

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"max_consecutive": -1}, "max_consecutive=-1: must be at least 0"),
            ({"penalty_per_error": -0.5}, "penalty_per_error=-0.5: must be at least 0"),
            ({"retry_message_template": "no {such}"}, "{details} is the only placeholder"),
            ({"retry_message_template": "no {"}, "write braces as {{ and }}"),
            ({"retry_message_template": "no"}, "must contain {details}"),
        ],
    )
    def test_parse_errors(self, settings: dict[str, Any], message: str) -> None:
        with pytest.raises(ConfigurationError) as raised:
            ParseErrorPolicy(**settings)
        assert message in str(raised.value)

    def test_the_answer_to_a_parse_error_says_what_is_wrong(self) -> None:
        assert "no closing brace" in ParseErrorPolicy().retry_message("no closing brace")
        assert ParseErrorPolicy(retry_message_template="{{}} {details}").retry_message("x") == "{} x"
        assert len(ParseErrorPolicy(retry_message_template="{details}!").retry_message("x" * 99_999)) == MAX_DETAILS + 1

    def test_a_grader_has_some_time(self) -> None:
        with pytest.raises(ConfigurationError, match="grader_timeout_seconds=-1"):
            TerminationRewardPolicy(grader_timeout_seconds=-1.0)
