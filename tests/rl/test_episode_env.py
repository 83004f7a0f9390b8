"""Envs that play whole episodes: how many members come out, and what becomes of a failed one."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
import tinker

from tests.fakes import said
from tests.rl.arena import TalkEnv
from tinker_cookbook.completers import TokenCompleter, TokensWithLogprobs
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.rl.rollout_limits import RolloutLimits
from tinker_cookbook.rl.rollout_presets import RolloutConfig
from tinker_cookbook.rl.rollout_strategy import RetryOnFailure
from tinker_cookbook.rl.rollouts import do_group_rollout
from tinker_cookbook.rl.types import Env, EnvGroupBuilder, EpisodeEnv, Trajectory, Transition


class Keyed(TokenCompleter):
    """Says the numbers among the keys of its forks."""

    def __init__(self, keys: tuple[int | str, ...] = ()):
        self.keys = keys

    async def __call__(self, model_input, stop, *, max_tokens: int | None = None) -> TokensWithLogprobs:
        return said([key for key in self.keys if isinstance(key, int)])

    def fork(self, *key: int | str) -> "Keyed":
        return Keyed((*self.keys, *key))


class Choir(EpisodeEnv):
    def __init__(self, number: int, fails: bool):
        self.number, self.fails = number, fails

    async def play(self, policy: TokenCompleter) -> list[tuple[Trajectory, Env]]:
        members: list[tuple[Trajectory, Env]] = []
        for voice in range(self.number + 1):
            prompt = tinker.ModelInput.from_ints([self.number, voice])
            action = await policy(prompt, [])
            if self.fails:
                raise ValueError(f"choir {self.number} lost its voice")
            turn = Transition(prompt, action, 0.0, episode_done=True)
            members.append((Trajectory([turn], prompt), TalkEnv(prompt=[voice])))
        return members


class Choirs(EnvGroupBuilder):
    """Three choirs, of one, two and three voices; the second fails the first `failures` times."""

    def __init__(self, failures: int = 0):
        self.failures, self.calls = failures, [0]

    async def make_envs(self) -> Sequence[Env]:
        self.calls[0] += 1
        return [Choir(i, i == 1 and self.calls[0] <= self.failures) for i in range(3)]

    async def compute_group_rewards(self, trajectory_group: list[Trajectory], env_group: Sequence[Env]) -> list[Any]:
        assert not any(isinstance(env, Choir) for env in env_group)
        return [(float(trajectory.final_ob.to_ints()[1]), {}) for trajectory in trajectory_group]


def prompts(group: Any) -> list[list[int]]:
    return [trajectory.transitions[0].ob.to_ints() for trajectory in group.trajectories_G]


VOICES = [[0, 0], [1, 0], [1, 1], [2, 0], [2, 1], [2, 2]]


def test_an_episode_gives_as_many_members_as_it_has() -> None:
    group = asyncio.run(do_group_rollout(Choirs(), Keyed()))
    assert prompts(group) == VOICES
    assert group.get_total_rewards() == [0, 0, 1, 0, 1, 2]
    assert [t.transitions[0].ac.tokens for t in group.trajectories_G] == [[0], [1], [1], [2], [2], [2]]


def test_an_episode_that_failed_is_played_again_alone_and_in_its_place() -> None:
    group = asyncio.run(do_group_rollout(Choirs(failures=1), Keyed(), RetryOnFailure()))
    assert prompts(group) == VOICES
    assert [t.transitions[0].ac.tokens for t in group.trajectories_G] == [[0], [1, 1], [1, 1], [2], [2], [2]]
    assert len(group.rollout_errors) == 1


def test_without_a_strategy_it_ends_the_group() -> None:
    with pytest.raises(ValueError, match="choir 1 lost its voice"):
        asyncio.run(do_group_rollout(Choirs(failures=1), Keyed()))


def test_limits_of_single_turns_are_refused() -> None:
    config = RolloutConfig(limits=RolloutLimits(max_turns=2))
    with pytest.raises(ConfigurationError, match="rollout: Choir calls the policy itself"):
        asyncio.run(do_group_rollout(Choirs(), Keyed(), config=config))


def test_it_has_no_turns_to_step_through() -> None:
    with pytest.raises(TypeError, match="plays whole episodes"):
        asyncio.run(Choir(0, False).initial_observation())
