"""What becomes of a group when a rollout of it fails: raise, try again, or go on with those that came through.

Whatever the strategy, members keep their order, and a coordinated group (`EnvGroupBuilder.coordinated`) is played again as
a whole or not at all. Each call of make_envs is followed by one cleanup, after the group has been graded. A
ConfigurationError ends the run under every strategy: another try mends no setting.
"""

import asyncio
import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import chz

from tinker_cookbook.completers import TokenCompleter
from tinker_cookbook.exceptions import ConfigurationError, DataValidationError, GroupFailedError, RolloutTimeoutError
from tinker_cookbook.rl.rollout_presets import RolloutConfig
from tinker_cookbook.rl.rollout_runner import run_rollout
from tinker_cookbook.rl.types import Env, EnvGroupBuilder, RolloutError, Trajectory
from tinker_cookbook.utils.misc_utils import gather_all


def _not_negative(owner: Any, attribute: str) -> None:
    value = getattr(owner, attribute)
    if value is not None and value < 0:
        raise ConfigurationError(f"{attribute.removeprefix('X_')}={value}: must be at least 0")


@dataclass
class RolloutResult:
    """The rollouts of a group, in the order of its members."""

    trajectories: list[Trajectory]
    envs: Sequence[Env]
    """of these trajectories"""
    errors: list[RolloutError] = field(default_factory=list)
    """failures that the strategy coped with"""
    cleanups: AsyncExitStack | None = None
    """to be closed once the group is graded; None: the builder's own cleanup is called"""


class RolloutStrategy(ABC):
    """Runs the rollouts of one group.

    A strategy of one's own calls make_envs and returns trajectories with their envs. If it raises, it has cleaned up.
    """

    tolerant: bool = True
    """whether a group that failed is counted and left out (GroupFailedError); otherwise its error ends the run"""

    @abstractmethod
    async def execute(
        self, env_group_builder: EnvGroupBuilder, policy: TokenCompleter, config: RolloutConfig | None = None
    ) -> RolloutResult:
        """The group's rollouts. `config` is for `run_rollout`; it is only passed when there is one."""


@chz.chz(typecheck=True)
class FailFast(RolloutStrategy):
    """The first failure cancels the group and is raised itself, with a note that says whose it was."""

    tolerant = False

    async def execute(
        self, env_group_builder: EnvGroupBuilder, policy: TokenCompleter, config: RolloutConfig | None = None
    ) -> RolloutResult:
        async with AsyncExitStack() as cleanups:
            cleanups.push_async_callback(env_group_builder.cleanup)
            envs = await env_group_builder.make_envs()
            trajectories = await gather_all(_play(env, i, policy, config, None, 0) for i, env in enumerate(envs))
            return RolloutResult(trajectories, envs, cleanups=cleanups.pop_all())


@chz.chz(typecheck=True)
class RetryOnFailure(RolloutStrategy):
    """Failed members are run again in fresh envs, in up to `max_retries` further rounds; then the group has failed."""

    max_retries: int = chz.field(default=3, doc="further rounds for members that failed", validator=_not_negative)
    per_rollout_timeout: float | None = chz.field(
        default=0, doc="seconds after which a rollout counts as failed; 0 or None: never", validator=_not_negative
    )

    async def execute(
        self, env_group_builder: EnvGroupBuilder, policy: TokenCompleter, config: RolloutConfig | None = None
    ) -> RolloutResult:
        return await _Rounds(env_group_builder, policy, config, self.per_rollout_timeout).run(self.max_retries)


@chz.chz(typecheck=True)
class MinViableGroup(RolloutStrategy):
    """A group goes on without the members that failed if `min_successful` are left. While there are fewer, the failed ones
    are run again, in up to `max_retries` further rounds. A coordinated group needs all of its members."""

    min_successful: int | None = chz.field(
        default=None, doc="members that must come through; None: three quarters of the group, rounded up"
    )
    max_retries: int = chz.field(default=3, doc="further rounds for members that failed", validator=_not_negative)
    per_rollout_timeout: float | None = chz.field(
        default=None, doc="seconds after which a rollout counts as failed; 0 or None: never", validator=_not_negative
    )

    @chz.validate
    def _check(self) -> None:
        if self.min_successful is not None and self.min_successful < 1:
            raise ConfigurationError(f"min_successful={self.min_successful}: must be at least 1, or None")

    async def execute(
        self, env_group_builder: EnvGroupBuilder, policy: TokenCompleter, config: RolloutConfig | None = None
    ) -> RolloutResult:
        rounds = _Rounds(env_group_builder, policy, config, self.per_rollout_timeout)
        return await rounds.run(self.max_retries, self._needed)

    def _needed(self, group_size: int) -> int:
        if self.min_successful is None:
            return math.ceil(0.75 * group_size)
        if self.min_successful > group_size:
            raise ConfigurationError(f"min_successful={self.min_successful} of a group of {group_size}: lower it")
        return self.min_successful


def rollout_strategy_from_config(tolerance: bool | RolloutStrategy | None) -> RolloutStrategy:
    """The strategy that a config's `rollout_error_tolerance` means: False or None FailFast, True RetryOnFailure()."""
    if isinstance(tolerance, RolloutStrategy):
        return tolerance
    return RetryOnFailure() if tolerance else FailFast()


def describe_group(builder: EnvGroupBuilder) -> str:
    """What messages call a group, for want of a name: its builder's class and tags."""
    tags = builder.logging_tags()
    return type(builder).__name__ + (f" [{', '.join(tags)}]" if tags else "")


def rollout_error(error: Exception) -> RolloutError:
    """The record of an error: its message and the notes that say where it arose."""
    return RolloutError(type(error).__name__, "; ".join([str(error), *getattr(error, "__notes__", [])]))


async def _play(
    env: Env, member: int, policy: TokenCompleter, config: RolloutConfig | None, timeout: float | None, attempt: int
) -> Trajectory:
    """One member's rollout. An error gets a note that names member and env.

    A first attempt draws what it would draw without any retry, whatever happens to others; later ones draw anew.
    """
    key = ("member", member) if attempt == 0 else ("attempt", attempt, "member", member)
    who = f"member {member} ({type(env).__name__})"
    timer = asyncio.timeout(timeout or None)
    try:
        try:
            async with timer:
                return await run_rollout(policy.fork(*key), env, config=config)
        except TimeoutError as error:
            if not timer.expired():
                raise
            raise RolloutTimeoutError(f"{who} was not done after per_rollout_timeout={timeout} seconds") from error
    except Exception as error:
        error.add_note(f"in the rollout of {who}, attempt {attempt + 1}")
        raise


@dataclass
class _Rounds:
    """The rollouts of one group, in rounds: each runs what is still missing, in envs of its own."""

    builder: EnvGroupBuilder
    policy: TokenCompleter
    config: RolloutConfig | None
    timeout: float | None
    done: dict[int, tuple[Trajectory, Env]] = field(default_factory=dict)
    size: int | None = None
    errors: list[RolloutError] = field(default_factory=list)
    last_error: Exception | None = None

    async def run(self, max_retries: int, needed: Callable[[int], int] | None = None) -> RolloutResult:
        """Until `needed(group size)` members are done; None means all."""
        builders = [self.builder, *(copy.copy(self.builder) for _ in range(max_retries))]
        async with AsyncExitStack() as cleanups:
            for attempt, builder in enumerate(builders):
                if self.builder.coordinated:
                    finished = await self._together(builder, attempt, cleanups)
                else:
                    await self._apart(builder, attempt, cleanups)
                    finished = self.size is not None and len(self.done) >= (needed(self.size) if needed else self.size)
                if finished:
                    members = [self.done[i] for i in sorted(self.done)]
                    trajectories, envs = [t for t, _ in members], [env for _, env in members]
                    return RolloutResult(trajectories, envs, self.errors, cleanups.pop_all())
            tries = f"{len(builders)} round{'s' if len(builders) > 1 else ''}"
            came = f"{len(self.done)} of {self.size} members" if self.size is not None else "no env"
            raise GroupFailedError(
                f"group of {describe_group(self.builder)} given up after {tries}: {came} came through. "
                f"Last error: {self.errors[-1].error_type}: {self.errors[-1].error_message}",
                self.errors,
            ) from self.last_error

    async def _together(self, builder: EnvGroupBuilder, attempt: int, cleanups: AsyncExitStack) -> bool:
        """All members, the first failure ending all."""
        async with AsyncExitStack() as own:
            envs = await self._make(builder, own)
            if envs is None:
                return False
            try:
                trajectories = await gather_all(self._member(env, i, attempt) for i, env in enumerate(envs))
            except Exception as error:
                self._count(error)
                return False
            self.done = dict(enumerate(zip(trajectories, envs, strict=True)))
            cleanups.push_async_callback(own.pop_all().aclose)
            return True

    async def _apart(self, builder: EnvGroupBuilder, attempt: int, cleanups: AsyncExitStack) -> None:
        """The missing members, each failing for itself."""
        envs = await self._make(builder, cleanups)
        if envs is None:
            return
        missing = [i for i in range(len(envs)) if i not in self.done]
        outcomes = await gather_all(self._outcome(envs[i], i, attempt) for i in missing)
        for i, outcome in zip(missing, outcomes, strict=True):
            if isinstance(outcome, Trajectory):
                self.done[i] = outcome, envs[i]
            else:
                self._count(outcome)

    async def _make(self, builder: EnvGroupBuilder, cleanups: AsyncExitStack) -> Sequence[Env] | None:
        """The envs of one round; None when they cannot be made, which uses up the round."""
        cleanups.push_async_callback(builder.cleanup)
        try:
            envs = await builder.make_envs()
        except Exception as error:
            error.add_note("in make_envs")
            self._count(error)
            return None
        if self.size not in (None, len(envs)):
            raise DataValidationError(
                f"make_envs of {describe_group(builder)} made {self.size} envs, and on a retry {len(envs)}; it must make "
                "the same members each time, or be `coordinated`"
            )
        self.size = len(envs)
        return envs

    async def _member(self, env: Env, member: int, attempt: int) -> Trajectory:
        return await _play(env, member, self.policy, self.config, self.timeout, attempt)

    async def _outcome(self, env: Env, member: int, attempt: int) -> Trajectory | Exception:
        try:
            return await self._member(env, member, attempt)
        except Exception as error:
            return error

    def _count(self, error: Exception) -> None:
        if isinstance(error, ConfigurationError):
            raise error
        self.last_error = error
        self.errors.append(rollout_error(error))
