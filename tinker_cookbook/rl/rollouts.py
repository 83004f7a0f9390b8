"""Run a policy in environments: one episode, a whole group with its rewards, or a batch of groups.

`rollout_runner` runs one episode, `rollout_strategy` handles failures, `rollout_executor` decides where groups run. A
batch accounts for every group: each becomes a TrajectoryGroup or a FailedGroup.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial

import chz

from tinker_cookbook.clients import SamplingClient
from tinker_cookbook.completers import TinkerTokenCompleter, TokenCompleter
from tinker_cookbook.exceptions import ConfigurationError, GroupFailedError, RolloutTimeoutError
from tinker_cookbook.rl.advantages import is_constant
from tinker_cookbook.rl.rollout_executor import get_rollout_executor as get_rollout_executor
from tinker_cookbook.rl.rollout_executor import leaves_process, run_in_executor
from tinker_cookbook.rl.rollout_executor import set_rollout_executor as set_rollout_executor
from tinker_cookbook.rl.rollout_limits import MAX_GROUPS_IN_FLIGHT, TerminationRewardPolicy
from tinker_cookbook.rl.rollout_presets import RolloutConfig
from tinker_cookbook.rl.rollout_runner import run_rollout, time_limit
from tinker_cookbook.rl.rollout_strategy import RolloutResult, RolloutStrategy, clean_up, describe_group, rollout_error
from tinker_cookbook.rl.run_clients import clients_for
from tinker_cookbook.rl.types import (
    Env,
    EnvGroupBuilder,
    Metrics,
    RolloutError,
    StopReason,
    Trajectory,
    TrajectoryGroup,
)
from tinker_cookbook.utils import logtree, trace
from tinker_cookbook.utils.misc_utils import gather_limited
from tinker_cookbook.utils.reward_threads import in_reward_threads

logger = logging.getLogger(__name__)

ZERO_REWARD_METRIC_KEY = "zero_reward_on_limit"
"""Group metric, 1, of members whose total reward a TerminationRewardPolicy has lowered to 0."""


@dataclass(frozen=True)
class FailedGroup:
    """Replaces a group that its strategy gave up."""

    errors: list[RolloutError]
    tags: list[str] = field(default_factory=list[str])


@dataclass
class RolloutErrorCounter:
    """Counts failed rollouts since the start of a run. A checkpoint has to store `counts` and `groups_skipped`."""

    counts: Counter[str] = field(default_factory=Counter[str])
    """failed attempts by the name of the exception"""
    groups_skipped: int = 0

    def ingest(self, group: TrajectoryGroup | FailedGroup | GroupFailedError | None) -> None:
        """Count the errors of a group; None: it was left out, for any reason."""
        if group is None:
            self.groups_skipped += 1
            return
        failed = not isinstance(group, TrajectoryGroup)
        errors = group.errors if failed else group.rollout_errors
        self.groups_skipped += failed
        self.counts.update(error.error_type for error in errors)

    def get_metrics(self, prefix: str = "rollout_errors") -> dict[str, int]:
        """<prefix>/<ExceptionName>, /total and /groups_skipped; empty if nothing failed."""
        if not self.counts and not self.groups_skipped:
            return {}
        by_name = {f"{prefix}/{name}": count for name, count in sorted(self.counts.items())}
        total = {f"{prefix}/total": self.counts.total(), f"{prefix}/groups_skipped": self.groups_skipped}
        return by_name | total


async def do_single_rollout(policy: TokenCompleter, env: Env) -> Trajectory:
    """One episode, from the first observation to the env's end, within the env's limits, if any."""
    return await run_rollout(policy, env)


@trace.scope
async def do_group_rollout(
    env_group_builder: EnvGroupBuilder,
    policy: TokenCompleter,
    strategy: RolloutStrategy | None = None,
    termination: TerminationRewardPolicy | None = None,
    *,
    config: RolloutConfig | None = None,
    name: str | None = None,
    with_notes: bool = False,
    with_records: bool = True,
) -> TrajectoryGroup:
    """Run all episodes of one group concurrently, then compute its rewards, selection and JSON records.

    Args:
        strategy, termination: override `config`.
        config: how rollouts are run, how a failure is handled (None: it ends the group), and the reward of a rollout
            at a limit.
        name: the group's name in errors; None: its builder's class and tags.
        with_notes: keep the `logtree` output of envs and rewards, in the `notes` of the group and of its turns.
        with_records: let the builder describe its JSON records.

    Raises:
        GroupFailedError: a tolerant strategy gave the group up, or its rewards failed under one. Count it and continue.
        Exception: under FailFast, the error of a rollout or of the rewards, with notes that locate it.
    """
    config = (config or RolloutConfig()).with_strategy(strategy)
    if termination is not None:
        config = chz.replace(config, termination=termination)
    play = partial(_play_group, config=config, name=name or describe_group(env_group_builder))
    play = partial(play, with_notes=with_notes, with_records=with_records)
    executor, clients = get_rollout_executor(), clients_for(policy)
    if executor is not None and leaves_process(executor):
        clients = clients.for_another_process()
    builder = env_group_builder.with_clients(clients)
    if env_group_builder.dataset_index is not None:  # not a field, so dataclasses.replace does not copy it
        builder = builder.of_dataset(env_group_builder.dataset_index)
    if executor is None:
        return await play(builder, policy)
    return await run_in_executor(executor, play, builder, policy)


async def _play_group(
    builder: EnvGroupBuilder,
    policy: TokenCompleter,
    config: RolloutConfig,
    name: str,
    with_notes: bool,
    with_records: bool,
) -> TrajectoryGroup:
    strategy = config.effective_strategy()
    # A custom strategy need not accept settings if there are none for single rollouts.
    single = chz.replace(config, strategy=None, retries=None, termination=None, reward_threads=0)
    settings = {} if single == RolloutConfig() else {"config": single}
    result: RolloutResult | None = None
    try:
        with (
            logtree.init_trace(name) if with_notes else nullcontext() as trace,
            in_reward_threads(config.reward_threads),
        ):
            result = await strategy.execute(builder, policy, **settings)
            cleanups = result.cleanups or AsyncExitStack()
            if result.cleanups is None:
                cleanups.push_async_callback(clean_up, builder)
            async with cleanups:
                group = await _grade(builder, result, config.termination or TerminationRewardPolicy(), with_records)
        group.notes = trace.take() if trace is not None else []
        return group
    except Exception as error:
        error.add_note(f"in group {name}")
        if not strategy.catches_group_errors or isinstance(error, GroupFailedError | ConfigurationError):
            raise
        errors = [*(result.errors if result else []), rollout_error(error)]
        raise GroupFailedError(f"group {name} failed: {type(error).__name__}: {error}", errors) from error


async def _grade(
    builder: EnvGroupBuilder, result: RolloutResult, termination: TerminationRewardPolicy, with_records: bool
) -> TrajectoryGroup:
    trajectories, envs = result.trajectories, result.envs
    timed_out = all(trajectory.stop_reason == StopReason.ROLLOUT_TIMEOUT for trajectory in trajectories)
    if timed_out and termination.skip_grading_on_timeout and termination.clamps(StopReason.ROLLOUT_TIMEOUT):
        rewards: list[tuple[float, Metrics]] = [(0.0, {}) for _ in trajectories]
    else:
        seconds = termination.grader_timeout_seconds

        def late() -> RolloutTimeoutError:
            where = f"compute_group_rewards of {describe_group(builder)}"
            return RolloutTimeoutError(f"{where} was not done after grader_timeout_seconds={seconds}")

        async with time_limit(seconds, late):
            with trace.scope_span_sync("compute_group_rewards"):
                rewards = await builder.compute_group_rewards(trajectories, envs)
    group = TrajectoryGroup(
        trajectories_G=trajectories,
        final_rewards_G=[reward for reward, _ in rewards],
        metrics_G=[metrics for _, metrics in rewards],
        rollout_errors=result.errors,
        tags=builder.all_tags(),
        dataset_index=builder.dataset_index,
    )
    for i, (trajectory, total) in enumerate(zip(trajectories, group.get_total_rewards(), strict=True)):
        if termination.clamps(trajectory.stop_reason) and total > 0:  # lowered to 0 through the final reward
            group.metrics_G[i] = {**group.metrics_G[i], ZERO_REWARD_METRIC_KEY: 1}
            group.final_rewards_G[i] = -sum(transition.reward for transition in trajectory.transitions)
    group.trained_G = builder.select_trained(trajectories, envs)
    group.member_info_G = builder.describe_members(envs)
    group.roles_G = builder.member_roles(envs)
    group.rate_ranges = builder.rate_ranges()
    group.records = builder.describe_records(group, envs) if with_records else []
    return group


_OWN = do_group_rollout
"""A script may put a function of (builder, policy, strategy) in its place, as tinker-cookbook's verifiers_rl does."""


async def try_group_rollout(
    builder: EnvGroupBuilder,
    policy: TokenCompleter,
    config: RolloutConfig | None,
    *,
    name: str,
    with_notes: bool = False,
    with_records: bool = True,
) -> TrajectoryGroup | FailedGroup:
    """`do_group_rollout`, but returns a FailedGroup, with a warning, if a tolerant strategy gave the group up."""
    try:
        if do_group_rollout is not _OWN:
            return await do_group_rollout(builder, policy, None if config is None else config.effective_strategy())
        return await do_group_rollout(
            builder, policy, config=config, name=name, with_notes=with_notes, with_records=with_records
        )
    except GroupFailedError as error:
        if config is None or not config.effective_strategy().catches_group_errors:
            raise
        logger.warning("group %s is left out: %s", name, error)
        return FailedGroup(error.errors, builder.all_tags())


async def do_batch_rollout(
    builders: Sequence[EnvGroupBuilder],
    policy: TokenCompleter,
    config: RolloutConfig | None = None,
    num_groups_with_notes: int = 0,
    at_once: int = MAX_GROUPS_IN_FLIGHT,
) -> list[TrajectoryGroup | FailedGroup]:
    """Run the groups of a batch, one entry per builder. The policy is forked per group, so seeds do not depend on
    timing.

    Args:
        num_groups_with_notes: how many groups, from the first, keep their `logtree` output. No group has
            records.
        at_once: how many groups are sampled at a time.
    """
    groups = (
        try_group_rollout(
            builder,
            policy.fork("group", index),
            config,
            name=f"{index}, {describe_group(builder)}",
            with_notes=index < num_groups_with_notes,
            with_records=False,
        )
        for index, builder in enumerate(builders)
    )
    return await gather_limited(groups, len(builders), at_once)


def finished_groups(outcomes: Iterable[TrajectoryGroup | FailedGroup]) -> list[TrajectoryGroup]:
    """The successful groups, in order."""
    return [outcome for outcome in outcomes if isinstance(outcome, TrajectoryGroup)]


async def do_group_rollout_and_filter_constant_reward(
    sampling_client: SamplingClient,
    env_group_builder: EnvGroupBuilder,
    max_tokens: int,
    temperature: float,
    do_remove_constant_reward_groups: bool,
    enable_logging: bool = True,
    strategy: RolloutStrategy | None = None,
    termination: TerminationRewardPolicy | None = None,
) -> TrajectoryGroup | None:
    """`do_group_rollout` with an unseeded policy over a sampling client; raises the same errors.

    Returns:
        The group, or None, with a log line, if it is to be removed because its trained members all have the same
        reward.
    """
    policy = TinkerTokenCompleter(sampling_client, max_tokens, temperature)
    group = await do_group_rollout(env_group_builder, policy, strategy, termination)
    if not do_remove_constant_reward_groups or not is_constant(group):
        return group
    if enable_logging:
        logger.info("group %s removed: all of its rewards are the same", describe_group(env_group_builder))
    return None
