"""Letting a policy act in environments: one episode, or a whole group with its rewards."""

from __future__ import annotations

from collections.abc import Sequence

import tinker

from tinker_cookbook.completers import TokenCompleter, TokensWithLogprobs
from tinker_cookbook.rl.types import (
    ActionExtra,
    Env,
    EnvGroupBuilder,
    InitialObservationOverflow,
    Trajectory,
    TrajectoryGroup,
    Transition,
)
from tinker_cookbook.utils.misc_utils import gather_all


async def do_single_rollout(policy: TokenCompleter, env: Env) -> Trajectory:
    """One episode from the first observation to the env's end.

    An env whose first prompt is too long yields a single empty transition with its reward: it counts in the group's
    baseline and contributes no data.
    """
    first = await env.initial_observation()
    if isinstance(first, InitialObservationOverflow):
        empty = tinker.ModelInput.empty()
        overflow = Transition(
            empty, TokensWithLogprobs([], [], "length"), first.reward, True, dict(first.metrics), dict(first.logs)
        )
        return Trajectory([overflow], empty, stop_reason="context_overflow")
    observation, stop = first
    transitions: list[Transition] = []
    while True:
        action = await policy(observation, stop)
        extra: ActionExtra = {"stop_reason": action.stop_reason}
        result = await env.step(action.tokens, extra=extra)
        transitions.append(
            Transition(observation, action, result.reward, result.episode_done, result.metrics, result.logs)
        )
        observation, stop = result.next_observation, result.next_stop_condition
        if result.episode_done:
            return Trajectory(transitions, observation, stop_reason="completed")


async def do_group_rollout(builder: EnvGroupBuilder, policy: TokenCompleter) -> TrajectoryGroup:
    """All episodes of one group at once, then its rewards, selection and records.

    If one member fails the others are cancelled and the error is raised: opponents may be waiting for each other.
    """
    envs: Sequence[Env] = []
    try:
        envs = await builder.make_envs()
        trajectories = await gather_all(do_single_rollout(policy.fork("member", i), env) for i, env in enumerate(envs))
        rewards = await builder.compute_group_rewards(trajectories, envs)
        group = TrajectoryGroup(
            trajectories_G=trajectories,
            final_rewards_G=[reward for reward, _ in rewards],
            metrics_G=[metrics for _, metrics in rewards],
            trained_G=builder.select_trained(trajectories, envs),
            member_info_G=builder.describe_members(envs),
        )
        group.records = builder.make_records(group, envs)
        return group
    finally:
        await builder.cleanup()


async def do_batch_rollout(builders: Sequence[EnvGroupBuilder], policy: TokenCompleter) -> list[TrajectoryGroup]:
    """All groups of a batch at once, in order. The policy is forked per group, so seeds do not depend on timing."""
    return await gather_all(do_group_rollout(builder, policy.fork("group", i)) for i, builder in enumerate(builders))
