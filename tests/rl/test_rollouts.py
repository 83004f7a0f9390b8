"""Rollouts keep members in order with their peers, end when one fails, and depend on seeds, not on timing."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import pytest
import tinker

from tests.fakes import FakeServiceClient
from tests.waiting import HANG_SECONDS
from tinker_cookbook.completers import TinkerTokenCompleter, TokenCompleter
from tinker_cookbook.rl import rollouts
from tinker_cookbook.rl.rollouts import do_batch_rollout, do_group_rollout, do_single_rollout
from tinker_cookbook.rl.types import (
    Action,
    ActionExtra,
    Env,
    EnvGroupBuilder,
    InitialObservationOverflow,
    Metrics,
    Record,
    StepResult,
    Trajectory,
    TrajectoryGroup,
)

T = TypeVar("T")


def run(work: Awaitable[T]) -> T:
    """A hang is a failure."""

    async def bounded() -> T:
        async with asyncio.timeout(HANG_SECONDS):
            return await work

    return asyncio.run(bounded())


class EchoEnv(Env):
    """`turns` turns; each observation is [member, turn, ...]. `on_step` may wait, fail or meddle."""

    def __init__(self, member: int, turns: int = 1, on_step: Callable[[int, int], Awaitable[None]] | None = None):
        self.member, self.turns, self.on_step, self.turn = member, turns, on_step, 0
        self.extras: list[ActionExtra | None] = []

    def observation(self) -> tinker.ModelInput:
        return tinker.ModelInput.from_ints([self.member, self.turn])

    async def initial_observation(self):
        return self.observation(), [0]

    async def step(self, action: Action, *, extra: ActionExtra | None = None) -> StepResult:
        self.extras.append(extra)
        if self.on_step is not None:
            await self.on_step(self.member, self.turn)
        self.turn += 1
        return StepResult(float(self.member), self.turn == self.turns, self.observation(), [0], {"turn": self.turn})


class Group(EnvGroupBuilder):
    """A group of given envs that notes its life."""

    def __init__(self, envs: Sequence[Env], trained: list[bool] | None = None):
        self.envs, self.trained, self.life = envs, trained, list[str]()

    async def make_envs(self) -> Sequence[Env]:
        self.life.append("make_envs")
        return self.envs

    async def compute_group_rewards(
        self, trajectory_group: list[Trajectory], env_group: Sequence[Env]
    ) -> list[tuple[float, Metrics]]:
        self.life.append("rewards")
        assert list(env_group) == list(self.envs)
        return [(10.0 * i, {"rank": i}) for i in range(len(trajectory_group))]

    def select_trained(self, trajectory_group: list[Trajectory], env_group: Sequence[Env]) -> list[bool] | None:
        self.life.append("select")
        return self.trained

    def describe_records(self, group: TrajectoryGroup, env_group: Sequence[Env]) -> list[Record]:
        self.life.append("records")
        return [Record("kind", {"rewards": group.get_total_rewards()})]

    async def cleanup(self) -> None:
        self.life.append("cleanup")


def completer(service: FakeServiceClient, seed: int | None = 0, **options) -> TinkerTokenCompleter:
    return TinkerTokenCompleter(service.new_sampler(0), 4, seed=seed, **options)


class TestSingleRollout:
    def test_turns_are_recorded_with_tokens_rewards_and_stop_reason(self) -> None:
        env = EchoEnv(3, turns=2)
        trajectory = run(do_single_rollout(completer(FakeServiceClient()), env))
        assert [t.ob.to_ints() for t in trajectory.transitions] == [[3, 0], [3, 1]]
        assert [t.reward for t in trajectory.transitions] == [3.0, 3.0]
        assert [t.episode_done for t in trajectory.transitions] == [False, True]
        assert all(len(t.ac.tokens) == len(t.ac.logprobs) == 1 for t in trajectory.transitions)
        assert env.extras == [{"stop_reason": "stop"}] * 2
        assert trajectory.stop_reason == "completed" and trajectory.num_action_tokens == 2

    def test_a_prompt_that_is_too_long_is_scored_and_never_sampled(self) -> None:
        class TooLong(EchoEnv):
            async def initial_observation(self) -> Any:
                return InitialObservationOverflow(-0.5, {"overflow": 1})

        service = FakeServiceClient()
        trajectory = run(do_single_rollout(completer(service), TooLong(0)))
        (transition,) = trajectory.transitions
        assert service.sampled == [] and transition.ac.tokens == [] and transition.ob.length == 0
        assert transition.metrics == {"overflow": 1, "stop/context_overflow": 1}
        assert (transition.reward, transition.episode_done) == (-0.5, True)
        assert trajectory.stop_reason == "context_overflow"


class TestGroupRollout:
    def test_members_keep_their_order_whoever_ends_first(self) -> None:
        done: list[int] = []
        turns_left = {0: 5, 1: 0, 2: 3, 3: 1}

        async def dawdle(member: int, turn: int) -> None:
            for _ in range(20 * turns_left[member]):
                await asyncio.sleep(0)
            done.append(member)

        builder = Group([EchoEnv(i, on_step=dawdle) for i in range(4)], trained=[True, False, True, True])
        group = run(do_group_rollout(builder, completer(FakeServiceClient())))
        assert done == [1, 3, 2, 0]
        assert [t.transitions[0].ob.to_ints()[0] for t in group.trajectories_G] == [0, 1, 2, 3]
        assert group.get_total_rewards() == [0.0, 11.0, 22.0, 33.0]
        assert group.metrics_G == [{"rank": i} for i in range(4)]
        assert group.is_trained() == [True, False, True, True]
        assert group.records == [Record("kind", {"rewards": [0.0, 11.0, 22.0, 33.0]})]
        assert builder.life == ["make_envs", "rewards", "select", "records", "cleanup"]

    def test_one_failure_cancels_the_peers_and_is_raised_itself(self) -> None:
        error, cancelled = OSError("sandbox lost"), list[int]()

        async def fail_or_wait(member: int, turn: int) -> None:
            if member == 1:
                raise error
            try:
                await asyncio.Event().wait()  # as an opponent would: for a turn that never comes
            except asyncio.CancelledError:
                cancelled.append(member)
                raise

        builder = Group([EchoEnv(i, on_step=fail_or_wait) for i in range(4)])
        with pytest.raises(OSError) as raised:
            run(do_group_rollout(builder, completer(FakeServiceClient())))
        assert raised.value is error
        assert sorted(cancelled) == [0, 2, 3]
        assert builder.life == ["make_envs", "cleanup"]

    def test_cleanup_also_follows_failing_rewards(self) -> None:
        class Ungraded(Group):
            async def compute_group_rewards(self, trajectory_group, env_group):
                raise ArithmeticError("no grade")

        builder = Ungraded([EchoEnv(0)])
        with pytest.raises(ArithmeticError, match="no grade"):
            run(do_group_rollout(builder, completer(FakeServiceClient())))
        assert builder.life == ["make_envs", "cleanup"]

    def test_a_failing_group_ends_the_batch_with_its_error(self) -> None:
        async def fail(member: int, turn: int) -> None:
            raise OSError("sandbox lost")

        async def wait(member: int, turn: int) -> None:
            await asyncio.Event().wait()

        builders = [Group([EchoEnv(0, on_step=wait)]), Group([EchoEnv(0, on_step=fail)])]
        with pytest.raises(OSError, match="sandbox lost"):
            run(do_batch_rollout(builders, completer(FakeServiceClient())))
        assert [builder.life for builder in builders] == [["make_envs", "cleanup"]] * 2


class TestSeeds:
    def seeds(self, policy: TokenCompleter, service: FakeServiceClient, builders: Sequence[Group]) -> list[int | None]:
        start = len(service.sampled)
        run(do_batch_rollout(builders, policy))
        calls = sorted(service.sampled[start:], key=lambda call: call.prompt)
        return [call.params.seed for call in calls]

    def groups(self, slow: int = -1) -> list[Group]:
        async def dawdle(member: int, turn: int) -> None:
            for _ in range(50 if member == slow else 0):
                await asyncio.sleep(0)

        return [Group([EchoEnv(10 * g + i, turns=2, on_step=dawdle) for i in range(3)]) for g in range(2)]

    def test_every_call_of_a_batch_has_its_own_seed(self) -> None:
        service = FakeServiceClient()
        seeds = self.seeds(completer(service), service, self.groups())
        assert len(seeds) == len(set(seeds)) == 12 and None not in seeds

    def test_the_same_policy_draws_the_same_again_whatever_the_timing(self) -> None:
        service = FakeServiceClient()
        policy = completer(service)
        first = self.seeds(policy, service, self.groups())
        assert self.seeds(policy, service, self.groups(slow=1)) == first
        assert self.seeds(completer(service, seed=1), service, self.groups()) != first

    def test_without_a_seed_none_is_sent(self) -> None:
        service = FakeServiceClient()
        assert set(self.seeds(completer(service, seed=None), service, self.groups())) == {None}


def test_a_function_that_a_script_puts_in_its_place_rolls_groups_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """As tinker-cookbook's verifiers_rl does. It takes what upstream's takes, and no more."""
    seen: list[EnvGroupBuilder] = []

    async def own(builder: EnvGroupBuilder, policy: TokenCompleter, strategy: object = None) -> TrajectoryGroup:
        seen.append(builder)
        return await do_group_rollout(builder, policy)

    monkeypatch.setattr(rollouts, "do_group_rollout", own)
    builders = [Group([EchoEnv(0)]), Group([EchoEnv(1)])]
    groups = run(do_batch_rollout(builders, completer(FakeServiceClient())))
    assert len(seen) == 2 and all(isinstance(group, TrajectoryGroup) for group in groups)
