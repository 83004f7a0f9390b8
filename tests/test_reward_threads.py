"""Reward code that blocks: in threads it holds up neither its peers nor the event loop, and time limits reach it."""

import asyncio
import functools
import threading
from contextvars import ContextVar
from typing import Any

import pytest

from tests.fakes import ScriptedCompleter, said
from tests.rl.arena import run as on_a_jumping_clock
from tests.rl.loop import TINY
from tests.waiting import HANG_SECONDS
from tinker_cookbook.env.reward_functions import RewardSpec
from tinker_cookbook.exceptions import ConfigurationError, GroupFailedError
from tinker_cookbook.renderers import Message, Renderer, get_renderer
from tinker_cookbook.rl.problem_env import OneTurnEnv, OneTurnGroupBuilder, Reply
from tinker_cookbook.rl.rollout_presets import RolloutConfig
from tinker_cookbook.rl.rollout_strategy import RetryOnFailure
from tinker_cookbook.rl.rollouts import do_group_rollout
from tinker_cookbook.rl.types import Metrics
from tinker_cookbook.tokenizer_utils import get_tokenizer
from tinker_cookbook.utils.reward_threads import call_reward, in_reward_threads

MEMBERS = 3


class BlockingEnv(OneTurnEnv):
    def __init__(self, renderer: Renderer, barrier: threading.Barrier):
        super().__init__(renderer)
        self.barrier = barrier

    def get_messages(self) -> list[Message]:
        return [{"role": "user", "content": "?"}]

    def score_reply(self, reply: Reply) -> tuple[float, Metrics]:
        self.barrier.wait(HANG_SECONDS)  # until all members' rewards are computed at the same time
        return 1.0, {"in a thread": float(threading.current_thread().name.startswith("reward"))}


def play(renderer: Renderer, parties: int, config: RolloutConfig) -> Any:
    barrier = threading.Barrier(parties)
    builder = OneTurnGroupBuilder(functools.partial(BlockingEnv, renderer, barrier), MEMBERS)
    policy = ScriptedCompleter({i: [said([5])] for i in range(MEMBERS)})
    return asyncio.run(do_group_rollout(builder, policy, config=config))


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return get_renderer("qwen3_instruct", get_tokenizer(TINY))


def test_rewards_that_block_run_beside_each_other(renderer: Renderer) -> None:
    group = play(renderer, MEMBERS, RolloutConfig(reward_threads=MEMBERS))
    assert group.get_total_rewards() == [1.0] * MEMBERS
    assert all(member.transitions[0].metrics["in a thread"] == 1.0 for member in group.trajectories_G)


def test_and_in_the_event_loop_unless_asked_for(renderer: Renderer) -> None:
    group = play(renderer, 1, RolloutConfig())
    assert all(member.transitions[0].metrics["in a thread"] == 0.0 for member in group.trajectories_G)


def test_the_event_loop_goes_on_meanwhile() -> None:
    async def main() -> float:
        reached = threading.Event()
        asyncio.get_running_loop().call_soon(reached.set)
        with in_reward_threads(1):
            return await call_reward(lambda: float(reached.wait(HANG_SECONDS)))

    assert asyncio.run(main()) == 1.0


def test_a_time_limit_ends_a_reward_that_hangs(renderer: Renderer) -> None:
    go_on = threading.Event()

    class HangingEnv(BlockingEnv):
        def score_reply(self, reply: Reply) -> tuple[float, Metrics]:
            return float(go_on.wait(HANG_SECONDS)), {}

    builder = OneTurnGroupBuilder(functools.partial(HangingEnv, renderer, threading.Barrier(1)), 1)
    strategy = RetryOnFailure(max_retries=0, per_rollout_timeout=60.0)
    config = RolloutConfig(reward_threads=1, strategy=strategy)
    try:
        with pytest.raises(GroupFailedError, match="per_rollout_timeout"):
            on_a_jumping_clock(do_group_rollout(builder, ScriptedCompleter({0: [said([5])]}), config=config))
    finally:
        go_on.set()


def test_what_is_async_stays_in_the_loop_and_what_returns_an_awaitable_is_awaited() -> None:
    async def where() -> str:
        return threading.current_thread().name

    class Callable_:
        async def __call__(self) -> str:
            return threading.current_thread().name

    async def main() -> list[str]:
        with in_reward_threads(2):
            calls = (where, Callable_(), functools.partial(where), lambda: where())
            return [await call_reward(function) for function in calls]

    assert set(asyncio.run(main())) == {threading.current_thread().name}


def test_the_context_goes_along() -> None:
    variable: ContextVar[str] = ContextVar("variable", default="")

    async def main() -> str:
        variable.set("here")
        with in_reward_threads(1):
            return await call_reward(variable.get)

    assert asyncio.run(main()) == "here"


def test_a_reward_function_of_ones_own_runs_there() -> None:
    def own(question: str, reply: str, answer: str) -> float:
        return float(threading.current_thread().name.startswith("reward"))

    async def main() -> list[float]:
        reward = RewardSpec.parse(own)
        found = [await reward("a", "q", "a", "r")]
        with in_reward_threads(1):
            found.append(await reward("a", "q", "a", "r"))
        return [value for value, _ in found]

    assert asyncio.run(main()) == [0.0, 1.0]


def test_there_are_no_fewer_than_none() -> None:
    with pytest.raises(ConfigurationError, match="reward_threads=-1"):
        RolloutConfig(reward_threads=-1)
