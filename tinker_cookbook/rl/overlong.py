"""Overlong filtering and soft overlong punishment (DAPO).

Replies at the token limit are masked, or their reward falls as they approach it. Both are from Yu et al. 2025, "DAPO"
(arXiv 2503.14476), section 3.4. A truncated reply tells nothing about how good it would have been, so its reward is noise; and a
policy that is only told so at the limit learns nothing about lengths below it.
"""

from __future__ import annotations

from dataclasses import replace

import chz

from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.rl.types import StopReason, Trajectory, TrajectoryGroup

OVERLONG_METRIC_KEY = "overlong_penalty"
"""Group metric of members: the change of the reward by `OverlongConfig.penalty_tokens`, at most 0."""

_TRUNCATED = frozenset({StopReason.MAX_TOKENS, StopReason.MAX_SAMPLED_TOKENS, StopReason.CONTEXT_OVERFLOW})


@chz.chz(typecheck=True)
class OverlongConfig:
    """How to treat rollouts that are truncated, or nearly so."""

    mask: bool = chz.field(
        default=False, doc="truncated rollouts do not train; their rewards still count in the group's baseline"
    )
    penalty_tokens: int = chz.field(
        default=0,
        doc="over this many tokens before max_tokens the reward falls, by up to `penalty`; 0: it does not",
        validator=chz.validators.ge(0),
    )
    penalty: float = chz.field(default=1.0, doc="penalty of the longest reply", validator=chz.validators.gt(0))

    def check(self, max_tokens: int) -> None:
        """Raise ConfigurationError for settings that do nothing, or that reach beyond the shortest reply."""
        if not self.mask and not self.penalty_tokens:
            raise ConfigurationError(
                "overlong does nothing; set overlong.mask=True or overlong.penalty_tokens, or leave it out"
            )
        if self.penalty_tokens > max_tokens:
            raise ConfigurationError(
                f"overlong.penalty_tokens={self.penalty_tokens} is more than max_tokens={max_tokens}; lower it"
            )


def soft_overlong_penalty(length: int, max_tokens: int, penalty_tokens: int) -> float:
    """Equation 13 of the paper: 0 up to max_tokens - penalty_tokens, then linearly down to -1 at max_tokens and beyond.

    Args:
        length: tokens of a reply, its stop token included.
    """
    over = length - (max_tokens - penalty_tokens)
    return 0.0 if over <= 0 else -min(1.0, over / penalty_tokens)


def is_truncated(trajectory: Trajectory) -> bool:
    """Whether a token limit ended the rollout: its last reply has no stop token, or its token budget was used up."""
    last = trajectory.transitions[-1].ac if trajectory.transitions else None
    return trajectory.stop_reason in _TRUNCATED or (last is not None and last.stop_reason == "length")


def penalize_overlong(group: TrajectoryGroup, config: OverlongConfig, max_tokens: int) -> TrajectoryGroup:
    """The group with the penalty of each member's longest reply in its final reward and its metrics."""
    if not config.penalty_tokens:
        return group
    penalties_G = [
        config.penalty
        * min(
            (soft_overlong_penalty(len(turn.ac.tokens), max_tokens, config.penalty_tokens) for turn in one.transitions),
            default=0.0,
        )
        for one in group.trajectories_G
    ]
    rewards = [reward + penalty for reward, penalty in zip(group.final_rewards_G, penalties_G, strict=True)]
    metrics = [
        {**metrics, OVERLONG_METRIC_KEY: penalty} for metrics, penalty in zip(group.metrics_G, penalties_G, strict=True)
    ]
    return replace(group, final_rewards_G=rewards, metrics_G=metrics)


def without_truncated(group: TrajectoryGroup) -> TrajectoryGroup:
    """The group with its truncated members marked as not training."""
    kept_G = [
        trained and not is_truncated(one) for trained, one in zip(group.is_trained(), group.trajectories_G, strict=True)
    ]
    return replace(group, trained_G=kept_G)
