"""Tokens of rollouts and of training data, by what the hosted service bills them as."""

from __future__ import annotations

from collections.abc import Iterable

from tinker_cookbook.rl.types import TrajectoryGroup
from tinker_cookbook.utils.cost_estimation import CostTracker, TokenUsage
from tinker_cookbook.utils.lazy import tinker


def rollout_usage(trajectory_groups: Iterable[TrajectoryGroup]) -> TokenUsage:
    """What sampling some groups used: every turn's whole prompt, cached or not, and the tokens that the policy drew."""
    turns = [turn for group in trajectory_groups for one in group.trajectories_G for turn in one.transitions]
    cached = sum(turn.ac.prompt_cache_hit_tokens for turn in turns)
    return TokenUsage(
        sampled=sum(len(turn.ac.tokens) for turn in turns),
        prefill_cached=cached,
        prefill_uncached=sum(turn.ob.length for turn in turns) - cached,
    )


def training_usage(data_D: Iterable[tinker.Datum]) -> TokenUsage:
    """What training on datums uses: their inputs. A prefix that the turns of an episode share is in its datum once."""
    return TokenUsage(trained=sum(datum.model_input.length for datum in data_D))


def count_discarded_rollout(cost_tracker: CostTracker | None, trajectory_group: TrajectoryGroup) -> None:
    """Count what sampling a group used that is dropped before training; without a tracker nothing."""
    if cost_tracker is not None:
        cost_tracker.record_discarded_sampling(rollout_usage([trajectory_group]))
