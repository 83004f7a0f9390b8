"""One rollout: the order of a turn, what ends it and how that is told, what a policy may sample, hooks and timeouts."""

import asyncio
from typing import Any

import pytest
import tinker
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes import said
from tests.rl.arena import TalkEnv, Talker, ToldEnv, forever, run, seconds
from tinker_cookbook.completers import TokenCompleter, TokensWithLogprobs
from tinker_cookbook.exceptions import ConfigurationError, DataValidationError
from tinker_cookbook.rl.data_processing import trajectory_to_data
from tinker_cookbook.rl.rollout_limits import ParseErrorPolicy, RolloutLimits
from tinker_cookbook.rl.rollout_presets import RolloutConfig
from tinker_cookbook.rl.rollout_runner import (
    MissingSeamError,
    RolloutHooks,
    RolloutState,
    SamplingTurnTimeoutError,
    run_rollout,
    stop_reason_from_metrics,
)
from tinker_cookbook.rl.rollouts import do_single_rollout
from tinker_cookbook.rl.types import InitialObservationOverflow, StepResult, StopReason, Trajectory


def stops(trajectory: Trajectory) -> list[list[str]]:
    """The stop metrics of each transition."""
    return [[key for key in t.metrics if key.startswith("stop/")] for t in trajectory.transitions]


def ended(trajectory: Trajectory, reason: str, turns: int) -> bool:
    """Whether it ended for this reason, said once and only at the end, after that many transitions."""
    last = trajectory.transitions[-1].metrics.get(f"stop/{reason}")
    return (
        trajectory.stop_reason == reason
        and last == 1
        and stops(trajectory) == [[]] * (turns - 1) + [[f"stop/{reason}"]]
    )


class Told(RolloutHooks):
    """Notes its calls with the turn, injects `messages` before turn 1, and answers `reasons[reason]`."""

    def __init__(self, log: list[str], messages: list[Any] | None = None, **reasons: str | None):
        self.log, self.messages, self.reasons, self.states = log, messages, reasons, list[RolloutState]()

    async def on_turn_begin(self, state):
        self.states.append(state)
        self.log.append(f"turn {state.turn_index}")
        return self.messages if state.turn_index == 1 else None

    async def on_stop_reason(self, reason, state):
        self.log.append(f"stop {reason}")
        return self.reasons.get(reason, reason)

    async def on_grade(self, state):
        self.log.append("grade")

    async def on_artifacts(self, state):
        self.log.append(f"artifacts {state.turn_index}")


class TestTurn:
    def test_the_order_of_things(self) -> None:
        log: list[str] = []
        env = ToldEnv(turns=2, log=log)
        policy = Talker(said([4]), said([5], "length"), log=log)
        hooks = Told(log, messages=[{"role": "user", "content": "50"}])
        run(
            run_rollout(
                policy, env, hooks=hooks, limits=RolloutLimits(max_tool_calls=3), parse_errors=ParseErrorPolicy()
            )
        )
        assert log == [
            *("max_tool_calls 3", "max_consecutive 0", "first"),
            *("turn 0", "sample", "step stop"),
            *("turn 1", "inject_messages", "sample", "step length"),
            *("stop completed", "grade", "artifacts 2"),
        ]

    def test_what_is_recorded(self) -> None:
        env = ToldEnv(turns=2, metrics={"good": 1})
        policy = Talker(said([4]), said([5, 6]))
        trajectory = run(run_rollout(policy, env, hooks=Told([], messages=[{"role": "user", "content": "50"}])))
        assert [t.ob.to_ints() for t in trajectory.transitions] == [[1, 2, 3], [1, 2, 3, 4, 99, 50]]
        assert [call.prompt for call in policy.calls] == [t.ob.to_ints() for t in trajectory.transitions]
        assert [call.stop for call in policy.calls] == [[7], [70]]
        assert [t.ac.tokens for t in trajectory.transitions] == [[4], [5, 6]]
        assert [t.reward for t in trajectory.transitions] == [1.0, 1.0]
        assert [t.episode_done for t in trajectory.transitions] == [False, True]
        assert trajectory.transitions[-1].metrics == {"good": 1, "stop/completed": 1}
        assert trajectory.final_ob.to_ints() == [1, 2, 3, 4, 99, 50, 5, 6, 99]
        assert env.metrics == {"good": 1}, "the env's own dict is left alone"

    def test_the_last_step_needs_no_next_observation(self) -> None:
        class NoNext(TalkEnv):
            async def step(self, action, *, extra=None):
                result = await super().step(action, extra=extra)
                return StepResult(result.reward, True, None, None)

        trajectory = run(run_rollout(Talker(said([4])), NoNext()))
        assert ended(trajectory, "completed", 1) and trajectory.final_ob.length == 0
        assert len(trajectory_to_data(trajectory, 1.0)) == 1

    def test_a_step_that_is_not_the_last_does(self) -> None:
        class NoNext(TalkEnv):
            async def step(self, action, *, extra=None):
                return StepResult(0.0, False, None, [7])

        with pytest.raises(
            DataValidationError, match=r"NoNext\.step: next_observation is None, but the rollout continues"
        ):
            run(run_rollout(Talker(said([4])), NoNext()))

    def test_max_turns_comes_before_the_hook_and_budgets_after_it(self) -> None:
        log: list[str] = []
        env = TalkEnv(turns=9, log=log)
        run(run_rollout(Talker(said([4]), log=log), env, limits=RolloutLimits(max_turns=1), hooks=Told(log)))
        assert log[-3:] == ["step stop", "stop max_turns", "artifacts 1"]
        log.clear()
        limits = RolloutLimits(max_trajectory_tokens=6)
        run(run_rollout(Talker(said([4]), log=log), TalkEnv(turns=9, log=log), limits=limits, hooks=Told(log)))
        assert log[-4:] == ["step stop", "turn 1", "stop max_tokens", "artifacts 1"]


class TestEnds:
    def test_the_env_says_why(self) -> None:
        env = TalkEnv(metrics={"stop/tool_stopped": 1.0})
        assert ended(run(run_rollout(Talker(said([4])), env)), "tool_stopped", 1)

    @pytest.mark.parametrize(
        ("limits", "reason", "turns"),
        [
            ({"max_turns": 2}, "max_turns", 2),
            ({"max_trajectory_tokens": 8}, "max_tokens", 2),  # prompts of 3, 5 and 7 tokens: 1 left is as good as none
            ({"max_trajectory_tokens": 9}, "max_tokens", 3),
            ({"max_sampled_tokens": 3}, "max_sampled_tokens", 2),
            ({"max_sampled_tokens": 3, "max_trajectory_tokens": 8}, "max_tokens", 2),  # both: the trajectory's is told
            ({"max_sampled_tokens": 3, "max_trajectory_tokens": 8, "max_turns": 2}, "max_turns", 2),
            ({"max_turn_tokens": 1}, "completed", 5),
        ],
    )
    def test_limits(self, limits: dict[str, int], reason: str, turns: int) -> None:
        log: list[str] = []
        policy = Talker(*[said([4])] * 5)
        trajectory = run(run_rollout(policy, TalkEnv(turns=5), limits=RolloutLimits(**limits), hooks=Told(log)))
        assert ended(trajectory, reason, turns) and len(policy.calls) == turns
        assert [turn.episode_done for turn in trajectory.transitions] == [False] * (turns - 1) + [True]
        assert ("grade" in log) == (reason == "completed") and log[-1] == f"artifacts {turns}"

    def test_a_first_prompt_that_is_too_long(self) -> None:
        class TooLong(TalkEnv):
            async def initial_observation(self) -> Any:
                return InitialObservationOverflow(-0.5, {"overflow": 1}, {"why": "long"})

        log: list[str] = []
        trajectory = run(run_rollout(Talker(), TooLong(), hooks=Told(log, context_overflow=None)))
        assert ended(trajectory, "context_overflow", 1) and log == ["artifacts 1"]
        (only,) = trajectory.transitions
        assert (only.reward, only.ob.length, only.ac.tokens, only.logs) == (-0.5, 0, [], {"why": "long"})
        assert trajectory_to_data(trajectory, 1.0) == []

    def test_an_overflow_has_one_stop_reason_the_env_s_own_if_it_gives_one(self) -> None:
        for told, reason in (({}, "context_overflow"), ({"stop/too_big": 1}, "too_big")):

            class TooLong(TalkEnv):
                async def initial_observation(self, told: Any = told) -> Any:
                    return InitialObservationOverflow(-0.5, {"overflow": 1, **told})

            trajectory = run(run_rollout(Talker(), TooLong()))
            assert trajectory.stop_reason == reason
            assert trajectory.transitions[0].metrics == {"overflow": 1, f"stop/{reason}": 1}

    def test_a_budget_that_the_first_prompt_exhausts_leaves_one_empty_turn_without_data(self) -> None:
        trajectory = run(run_rollout(Talker(), TalkEnv(), limits=RolloutLimits(max_trajectory_tokens=4)))
        assert ended(trajectory, "max_tokens", 1)
        assert trajectory.transitions[0].reward == 0.0 and trajectory_to_data(trajectory, 1.0) == []

    def test_a_hook_may_call_it_by_another_name(self) -> None:
        trajectory = run(run_rollout(Talker(said([4])), TalkEnv(), hooks=Told([], completed="bored")))
        assert ended(trajectory, "bored", 1)

    def test_a_hook_may_go_on_after_the_env_ended(self) -> None:
        class Twice(Told):
            async def on_stop_reason(self, reason, state):
                return None if state.turn_index == 1 else await super().on_stop_reason(reason, state)

        class Endless(TalkEnv):
            async def step(self, action, *, extra=None):
                result = await super().step(action, extra=extra)
                result.episode_done, result.metrics = True, {"stop/tool_stopped": 1}
                return result

        log: list[str] = []
        trajectory = run(run_rollout(Talker(said([4]), said([5])), Endless(), hooks=Twice(log)))
        assert ended(trajectory, "tool_stopped", 2) and log.count("grade") == 1
        assert [t.episode_done for t in trajectory.transitions] == [False, True]

    def test_a_hook_may_go_on_beyond_a_budget_which_then_does_not_bound_the_turn(self) -> None:
        log: list[str] = []
        limits = RolloutLimits(max_sampled_tokens=2, max_trajectory_tokens=20)
        policy = Talker(*[said([4])] * 3)
        trajectory = run(run_rollout(policy, TalkEnv(turns=3), limits=limits, hooks=Told(log, max_sampled_tokens=None)))
        assert ended(trajectory, "completed", 3)
        assert [call.options for call in policy.calls] == [{"max_tokens": 2}, {"max_tokens": 15}, {"max_tokens": 13}]
        assert log.count("stop max_sampled_tokens") == 2

    def test_replies_that_were_cut_off_are_counted_if_the_rollout_goes_on(self) -> None:
        policy = Talker(said([4], "length"), said([4]), said([4], "length"), said([4], "length"))
        hooks = Told([])
        trajectory = run(run_rollout(policy, TalkEnv(turns=4), hooks=hooks))
        assert trajectory.transitions[-1].metrics["num_truncations_max_turn_tokens"] == 2
        assert [state.num_length_truncations for state in hooks.states] == [0, 1, 1, 2]
        assert [state.sampled_tokens for state in hooks.states] == [0, 1, 2, 3]
        assert [state.observation_tokens for state in hooks.states] == [3, 5, 7, 9]

    def test_reason_from_metrics(self) -> None:
        assert stop_reason_from_metrics({"a": 1, "stop/max_turns": 1}) == StopReason.MAX_TURNS
        assert stop_reason_from_metrics({"stopped": 1}) is None


class TestBudget:
    @given(
        turn=st.none() | st.integers(1, 30),
        trajectory=st.none() | st.integers(2, 60),
        sampled=st.none() | st.integers(2, 30),
        lengths=st.lists(st.integers(1, 9), min_size=4, max_size=4),
    )
    def test_each_call_may_sample_what_the_tightest_limit_leaves(self, turn, trajectory, sampled, lengths) -> None:
        class Obedient(Talker):
            async def __call__(self, model_input, stop, **options):
                reply = await super().__call__(model_input, stop, **options)
                return said(reply.tokens[: options.get("max_tokens")])

        limits = RolloutLimits(max_turn_tokens=turn, max_trajectory_tokens=trajectory, max_sampled_tokens=sampled)
        policy = Obedient(*(said([4] * length) for length in lengths))
        result = run(run_rollout(policy, TalkEnv(turns=4), limits=limits))
        spent = 0
        for call, transition in zip(policy.calls, result.transitions, strict=False):
            left = [trajectory - len(call.prompt)] if trajectory is not None else []
            left += [sampled - spent] if sampled is not None else []
            assert all(tokens > 1 for tokens in left)
            bounds = [*left, turn] if turn is not None else left
            assert call.options == ({"max_tokens": min(bounds)} if bounds else {})
            spent += len(transition.ac.tokens)
        assert sampled is None or spent <= sampled
        assert trajectory is None or all(
            t.ob.length + len(t.ac.tokens) <= max(trajectory, 0) for t in result.transitions
        )

    def test_a_completer_that_knows_no_budget_works_as_long_as_there_is_none(self) -> None:
        class Plain(TokenCompleter):
            async def __call__(self, model_input, stop) -> TokensWithLogprobs:  # pyright: ignore
                return said([4])

        assert ended(run(run_rollout(Plain(), TalkEnv(), limits=RolloutLimits(max_turns=1))), "completed", 1)

    def test_limits_are_the_given_ones_else_of_the_config_else_of_the_env(self) -> None:
        class Limited(TalkEnv):
            rollout_limits = RolloutLimits(max_turns=3)

        def turns(**options: Any) -> int:
            return len(run(run_rollout(Talker(*[said([4])] * 5), Limited(turns=5), **options)).transitions)

        config = RolloutConfig(limits=RolloutLimits(max_turns=2))
        assert turns(limits=RolloutLimits(max_turns=1), config=config) == 1
        assert turns(config=config) == 2
        assert turns() == turns(config=RolloutConfig()) == 3
        assert len(run(do_single_rollout(Talker(*[said([4])] * 5), Limited(turns=5))).transitions) == 3


class TestSeams:
    def test_an_env_of_the_cookbook_s_first_form_is_not_told_why_a_reply_ended(self) -> None:
        class First(TalkEnv):
            async def step(self, action):  # pyright: ignore[reportIncompatibleMethodOverride]
                return await super().step(action)

        class Broken(First):
            async def step(self, action):  # pyright: ignore[reportIncompatibleMethodOverride]
                raise TypeError("step() got an unexpected keyword argument 'extra'")

        class Any_(TalkEnv):
            async def step(self, *arguments, **named):
                return await super().step(*arguments, **named)

        for env, told in ((First(), "step None"), (Any_(), "step length")):
            run(run_rollout(Talker(said([4], "length")), env))
            assert env.log[-1] == told
        with pytest.raises(TypeError, match="unexpected keyword"):  # an error of its own is not taken for that
            run(run_rollout(Talker(said([4]), said([4])), Broken()))

    def test_what_an_env_cannot_do_is_refused_before_it_starts(self) -> None:
        env = TalkEnv()
        with pytest.raises(ConfigurationError, match=r"max_tool_calls=3: TalkEnv has no method set_max_tool_calls"):
            run(run_rollout(Talker(), env, limits=RolloutLimits(max_tool_calls=3)))
        with pytest.raises(ConfigurationError, match=r"parse_errors: TalkEnv has no method set_parse_error_policy"):
            run(run_rollout(Talker(), env, config=RolloutConfig(parse_errors=ParseErrorPolicy())))
        assert env.log == []

    def test_messages_for_an_env_that_takes_none(self) -> None:
        hooks = Told([], messages=[{"role": "user", "content": "50"}])
        with pytest.raises(MissingSeamError, match="message injection by on_turn_begin: TalkEnv has no method inject"):
            run(run_rollout(Talker(said([4])), TalkEnv(turns=2), hooks=hooks))

    def test_injected_messages_count_towards_the_budget(self) -> None:
        hooks = Told([], messages=[{"role": "user", "content": str(i)} for i in range(20, 29)])
        limits = RolloutLimits(max_trajectory_tokens=15)
        trajectory = run(run_rollout(Talker(said([4])), ToldEnv(turns=2), hooks=hooks, limits=limits))
        assert ended(trajectory, "max_tokens", 1) and trajectory.final_ob.length == 14


class TestTimeouts:
    def test_a_rollout_that_takes_too_long_keeps_its_turns_and_no_hook_can_help_it(self) -> None:
        log: list[str] = []
        policy = Talker(said([4]), forever)
        limits = RolloutLimits(rollout_timeout_seconds=5.0)
        trajectory = run(
            run_rollout(policy, TalkEnv(turns=2, log=log), limits=limits, hooks=Told(log, rollout_timeout=None))
        )
        assert ended(trajectory, "rollout_timeout", 1)
        assert trajectory.transitions[0].ac.tokens == [4] and log[-1] == "artifacts 1"
        assert "stop rollout_timeout" not in log and "grade" not in log

    def test_a_step_that_hangs_loses_its_turn(self) -> None:
        async def hang(turn: int) -> None:
            if turn == 1:
                await forever()

        limits = RolloutLimits(rollout_timeout_seconds=5.0)
        trajectory = run(run_rollout(Talker(*[said([4])] * 2), TalkEnv(turns=2, on_step=hang), limits=limits))
        assert ended(trajectory, "rollout_timeout", 1)

    def test_no_time_for_a_first_turn(self) -> None:
        trajectory = run(run_rollout(Talker(forever), TalkEnv(), limits=RolloutLimits(rollout_timeout_seconds=5.0)))
        assert ended(trajectory, "rollout_timeout", 1) and trajectory_to_data(trajectory, 1.0) == []

    def test_an_env_that_holds_up_the_loop_is_noticed_between_turns(self) -> None:
        async def hold_up(turn: int) -> None:
            asyncio.get_running_loop().now += 3.0  # pyright: ignore  (as a computation would)

        limits = RolloutLimits(rollout_timeout_seconds=5.0)
        policy = Talker(*[said([4])] * 4)
        trajectory = run(run_rollout(policy, TalkEnv(turns=4, on_step=hold_up), limits=limits))
        assert ended(trajectory, "rollout_timeout", 2)
        log: list[str] = []
        policy, hooks = Talker(*[said([4])] * 4), Told(log, rollout_timeout=None)
        assert ended(
            run(run_rollout(policy, TalkEnv(turns=4, on_step=hold_up), limits=limits, hooks=hooks)), "completed", 4
        )
        assert log.count("stop rollout_timeout") == 2

    def test_a_sampling_call_that_takes_too_long_is_an_error_that_says_so(self) -> None:
        limits = RolloutLimits(sampling_turn_timeout_seconds=2.0, rollout_timeout_seconds=60.0)
        with pytest.raises(
            SamplingTurnTimeoutError, match=r"turn 1 of TalkEnv.*5 tokens.*sampling_turn_timeout_seconds=2"
        ):
            run(run_rollout(Talker(said([4]), forever), TalkEnv(turns=2), limits=limits))

    def test_each_sampling_call_has_its_own_time(self) -> None:
        policy = Talker(*[lambda: seconds(1.5)] * 3)
        limits = RolloutLimits(sampling_turn_timeout_seconds=2.0)
        assert ended(run(run_rollout(policy, TalkEnv(turns=3), limits=limits)), "completed", 3)

    def test_a_timeout_of_the_env_or_the_policy_is_their_own_error(self) -> None:
        limits = RolloutLimits(rollout_timeout_seconds=5.0, sampling_turn_timeout_seconds=2.0)
        error = TimeoutError("sandbox")
        with pytest.raises(TimeoutError) as raised:
            run(run_rollout(Talker(error), TalkEnv(), limits=limits))
        assert raised.value is error

    def test_elapsed_time_is_told(self) -> None:
        hooks = Told([])
        run(run_rollout(Talker(*[lambda: seconds(1.5)] * 2), TalkEnv(turns=2), hooks=hooks))
        assert [state.elapsed_seconds for state in hooks.states] == [0.0, 1.5]


def test_masked_parse_errors_keep_their_tokens_and_train_nothing() -> None:
    class Garbled(TalkEnv):
        async def step(self, action, *, extra=None):
            result = await super().step(action, extra=extra)
            result.metrics = {"parse_error_masked": 1.0 if self.turn in self.garbled else 0.0}
            return result

        garbled: tuple[int, ...] = (1, 3)

    policy = Talker(said([4, 5]), said([6]), said([8]))
    trajectory = run(run_rollout(policy, Garbled(turns=3)))
    (datum,) = trajectory_to_data(trajectory, 2.0)
    inputs = {key: value.tolist() for key, value in datum.loss_fn_inputs.items()}
    assert inputs["target_tokens"] == [2, 3, 4, 5, 99, 6, 99, 8]
    assert inputs["mask"] == [0, 0, 0, 0, 0, 1, 0, 0]
    assert inputs["advantages"] == [0, 0, 0, 0, 0, 2, 0, 0]
    assert inputs["logprobs"] == [0, 0, *said([4, 5]).logprobs, 0, *said([6]).logprobs, 0, *said([8]).logprobs]
    Garbled.garbled = (1, 2, 3)
    assert trajectory_to_data(run(run_rollout(Talker(*policy.replies), Garbled(turns=3))), 2.0) == []
    assert isinstance(datum, tinker.Datum)
