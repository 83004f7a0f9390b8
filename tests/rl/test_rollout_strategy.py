"""What becomes of a group when rollouts of it fail: who is run again, in what order it comes back, and what is counted."""

import asyncio
import copy
import math
import pickle
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.debate.arena import ITEM, RIGHT, WRONG, JudgeByIndex, make_protocol, make_renderer, three_turns
from tests.fakes import FakeServiceClient, ScriptedCompleter, said, seeded_reply
from tests.rl.arena import Members, TalkEnv, Talker, forever, run
from tinker_cookbook.completers import TokenCompleter, TokensWithLogprobs
from tinker_cookbook.debate.env import DebateGroupBuilder
from tinker_cookbook.debate.judges import Winner
from tinker_cookbook.exceptions import (
    AllTrajectoriesFailedError,
    ConfigurationError,
    GroupFailedError,
    RolloutTimeoutError,
)
from tinker_cookbook.rl.rollout_presets import RolloutConfig
from tinker_cookbook.rl.rollout_strategy import (
    FailFast,
    MinViableGroup,
    RetryOnFailure,
    RolloutResult,
    RolloutStrategy,
    rollout_strategy_from_config,
)
from tinker_cookbook.rl.rollouts import (
    FailedGroup,
    RolloutErrorCounter,
    do_batch_rollout,
    do_group_rollout,
    do_group_rollout_and_filter_constant_reward,
    do_single_rollout,
)
from tinker_cookbook.rl.types import RolloutError, TrajectoryGroup
from tinker_cookbook.runs.loggers import dump_config

TOLERANT = [RetryOnFailure(), MinViableGroup()]


class Keyed(TokenCompleter):
    """Says the keys of its forks, one token a key, so that a trajectory tells who spoke in it."""

    def __init__(self, keys: tuple[int | str, ...] = ()):
        self.keys = keys

    async def __call__(self, model_input, stop, *, max_tokens: int | None = None) -> TokensWithLogprobs:
        return said([len(key) if isinstance(key, str) else key for key in self.keys])

    def fork(self, *key: int | str) -> "Keyed":
        return Keyed((*self.keys, *key))


class Flaky(TalkEnv):
    """Dallies, then fails with `error` if there is one. Its prompt is [member, call of make_envs]."""

    def __init__(self, call: int, member: int, error: Exception | None = None, delay: int = 0):
        super().__init__(prompt=[member, call])
        self.error, self.delay = error, delay

    async def step(self, action, *, extra=None):
        for _ in range(self.delay):
            await asyncio.sleep(0)
        if self.error is not None:
            raise self.error
        return await super().step(action, extra=extra)


def flaky(size: int, fails: dict[int, int], coordinated: bool = False, delays: Sequence[int] = ()) -> Members:
    """Member i fails in its first `fails[i]` attempts."""

    def make(call: int, member: int) -> Flaky:
        error = OSError(f"sandbox {member} lost") if call < fails.get(member, 0) else None
        return Flaky(call, member, error, delays[member] if delays else 0)

    return Members(size, make, coordinated)


def seats(group: TrajectoryGroup) -> list[list[int]]:
    """[member, call of make_envs] of each trajectory."""
    return [trajectory.transitions[0].ob.to_ints() for trajectory in group.trajectories_G]


class TestFailFast:
    def test_the_error_itself_says_whose_it_was(self) -> None:
        builder = flaky(3, {1: 1})
        with pytest.raises(OSError, match="sandbox 1 lost") as raised:
            run(do_batch_rollout([flaky(3, {}), builder], Keyed()))
        notes = "\n".join(raised.value.__notes__)
        assert "in the rollout of member 1 (Flaky), attempt 1" in notes
        assert "in group 1, Members [numbers]" in notes
        assert builder.life == ["make 0", "cleanup 0"]

    def test_the_group_may_have_a_name(self) -> None:
        with pytest.raises(OSError) as raised:
            run(do_group_rollout(flaky(3, {1: 1}), Keyed(), name="3 of step 7"))
        assert raised.value.__notes__[-1] == "in group 3 of step 7"

    def test_it_is_what_no_strategy_means(self) -> None:
        assert rollout_strategy_from_config(None) == rollout_strategy_from_config(False) == FailFast()
        assert rollout_strategy_from_config(True) == RetryOnFailure(max_retries=3, per_rollout_timeout=0)
        given = MinViableGroup(min_successful=2)
        assert rollout_strategy_from_config(given) is given


class TestRetryOnFailure:
    def test_only_the_failed_member_is_run_again_and_takes_its_place(self) -> None:
        builder = flaky(4, {2: 2, 0: 1})
        group = run(do_group_rollout(builder, Keyed(), RetryOnFailure()))
        assert seats(group) == [[0, 1], [1, 0], [2, 2], [3, 0]]
        assert group.metrics_G == [{"group": 4}] * 4 and group.get_total_rewards() == [11.0] * 4
        assert [error.error_type for error in group.rollout_errors] == ["OSError"] * 3
        assert group.rollout_errors[0].error_message == "sandbox 0 lost; in the rollout of member 0 (Flaky), attempt 1"
        makes, rest = builder.life[:3], builder.life[3:]
        assert makes == ["make 0", "make 1", "make 2"] and rest[0] == "rewards"
        assert sorted(rest[1:]) == ["cleanup 0", "cleanup 1", "cleanup 2"]

    def test_a_member_that_never_comes_through_fails_the_group(self) -> None:
        builder = flaky(3, {1: 99})
        with pytest.raises(
            GroupFailedError,
            match=r"Members \[numbers\] given up after 3 rounds: 2/3 members, below the minimum viable group size 3",
        ) as raised:
            run(do_group_rollout(builder, Keyed(), RetryOnFailure(max_retries=2)))
        assert [error.error_type for error in raised.value.errors] == ["OSError"] * 3
        assert "sandbox 1 lost; in the rollout of member 1 (Flaky), attempt 3" in str(raised.value)
        assert isinstance(raised.value.__cause__, OSError)
        assert "rewards" not in builder.life
        assert sorted(builder.life[3:]) == ["cleanup 0", "cleanup 1", "cleanup 2"]

    def test_a_coordinated_group_is_played_again_as_a_whole(self) -> None:
        builder = flaky(4, {2: 2, 0: 1}, coordinated=True)
        group = run(do_group_rollout(builder, Keyed(), RetryOnFailure()))
        assert seats(group) == [[i, 2] for i in range(4)]
        assert builder.life == ["make 0", "cleanup 0", "make 1", "cleanup 1", "make 2", "rewards", "cleanup 2"]
        assert len(group.rollout_errors) == 2, "one for each time it was played again"

    def test_peers_that_wait_for_a_failed_member_do_not_hang_a_coordinated_group(self) -> None:
        class Waits(TalkEnv):
            async def step(self, action, *, extra=None) -> Any:
                await forever()

        def make(call: int, member: int) -> TalkEnv:
            if call > 0:
                return Flaky(call, member)
            return Flaky(call, member, OSError("lost")) if member == 1 else Waits()

        group = run(do_group_rollout(Members(2, make, coordinated=True), Keyed(), RetryOnFailure(max_retries=1)))
        assert seats(group) == [[0, 1], [1, 1]]

    def test_a_rollout_that_hangs_is_run_again_and_named(self) -> None:
        class Waits(TalkEnv):
            async def step(self, action, *, extra=None) -> Any:
                await forever()

        def make(call: int, member: int) -> TalkEnv:
            return Waits() if (call, member) == (0, 1) else Flaky(call, member)

        group = run(do_group_rollout(Members(2, make), Keyed(), RetryOnFailure(per_rollout_timeout=30.0)))
        assert seats(group) == [[0, 0], [1, 1]]
        (error,) = group.rollout_errors
        assert error.error_type == "RolloutTimeoutError"
        assert error.error_message.startswith("member 1 (Waits) was not done after per_rollout_timeout=30.0 seconds")
        assert issubclass(RolloutTimeoutError, TimeoutError)

    def test_a_timeout_of_the_env_is_its_own_error(self) -> None:
        builder = Members(1, lambda call, i: Flaky(call, i, TimeoutError("sandbox slow") if call == 0 else None))
        group = run(do_group_rollout(builder, Keyed(), RetryOnFailure(per_rollout_timeout=30.0)))
        assert [error.error_type for error in group.rollout_errors] == ["TimeoutError"]

    def test_envs_that_cannot_be_made_use_up_a_round(self) -> None:
        class Closed(Members):
            async def make_envs(self):
                envs = await super().make_envs()
                if self.opened == 0:
                    raise ConnectionError("no sandbox left")
                return envs

        for coordinated in (False, True):
            builder = Closed(2, Flaky, coordinated)
            group = run(do_group_rollout(builder, Keyed(), RetryOnFailure(max_retries=1)))
            assert seats(group) == [[0, 1], [1, 1]]
            assert [error.error_message for error in group.rollout_errors] == ["no sandbox left; in make_envs"]
            assert sorted(builder.life) == ["cleanup 0", "cleanup 1", "make 0", "make 1", "rewards"]
        with pytest.raises(GroupFailedError, match="after 1 round: no env came through"):
            run(do_group_rollout(Closed(2, Flaky), Keyed(), RetryOnFailure(max_retries=0)))

    @pytest.mark.parametrize("strategy", [RetryOnFailure(), MinViableGroup(min_successful=3)])
    def test_a_retry_may_make_another_number_of_members(self, strategy: RolloutStrategy) -> None:
        class OneByOne(Members):
            async def make_envs(self):
                envs = await super().make_envs()
                return envs if self.opened == 0 else envs[:1]

        builder = OneByOne(
            3, lambda call, i: Flaky(call, i, OSError("lost") if (call, i) in {(0, 0), (0, 2)} else None)
        )
        group = run(do_group_rollout(builder, Keyed(), strategy))
        assert seats(group) == [[0, 1], [1, 0], [0, 2]], "members 0 and 2 are played by the one env of a round each"
        assert [t.transitions[0].ac.tokens[-1] for t in group.trajectories_G] == [0, 1, 2]
        assert sorted(builder.life[4:]) == ["cleanup 0", "cleanup 1", "cleanup 2"]

    def test_more_fresh_envs_than_members_are_not_all_played(self) -> None:
        class Growing(Members):
            async def make_envs(self):
                envs = await super().make_envs()
                return [*envs, *envs] if self.opened else envs

        builder = Growing(2, lambda call, i: Flaky(call, i, OSError("lost") if call == 0 else None))
        assert seats(run(do_group_rollout(builder, Keyed(), RetryOnFailure()))) == [[0, 1], [1, 1]]

    def test_what_a_builder_opened_is_closed_by_the_object_that_opened_it(self) -> None:
        opened: list[object] = []
        closed: list[object] = []

        class Opens(Members):
            box: object = None

            async def make_envs(self):
                envs = await super().make_envs()
                self.box = object()
                opened.append(self.box)
                return envs

            async def cleanup(self):
                closed.append(self.box)

        run(do_group_rollout(Opens(2, flaky(2, {0: 2}).make), Keyed(), RetryOnFailure()))
        assert len(opened) == 3 and sorted(map(id, closed)) == sorted(map(id, opened))

    def test_a_cancelled_group_is_cleaned_up(self) -> None:
        builder = Members(2, lambda call, i: TalkEnv())

        async def main() -> None:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(5):
                    await do_group_rollout(builder, Talker(forever, forever), RetryOnFailure())

        run(main())
        assert builder.life == ["make 0", "cleanup 0"]


class TestMinViableGroup:
    @pytest.mark.parametrize("size", range(1, 9))
    def test_three_quarters_are_enough_unless_told_otherwise(self, size: int) -> None:
        needed = math.ceil(0.75 * size)
        enough = flaky(size, {i: 99 for i in range(size - needed)})
        group = run(do_group_rollout(enough, Keyed(), MinViableGroup()))
        assert seats(group) == [[i, 0] for i in range(size - needed, size)]
        assert len(group.rollout_errors) == size - needed and enough.life.count("make 1") == 0
        too_few = flaky(size, {i: 99 for i in range(size - needed + 1)})
        with pytest.raises(
            GroupFailedError, match=f"{needed - 1}/{size} members, below the minimum viable group size {needed}, came"
        ):
            run(do_group_rollout(too_few, Keyed(), MinViableGroup(max_retries=1)))

    def test_while_there_are_too_few_the_failed_ones_are_run_again(self) -> None:
        group = run(do_group_rollout(flaky(4, {0: 1, 1: 2, 2: 99}), Keyed(), MinViableGroup(min_successful=3)))
        assert seats(group) == [[0, 1], [1, 2], [3, 0]]
        assert group.get_total_rewards() == [11.0] * 3 and group.metrics_G == [{"group": 3}] * 3

    def test_a_coordinated_group_is_whole_or_nothing(self) -> None:
        with pytest.raises(GroupFailedError, match="0/4 members"):
            run(do_group_rollout(flaky(4, {0: 99}, coordinated=True), Keyed(), MinViableGroup(min_successful=1)))
        group = run(do_group_rollout(flaky(4, {0: 1}, coordinated=True), Keyed(), MinViableGroup(min_successful=1)))
        assert seats(group) == [[i, 1] for i in range(4)]

    def test_more_members_than_there_are_cannot_succeed(self) -> None:
        with pytest.raises(ConfigurationError, match="min_successful=5 of a group of 4: lower it"):
            run(do_group_rollout(flaky(4, {}), Keyed(), MinViableGroup(min_successful=5)))


class TestOrder:
    @given(data=st.data(), coordinated=st.booleans())
    def test_members_keep_their_order_and_their_draws_whatever_fails_and_whoever_ends_first(self, data, coordinated):
        size = data.draw(st.integers(1, 6))
        fails = {i: data.draw(st.integers(0, 3), label=f"failures of {i}") for i in range(size)}
        delays = data.draw(st.lists(st.integers(0, 5), min_size=size, max_size=size))
        needed = data.draw(st.integers(1, size))
        strategy = data.draw(st.sampled_from([RetryOnFailure(), MinViableGroup(min_successful=needed)]))
        builder = flaky(size, fails, coordinated, delays)
        group = run(do_group_rollout(builder, Keyed(), strategy))
        members = [seat[0] for seat in seats(group)]
        assert members == sorted(set(members))
        if coordinated:
            assert seats(group) == [[i, max(fails.values())] for i in range(size)]
        elif strategy == RetryOnFailure():
            assert seats(group) == [[i, fails[i]] for i in range(size)]
        else:
            assert len(members) >= needed and all(call == fails[i] for i, call in seats(group))
        for (member, call), trajectory in zip(seats(group), group.trajectories_G, strict=True):
            key = ("member", member) if call == 0 else ("attempt", call, "member", member)
            assert trajectory.transitions[0].ac.tokens == run(Keyed(key)(trajectory.final_ob, [0])).tokens
        assert len([event for event in builder.life if event.startswith("make")]) == len(
            [event for event in builder.life if event.startswith("cleanup")]
        )

    def test_opponents_keep_their_debate(self) -> None:
        class LosesVoice(ScriptedCompleter):
            """Member 1 cannot speak its second turn in the first attempt."""

            failed: list[int] = []  # noqa: RUF012

            async def __call__(self, model_input, stop, *, max_tokens=None):
                if self._key == 1 and self._next == 1 and not self.failed:
                    self.failed.append(1)
                    raise OSError("no voice")
                return await super().__call__(model_input, stop, max_tokens=max_tokens)

            def fork(self, *key):
                forked = super().fork(*key)
                forked.__class__ = LosesVoice
                return forked

        renderer = make_renderer("qwen3_instruct")
        turns = {i: three_turns(renderer, WRONG if i % 2 else RIGHT, f"member {i}") for i in range(4)}
        protocol = make_protocol(renderer, judge=JudgeByIndex((Winner.A, Winner.B)))
        builder = DebateGroupBuilder(protocol, ITEM, 2, (0, 0))
        assert builder.coordinated
        group = run(do_group_rollout(builder, LosesVoice(turns), RetryOnFailure()))
        undisturbed = run(do_group_rollout(builder, ScriptedCompleter(turns)))
        assert len(group.rollout_errors) == 1 and LosesVoice.failed == [1]
        assert group.is_trained() == undisturbed.is_trained() == [True, False, False, True]
        for ours, theirs in zip(group.trajectories_G, undisturbed.trajectories_G, strict=True):
            assert [t.ob for t in ours.transitions] == [t.ob for t in theirs.transitions]


class TestAccounting:
    def test_every_group_of_a_batch_comes_back_trained_or_failed(self) -> None:
        builders = [flaky(2, {}), flaky(2, {0: 99}), flaky(2, {1: 1})]
        groups = run(do_batch_rollout(builders, Keyed(), RolloutConfig(retries=1)))
        assert [type(group) for group in groups] == [TrajectoryGroup, FailedGroup, TrajectoryGroup]
        counter = RolloutErrorCounter()
        for group in groups:
            counter.ingest(group)
        expected = {"rollout_errors/OSError": 3, "rollout_errors/total": 3, "rollout_errors/groups_skipped": 1}
        assert counter.get_metrics() == expected
        counter.ingest(GroupFailedError("late", [RolloutError("KeyError", "x")]))
        assert counter.get_metrics() == {
            "rollout_errors/KeyError": 1,
            "rollout_errors/OSError": 3,
            "rollout_errors/total": 4,
            "rollout_errors/groups_skipped": 2,
        }
        counter.ingest(None)
        assert counter.get_metrics("e")["e/groups_skipped"] == 3 and counter.get_metrics("e")["e/total"] == 4
        resumed = RolloutErrorCounter(copy.copy(counter.counts), counter.groups_skipped)
        assert resumed.get_metrics() == counter.get_metrics()
        assert RolloutErrorCounter().get_metrics() == {}

    @pytest.mark.parametrize("strategy", TOLERANT)
    def test_rewards_that_fail_fail_the_group(self, strategy: RolloutStrategy) -> None:
        class Ungraded(Members):
            async def compute_group_rewards(self, trajectory_group, env_group):
                raise ArithmeticError("no grade")

        builder = Ungraded(2, lambda call, i: Flaky(call, i, OSError("lost") if (call, i) == (0, 0) else None))
        with pytest.raises(
            GroupFailedError, match=r"group Ungraded \[numbers\] failed: ArithmeticError: no grade"
        ) as raised:
            run(do_group_rollout(builder, Keyed(), strategy))
        assert [error.error_type for error in raised.value.errors] == ["OSError", "ArithmeticError"]
        assert isinstance(raised.value.__cause__, ArithmeticError)
        assert builder.life.count("cleanup 0") == 1
        with pytest.raises(ArithmeticError, match="no grade"):
            run(do_group_rollout(Ungraded(1, Flaky), Keyed()))

    def test_a_strategy_of_ones_own(self) -> None:
        class FirstOnly(RolloutStrategy):
            async def execute(self, env_group_builder, policy):  # pyright: ignore[reportIncompatibleMethodOverride]
                envs = list(await env_group_builder.make_envs())[:1]
                return RolloutResult([await do_single_rollout(policy, env) for env in envs], envs)

        builder = Members(3, Flaky)
        group = run(do_group_rollout(builder, Keyed((1,)), FirstOnly()))
        assert seats(group) == [[0, 0]] and builder.life == ["make 0", "rewards", "cleanup 0"]

    @pytest.mark.parametrize("coordinated", [False, True])
    def test_a_mistake_in_the_configuration_is_not_tolerated(self, coordinated: bool) -> None:
        def make(call: int, member: int) -> TalkEnv:
            return Flaky(call, member, ConfigurationError("field=3: must be 4"))

        builder = Members(2, make, coordinated)
        with pytest.raises(ConfigurationError, match="field=3"):
            run(do_batch_rollout([builder], Keyed(), RolloutConfig(retries=3)))
        assert builder.life == ["make 0", "cleanup 0"]

    def test_the_error_keeps_what_failed_when_it_is_pickled(self) -> None:
        error = GroupFailedError("given up", [RolloutError("OSError", "lost")])
        error.add_note("in group 3")
        again = pickle.loads(pickle.dumps(error))
        assert (str(again), again.errors, again.__notes__) == (str(error), error.errors, ["in group 3"])
        assert AllTrajectoriesFailedError is GroupFailedError


class TestFilter:
    def roll(
        self, remove: bool, reply=seeded_reply, **options: Any
    ) -> tuple[TrajectoryGroup | None, FakeServiceClient]:
        class Rewards(TalkEnv):
            async def step(self, action, *, extra=None):
                result = await super().step(action, extra=extra)
                result.reward = float(action[0])
                return result

        service = FakeServiceClient(reply)
        builder = Members(2, lambda call, i: Rewards(prompt=[i]))
        client = service.new_sampler(0)
        return run(do_group_rollout_and_filter_constant_reward(client, builder, 5, 0.7, remove, **options)), service

    def test_groups_whose_rewards_are_the_same_are_removed_when_asked(self, caplog) -> None:
        caplog.set_level("INFO")
        assert self.roll(True, lambda call: [3])[0] is None
        assert "group Members [numbers] removed" in caplog.text
        caplog.clear()
        assert self.roll(True, lambda call: [3], enable_logging=False)[0] is None and caplog.text == ""
        kept, service = self.roll(False, lambda call: [3])
        assert kept is not None and kept.get_total_rewards() == [13.0, 13.0]
        assert {(call.params.max_tokens, call.params.temperature) for call in service.sampled} == {(5, 0.7)}
        mixed, _ = self.roll(True, lambda call: [call.prompt[0]])
        assert mixed is not None and mixed.get_total_rewards() == [10.0, 11.0]


def test_strategies_pickle_and_can_be_told_apart_in_a_config() -> None:
    for strategy in (FailFast(), RetryOnFailure(max_retries=1), MinViableGroup(min_successful=2)):
        assert pickle.loads(pickle.dumps(strategy)) == strategy
        assert dump_config(strategy)["class"].endswith(type(strategy).__name__)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RetryOnFailure(max_retries=-1), "max_retries=-1: must be at least 0"),
        (lambda: RetryOnFailure(per_rollout_timeout=-1.0), "per_rollout_timeout=-1.0"),
        (lambda: MinViableGroup(max_retries=-1), "max_retries=-1"),
        (lambda: MinViableGroup(min_successful=0), "min_successful=0: must be at least 1"),
    ],
)
def test_settings_are_checked(make, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make()
