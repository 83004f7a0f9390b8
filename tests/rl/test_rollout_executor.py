"""Groups in other threads and processes: they come back as if they had been rolled out here, failures included."""

import asyncio
import multiprocessing
import os
import pickle
import threading
from collections.abc import Awaitable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from typing import TypeVar

import pytest
import tinker

from tests.fakes import FakeServiceClient, SampleCall, seeded_reply
from tests.waiting import HANG_SECONDS
from tinker_cookbook.completers import TinkerTokenCompleter, TokenCompleter
from tinker_cookbook.data.shipped import EXAMPLE_DATA
from tinker_cookbook.exceptions import ConfigurationError, GroupFailedError, TrainingError
from tinker_cookbook.rl.rollout_limits import RolloutLimits, TerminationRewardPolicy
from tinker_cookbook.rl.rollout_strategy import RetryOnFailure
from tinker_cookbook.rl.rollouts import (
    do_batch_rollout,
    do_group_rollout,
    finished_groups,
    get_rollout_executor,
    set_rollout_executor,
)
from tinker_cookbook.rl.types import Env, EnvGroupBuilder, Metrics, StepResult, TrajectoryGroup

T = TypeVar("T")


class HardError(Exception):
    """Cannot be read back from a pickle."""

    def __init__(self, code: int, place: str):
        super().__init__(f"{code} at {place}")


class WhereEnv(Env):
    """Two turns; its metrics say in which process and thread it is. `fails` names the exception of its second step."""

    rollout_limits = RolloutLimits(max_turn_tokens=3)

    def __init__(self, prompt: list[int], fails: str = ""):
        self.prompt, self.fails, self.turn = prompt, fails, 0

    async def initial_observation(self):
        return tinker.ModelInput.from_ints(self.prompt), [0]

    async def step(self, action, *, extra=None) -> StepResult:
        self.turn += 1
        self.prompt = [*self.prompt, *action]
        if self.turn == 2 and self.fails == "os":
            raise OSError("sandbox lost")
        if self.turn == 2 and self.fails == "hard":
            raise HardError(7, "sandbox")
        where: Metrics = {"pid": os.getpid(), "thread": threading.get_ident()}
        return StepResult(float(action[0]), self.turn == 2, tinker.ModelInput.from_ints(self.prompt), [0], where)


class WhereGroup(EnvGroupBuilder):
    def __init__(self, number: int, fails: str = "", keep: object = None, padding: int = 0):
        self.number, self.fails, self.keep, self.padding = number, fails, keep, padding

    async def make_envs(self) -> Sequence[Env]:
        return [WhereEnv([5, self.number, i, *[1] * self.padding], self.fails if i == 1 else "") for i in range(3)]


def policy(picklable: bool = True, service: FakeServiceClient | None = None) -> TinkerTokenCompleter:
    """Over a fake client, which can be pickled unless its reply function cannot."""
    service = service or FakeServiceClient(seeded_reply if picklable else lambda call: seeded_reply(call))
    return TinkerTokenCompleter(service.new_sampler(0), 4, seed=3)


def tokens(groups: Sequence[TrajectoryGroup]) -> list[list[list[int]]]:
    return [[t.ac.tokens for t in trajectory.transitions] for group in groups for trajectory in group.trajectories_G]


def where(groups: Sequence[TrajectoryGroup], key: str) -> set[float]:
    return {t.metrics[key] for group in groups for trajectory in group.trajectories_G for t in trajectory.transitions}


def run(work: Awaitable[T]) -> T:
    async def bounded() -> T:
        async with asyncio.timeout(HANG_SECONDS):
            return await work

    return asyncio.run(bounded())


def run_in(executor: Executor, work: Awaitable[T]) -> T:
    set_rollout_executor(executor)
    try:
        assert get_rollout_executor() is executor
        return run(work)
    finally:
        set_rollout_executor(None)


@pytest.fixture(scope="module")
def processes() -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as executor:
        yield executor


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as executor:
        yield executor


def builders() -> list[WhereGroup]:
    return [WhereGroup(number) for number in range(3)]


async def batch(groups: Sequence[EnvGroupBuilder], completer: TokenCompleter) -> list[TrajectoryGroup]:
    return finished_groups(await do_batch_rollout(groups, completer))


class TestProcesses:
    @pytest.mark.parametrize("picklable", [True, False])
    def test_groups_come_back_as_if_rolled_out_here(self, processes: ProcessPoolExecutor, picklable: bool) -> None:
        here = run(batch(builders(), policy()))
        service = FakeServiceClient(seeded_reply if picklable else lambda call: seeded_reply(call))
        there = run_in(processes, batch(builders(), policy(service=service)))
        assert (service.sampled == []) == picklable, "a policy that can travel is not asked here"
        assert where(here, "pid") == {os.getpid()}
        assert where(there, "pid").isdisjoint({os.getpid()})
        assert tokens(there) == tokens(here)
        assert [group.get_total_rewards() for group in there] == [group.get_total_rewards() for group in here]
        assert there[0].trajectories_G[0].stop_reason == "completed"

    def test_a_policy_that_stays_here_hears_prompts_seeds_and_budgets(self, processes: ProcessPoolExecutor) -> None:
        heard: list[SampleCall] = []

        def reply(call: SampleCall) -> list[int]:
            heard.append(call)
            return seeded_reply(call)

        def told() -> list[tuple[list[int], int | None, int | None, object]]:
            return sorted((c.prompt, c.params.seed, c.params.max_tokens, str(c.params.stop)) for c in heard)

        run(batch(builders(), policy(service=FakeServiceClient(reply))))
        here = told()
        heard.clear()
        run_in(processes, batch(builders(), policy(service=FakeServiceClient(reply))))
        assert told() == here and len(here) == 18 and {call[2] for call in here} == {3}

    def test_long_prompts_reach_a_policy_that_stays_here(self, processes: ProcessPoolExecutor) -> None:
        service = FakeServiceClient(lambda call: [len(call.prompt) % 8])
        group = run_in(processes, do_group_rollout(WhereGroup(0, padding=100_000), policy(service=service)))
        assert [len(call.prompt) for call in service.sampled] == [100_003] * 3 + [100_004] * 3
        assert tokens([group]) == [[[100_003 % 8], [100_004 % 8]]] * 3

    def test_the_local_engine(self, processes: ProcessPoolExecutor) -> None:
        from tinker_cookbook.backends import create_service_client

        service = create_service_client("local")

        async def both() -> list[list[TrajectoryGroup]]:
            client = await service.create_sampling_client(base_model=str(EXAMPLE_DATA / "tiny_chat"))
            completer = TinkerTokenCompleter(client, 4, seed=3)
            assert pickle.dumps(completer), "so it travels, and its client asks the engine here"
            here = await batch(builders(), completer)
            set_rollout_executor(processes)
            try:
                return [here, await batch(builders(), completer)]
            finally:
                set_rollout_executor(None)

        here, there = run(both())
        assert tokens(there) == tokens(here) and where(there, "pid").isdisjoint({os.getpid()})
        assert all(
            len(t.ac.logprobs) == len(t.ac.tokens) for g in there for x in g.trajectories_G for t in x.transitions
        )

    @pytest.mark.parametrize("picklable", [True, False])
    def test_errors_come_back_with_their_notes(self, processes: ProcessPoolExecutor, picklable: bool) -> None:
        with pytest.raises(OSError, match="sandbox lost") as raised:
            run_in(processes, batch([WhereGroup(0, "os")], policy(picklable)))
        assert raised.value.__notes__[0].startswith("in the rollout of member 1 (WhereEnv)")
        assert raised.value.__notes__[-1] == "in group 0, WhereGroup"

    def test_an_error_that_cannot_travel_is_told_in_words_and_breaks_nothing(
        self, processes: ProcessPoolExecutor
    ) -> None:
        with pytest.raises(TrainingError, match="HardError: 7 at sandbox") as raised:
            run_in(processes, do_group_rollout(WhereGroup(0, "hard"), policy()))
        assert "member 1 (WhereEnv)" in raised.value.__notes__[0]
        assert len(tokens([run_in(processes, do_group_rollout(WhereGroup(0), policy()))])) == 3

    def test_strategy_and_termination_travel_and_failures_are_told(self, processes: ProcessPoolExecutor) -> None:
        strategy, termination = RetryOnFailure(max_retries=1), TerminationRewardPolicy(zero_reward_on_limit=True)
        with pytest.raises(GroupFailedError, match="given up after 2 rounds: 2/3 members") as raised:
            run_in(processes, do_group_rollout(WhereGroup(0, "os"), policy(), strategy, termination))
        assert [error.error_type for error in raised.value.errors] == ["OSError", "OSError"]

    @pytest.mark.parametrize("error", [KeyError("no such token"), HardError(3, "engine")])
    def test_an_error_of_a_policy_that_stays_here(self, processes: ProcessPoolExecutor, error: Exception) -> None:
        class Fails(TokenCompleter):
            async def __call__(self, model_input, stop, *, max_tokens=None):
                raise error

        with pytest.raises((KeyError, TrainingError), match=r"no such token|HardError: 3 at engine"):
            run_in(processes, do_group_rollout(WhereGroup(0), Fails()))

    def test_a_builder_that_cannot_be_pickled(self, processes: ProcessPoolExecutor) -> None:
        builder = WhereGroup(0, keep=threading.Lock())
        with pytest.raises(
            ConfigurationError, match=r"WhereGroup cannot be pickled \(TypeError.*use a ThreadPoolExecutor"
        ):
            run_in(processes, do_group_rollout(builder, policy()))

    def test_pools_that_fork_are_refused(self) -> None:
        executor = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork"))
        with pytest.raises(ValueError, match="spawn"):
            set_rollout_executor(executor)
        assert get_rollout_executor() is None


class TestThreads:
    def test_envs_run_in_threads_and_the_policy_on_its_own_loop(self, threads: ThreadPoolExecutor) -> None:
        heard: list[int] = []

        def reply(call: SampleCall) -> list[int]:
            heard.append(threading.get_ident())
            return seeded_reply(call)

        keep = threading.Lock()  # nothing needs to be pickled
        groups = [WhereGroup(number, keep=keep) for number in range(3)]
        there = run_in(threads, batch(groups, policy(service=FakeServiceClient(reply))))
        assert set(heard) == {threading.get_ident()} and len(heard) == 18
        assert where(there, "thread").isdisjoint({threading.get_ident()})
        assert tokens(there) == tokens(run(batch(builders(), policy())))

    def test_errors_are_raised_here(self, threads: ThreadPoolExecutor) -> None:
        with pytest.raises(HardError, match="7 at sandbox"):
            run_in(threads, do_group_rollout(WhereGroup(0, "hard"), policy()))
