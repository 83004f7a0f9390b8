"""How a group handles failed rollouts: raise, retry, or continue with the successful ones.

Under every strategy, members keep their order, and a coordinated group (`EnvGroupBuilder.coordinated`) is replayed as
a whole or not at all. Each call of make_envs is followed by one cleanup, at the latest after the group has been
graded. A ConfigurationError ends the run under every strategy: a retry cannot fix a setting.
"""

import asyncio
import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import chz

from tinker_cookbook.completers import TokenCompleter
from tinker_cookbook.exceptions import ConfigurationError, GroupFailedError, RolloutTimeoutError
from tinker_cookbook.rl.rollout_limits import not_negative
from tinker_cookbook.rl.rollout_runner import run_rollout, time_limit
from tinker_cookbook.rl.types import Env, EnvGroupBuilder, EpisodeEnv, RolloutError, Trajectory
from tinker_cookbook.utils.misc_utils import await_uncancelled, gather_all

if TYPE_CHECKING:
    from tinker_cookbook.rl.rollout_presets import RolloutConfig


@dataclass
class RolloutResult:
    """The rollouts of a group, in the order of its members."""

    trajectories: list[Trajectory]
    envs: Sequence[Env]
    """the envs of these trajectories"""
    errors: list[RolloutError] = field(default_factory=list[RolloutError])
    """failures that the strategy handled"""
    cleanups: AsyncExitStack | None = None
    """closed once the group is graded; None: the builder's cleanup is called"""


class RolloutStrategy(ABC):
    """Runs the rollouts of one group.

    A custom strategy calls make_envs and returns trajectories with their envs. If it raises, it cleans up first.
    """

    catches_group_errors: bool = False
    """whether a group that failed is counted and left out (GroupFailedError); otherwise its error ends the run"""

    @abstractmethod
    async def execute(
        self, env_group_builder: EnvGroupBuilder, policy: TokenCompleter, config: "RolloutConfig | None" = None
    ) -> RolloutResult:
        """The group's rollouts. `config` is for `run_rollout`; it is only passed when there is one."""


@chz.chz(typecheck=True)
class FailFast(RolloutStrategy):
    """The first failure cancels the group and is raised, with a note that names the member."""

    async def execute(
        self, env_group_builder: EnvGroupBuilder, policy: TokenCompleter, config: "RolloutConfig | None" = None
    ) -> RolloutResult:
        return await _Rounds(env_group_builder, policy, config, fail_fast=True).run()


@chz.chz(typecheck=True)
class RetryOnFailure(RolloutStrategy):
    """Rerun failed members in fresh envs, in up to `max_retries` more rounds; after these the group has failed."""

    catches_group_errors = True

    max_retries: int = chz.field(default=3, doc="further rounds for members that failed", validator=not_negative)
    per_rollout_timeout: float | None = chz.field(
        default=0, doc="seconds after which a rollout counts as failed; 0 or None: never", validator=not_negative
    )

    def needed(self, group_size: int) -> int:
        """Number of members that must succeed."""
        return group_size

    async def execute(
        self, env_group_builder: EnvGroupBuilder, policy: TokenCompleter, config: "RolloutConfig | None" = None
    ) -> RolloutResult:
        timeout = self.per_rollout_timeout or None
        return await _Rounds(env_group_builder, policy, config, self.max_retries, timeout, self.needed).run()


@chz.chz(typecheck=True)
class MinViableGroup(RetryOnFailure):
    """Continue without the failed members if at least `min_successful` are left; otherwise rerun the failed ones, in
    up to `max_retries` more rounds. A coordinated group needs all of its members.
    """

    min_successful: int | None = chz.field(
        default=None, doc="members that must succeed; None: three quarters of the group, rounded up"
    )

    @chz.validate
    def _check(self) -> None:
        if self.min_successful is not None and self.min_successful < 1:
            raise ConfigurationError(f"min_successful={self.min_successful}: must be at least 1, or None")

    def needed(self, group_size: int) -> int:
        if self.min_successful is None:
            return math.ceil(0.75 * group_size)
        if self.min_successful > group_size:
            raise ConfigurationError(f"min_successful={self.min_successful} of a group of {group_size}: lower it")
        return self.min_successful


def rollout_strategy_from_config(tolerance: bool | RolloutStrategy | None) -> RolloutStrategy:
    """The strategy for a config's `rollout_error_tolerance`: False or None is FailFast, True is RetryOnFailure()."""
    if isinstance(tolerance, RolloutStrategy):
        return tolerance
    return RetryOnFailure() if tolerance else FailFast()


def describe_group(builder: EnvGroupBuilder) -> str:
    """The default name of a group in messages: its builder's class and tags."""
    tags = builder.logging_tags()
    return type(builder).__name__ + (f" [{', '.join(tags)}]" if tags else "")


async def clean_up(builder: EnvGroupBuilder) -> None:
    """Run `builder.cleanup()` to completion: a cancellation waits for it, so that nothing is left open."""
    cancelled: list[bool] = []
    await await_uncancelled(builder.cleanup(), lambda: cancelled.append(True))
    if cancelled:
        raise asyncio.CancelledError


def rollout_error(error: Exception) -> RolloutError:
    """The record of an error: its message and the notes that locate it."""
    return RolloutError(type(error).__name__, "; ".join([str(error), *getattr(error, "__notes__", [])]))


@dataclass
class _Rounds:
    """The rollouts of one group, in rounds: each runs the missing members, in fresh envs."""

    builder: EnvGroupBuilder
    policy: TokenCompleter
    config: "RolloutConfig | None"
    max_retries: int = 0
    timeout: float | None = None
    needed: Callable[[int], int] = int
    """group size -> members that must succeed"""
    fail_fast: bool = False
    done: dict[int, list[tuple[Trajectory, Env]]] = field(default_factory=dict[int, list[tuple[Trajectory, Env]]])
    """by index of the env: its rollout, or the members of an EpisodeEnv"""
    size: int | None = None
    errors: list[Exception] = field(default_factory=list[Exception])

    async def run(self) -> RolloutResult:
        builders = [self.builder, *(copy.copy(self.builder) for _ in range(self.max_retries))]
        async with AsyncExitStack() as cleanups:
            for attempt, builder in enumerate(builders):
                await self._round(builder, attempt, cleanups)
                needed = self.needed if not self.builder.coordinated else int
                if self.size is not None and len(self.done) >= needed(self.size):
                    members = [member for i in sorted(self.done) for member in self.done[i]]
                    trajectories, envs = [t for t, _ in members], [env for _, env in members]
                    return RolloutResult(trajectories, envs, self._counted(), cleanups.pop_all())
            raise self._given_up(len(builders)) from self.errors[-1]

    def _given_up(self, rounds: int) -> GroupFailedError:
        tries = f"{rounds} round{'s' if rounds > 1 else ''}"
        successful = "no env"
        if self.size is not None:
            needed = self.size if self.builder.coordinated else self.needed(self.size)
            successful = f"{len(self.done)}/{self.size} members, below the minimum viable group size {needed},"
        errors = self._counted()
        return GroupFailedError(
            f"group of {describe_group(self.builder)} given up after {tries}: {successful} came through. "
            f"Last error: {errors[-1].error_type}: {errors[-1].error_message}",
            errors,
        )

    def _counted(self) -> list[RolloutError]:
        return [rollout_error(error) for error in self.errors]

    async def _round(self, builder: EnvGroupBuilder, attempt: int, cleanups: AsyncExitStack) -> None:
        """Play the missing members. In a coordinated group, and under FailFast, the first failure ends all of them."""
        as_a_whole = self.builder.coordinated or self.fail_fast
        async with AsyncExitStack() as opened:
            opened.push_async_callback(clean_up, builder)
            try:
                envs = await builder.make_envs()
            except Exception as error:
                error.add_note("in make_envs")
                self._count(error)
                return
            fresh = self._fresh(envs, as_a_whole)
            play = self._play if as_a_whole else self._outcome
            try:
                outcomes = await gather_all(play(env, i, attempt) for i, env in fresh.items())
            except Exception as error:
                self._count(error)
                return
            for i, outcome in zip(fresh, outcomes, strict=True):
                if isinstance(outcome, Exception):
                    self._count(outcome)
                else:
                    self.done[i] = outcome
            cleanups.push_async_callback(opened.pop_all().aclose)

    def _fresh(self, envs: Sequence[Env], as_a_whole: bool) -> dict[int, Env]:
        """Assign envs to the missing members.

        A builder that makes as many envs as before makes the same members. If it makes another number on a retry, its
        members are interchangeable: the envs go to the missing members in order, and members without an env wait for
        the next round.
        """
        if self.size is None or as_a_whole:
            self.size = len(envs)
        missing = [i for i in range(self.size) if i not in self.done]
        if len(envs) == self.size:
            return {i: envs[i] for i in missing}
        return dict(zip(missing, envs, strict=False))

    async def _play(self, env: Env, member: int, attempt: int) -> list[tuple[Trajectory, Env]]:
        """One env's rollout. An error gets a note that names the member and the env.

        A first attempt draws the same random numbers as without retries, whatever happens to others; later attempts
        draw new ones.
        """
        key = ("member", member) if attempt == 0 else ("attempt", attempt, "member", member)
        who, seconds = f"member {member} ({type(env).__name__})", self.timeout

        def late() -> RolloutTimeoutError:
            return RolloutTimeoutError(f"{who} was not done after per_rollout_timeout={seconds} seconds")

        try:
            async with time_limit(seconds, late):
                if isinstance(env, EpisodeEnv):
                    return await self._play_episode(env, self.policy.fork(*key))
                return [(await run_rollout(self.policy.fork(*key), env, config=self.config), env)]
        except Exception as error:
            error.add_note(f"in the rollout of {who}, attempt {attempt + 1}")
            raise

    async def _play_episode(self, env: EpisodeEnv, policy: TokenCompleter) -> list[tuple[Trajectory, Env]]:
        if self.config is not None:
            raise ConfigurationError(
                f"rollout: {type(env).__name__} calls the policy itself, so limits, hooks and settings for single turns cannot "
                "be applied; leave these keys out and use the environment's own limits"
            )
        return await env.play(policy)

    async def _outcome(self, env: Env, member: int, attempt: int) -> list[tuple[Trajectory, Env]] | Exception:
        try:
            return await self._play(env, member, attempt)
        except Exception as error:
            return error

    def _count(self, error: Exception) -> None:
        if isinstance(error, ConfigurationError) or self.fail_fast:
            raise error
        self.errors.append(error)
