"""Turn the rewards of a group into one advantage per member, and set the scale of advantages in the loss.

The losses are sums over tokens, so a mean over tokens is a division of the advantages. It is done here and visible in
the records.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import chz

from tinker_cookbook.exceptions import ConfigurationError, DataValidationError, ZeroAdvantageError
from tinker_cookbook.rl.types import TrajectoryGroup
from tinker_cookbook.utils.fields import doc_of
from tinker_cookbook.utils.lazy import torch
from tinker_cookbook.utils.narrowing import to_list

Baseline: TypeAlias = Literal[
    "mean", "zscore", "leave_one_out", "maxrl", "gdpo", "role_mean", "role", "constant", "none"
]
SURVIVORS_HINT = (
    " Rejection leaves members of equal reward (accept_min_reward with rewards of 0 and 1, say): advantage.baseline=constant "
    "gives all of them the same advantage."
)
Scale: TypeAlias = Literal["sum", "sequence", "token", "turn"]
Credit: TypeAlias = Literal["episode", "turn"]


@chz.chz(typecheck=True)
class AdvantageKeys:
    """The settings that turn rewards into advantages, all optional: None means not set."""

    baseline: Baseline | None = chz.field(
        default=None,
        doc="mean: reward minus the group's mean; zscore: that over its standard deviation; leave_one_out: reward minus "
        "the mean of the others; maxrl: rewards of 0 and 1, minus the mean, over the mean; gdpo: the rewards of `parts`, "
        "each a z-score, weighted and divided by the batch's deviation; role_mean: reward minus the mean of the group's "
        "members in the same role; role: reward minus a "
        "running mean per role; constant: 1 for each member; none: the reward",
    )
    parts: dict[str, float] | None = chz.field(
        default=None,
        doc="baseline=gdpo: metrics of the members to treat as separate rewards, with weights (advantage.parts.correct=1)",
    )
    later_baseline: Baseline | None = chz.field(
        default=None, doc="credit=turn: baseline of the turns after the first; None: the same one"
    )
    scale: Scale | None = chz.field(
        default=None,
        doc="normalisation of the loss: sum of tokens; sequence: mean over each trajectory's tokens; token: mean over all "
        "tokens of the batch; turn: mean over each turn's tokens",
    )
    credit: Credit | None = chz.field(
        default=None,
        doc="the reward that a token gets: episode: the total reward of its trajectory; turn: the reward of its turn "
        "only, against the same turn of the others",
    )
    role_decay: float | None = chz.field(default=None, doc="baseline=role: decay of the running mean")

    def over(self, base: AdvantageConfig) -> AdvantageConfig:
        """`base`, overridden by the fields that are set here. Raises ConfigurationError for fields that do not go
        together.
        """
        given = {key: value for key in chz.chz_fields(AdvantageConfig) if (value := getattr(self, key)) is not None}
        return self if isinstance(self, AdvantageConfig) else chz.replace(base, **given)


def _doc(key: str) -> str:
    return doc_of(chz.chz_fields(AdvantageKeys)[key])


@chz.chz(typecheck=True)
class AdvantageConfig(AdvantageKeys):
    """How rewards become advantages. Only members that train count as the group: with rejection sampling, the
    survivors.
    """

    baseline: Baseline = chz.field(default="mean", doc=_doc("baseline"))
    scale: Scale = chz.field(default="sum", doc=_doc("scale"))
    credit: Credit = chz.field(default="episode", doc=_doc("credit"))
    role_decay: float = chz.field(default=0.95, doc=_doc("role_decay"))

    @chz.validate
    def _check(self) -> None:
        if not 0 <= self.role_decay < 1:
            raise ConfigurationError(f"role_decay={self.role_decay}: must be at least 0 and below 1")
        for name in ("baseline", "later_baseline"):
            if self.credit == "turn" and (baseline := getattr(self, name)) in ("role_mean", "role", "constant", "gdpo"):
                raise ConfigurationError(
                    f"credit=turn compares turns within the group, which {name}={baseline} does not do; use {name}=mean, "
                    "zscore, leave_one_out or none"
                )
        if self.parts is not None and self.baseline not in (None, "gdpo"):
            raise ConfigurationError(
                f"parts are for baseline=gdpo, not for baseline={self.baseline}; leave one of them out"
            )
        if self.parts is not None and not any(self.parts.values()):
            raise ConfigurationError(
                f"parts={self.parts} has no weight other than 0; name a metric, parts.correct=1 for example"
            )
        if self.credit != "turn" and self.later_baseline is not None:
            raise ConfigurationError(
                f"later_baseline={self.later_baseline} needs a separate credit for each turn; add credit=turn"
            )


@dataclass
class RoleBaselines:
    """A running mean of rewards per role (role-conditioned advantage estimation, Liu et al. 2025, SPIRAL).

    Seats of a game are not exchangeable: the first mover may win more often whatever it says. So each role is compared
    with its own history, b <- decay * b + (1 - decay) * r, advantage r - b, and even a group of one trains. A role is
    the group's tags plus the member's role. The means are part of the run's state.
    """

    decay: float
    means: dict[str, float] = field(default_factory=dict[str, float])

    def advantages(self, roles_G: Sequence[str], rewards_G: torch.Tensor, trained_G: torch.Tensor) -> torch.Tensor:
        """Update the means with the members that train, in order, and return reward minus mean, float64 (G,)."""
        advantages_G = torch.zeros_like(rewards_G)
        for i, (role, reward) in enumerate(zip(roles_G, to_list(rewards_G), strict=True)):
            if trained_G[i]:
                self.means[role] = self.decay * self.means.get(role, 0.0) + (1 - self.decay) * reward
                advantages_G[i] = reward - self.means[role]
        return advantages_G


def compute_advantages(
    trajectory_groups_P: Sequence[TrajectoryGroup],
    config: AdvantageConfig | None = None,
    role_baselines: RoleBaselines | None = None,
) -> list[torch.Tensor]:
    """One advantage per member, float32 (G,) per group; 0 for members that do not train. Not scaled yet.

    With `credit=turn`, one per member and turn: (G, T), where T is the largest number of turns; 0 after a member's
    last turn.
    The default is reward minus the mean over the members that train (GRPO without the division, Liu et al. 2025).

    Raises:
        DataValidationError: a reward is not a finite number.
    """
    config = config or AdvantageConfig()
    if config.baseline == "gdpo":
        return _gdpo_advantages(trajectory_groups_P, config.parts or {})
    advantages_P: list[torch.Tensor] = []
    for index, group in enumerate(trajectory_groups_P):
        rewards_G = torch.tensor(group.get_total_rewards(), dtype=torch.float64)
        if not bool(rewards_G.isfinite().all()):
            raise DataValidationError(f"group {index}: rewards must be finite numbers, got {to_list(rewards_G)}")
        trained_G = torch.tensor(group.is_trained(), dtype=torch.bool)
        if config.credit == "turn":
            advantages_P.append(_turn_advantages(group, config, trained_G))
            continue
        if config.baseline == "role":
            if role_baselines is None:
                raise ConfigurationError("baseline=role needs role_baselines, the running means of the run")
            advantages_G = role_baselines.advantages(group.get_roles(), rewards_G, trained_G)
        elif config.baseline == "role_mean":
            roles, advantages_G = group.get_roles(), torch.zeros_like(rewards_G)
            for role in dict.fromkeys(roles):
                of_role_G = trained_G & torch.tensor([other == role for other in roles])
                advantages_G = torch.where(of_role_G, subtract_baseline(rewards_G, of_role_G, "mean"), advantages_G)
        else:
            advantages_G = subtract_baseline(rewards_G, trained_G, config.baseline)
        advantages_P.append(torch.where(trained_G, advantages_G, 0.0).float())
    return advantages_P


def _gdpo_advantages(
    trajectory_groups_P: Sequence[TrajectoryGroup], weights: Mapping[str, float]
) -> list[torch.Tensor]:
    """GDPO (arXiv 2601.05242): S = sum over rewards k of weight_k * z_k, A = S / std of S over the batch.

    z_k is the z-score of reward k within the group, among the members that train, so that rewards of different spread weigh the
    same and combinations with the same sum stay distinct. S has mean 0 in each group, hence in the batch: nothing is subtracted.
    """
    if not weights:
        raise ConfigurationError(
            "baseline=gdpo needs advantage.parts, the metrics that are rewards, parts.correct=1 for example"
        )
    sums_P: list[torch.Tensor] = []
    trained_P = [torch.tensor(group.is_trained(), dtype=torch.bool) for group in trajectory_groups_P]
    for index, (group, trained_G) in enumerate(zip(trajectory_groups_P, trained_P, strict=True)):
        sum_G = torch.zeros(len(trained_G), dtype=torch.float64)
        for name, weight in weights.items():
            sum_G += weight * subtract_baseline(part_rewards(group, name, index), trained_G, "zscore")
        sums_P.append(torch.where(trained_G, sum_G, 0.0))
    counted = torch.cat(
        [sum_G[trained_G] for sum_G, trained_G in zip(sums_P, trained_P, strict=True)] or [torch.zeros(0)]
    )
    deviation = float(counted.std(correction=0)) if len(counted) else 0.0
    return [(sum_G / deviation if deviation > 0 else sum_G).float() for sum_G in sums_P]


def part_rewards(group: TrajectoryGroup, name: str, index: int = 0) -> torch.Tensor:
    """A metric of each member as a reward, float64 (G,): its sum over the turns, plus its value in the group's metrics.

    Raises DataValidationError if a member has no such metric, or one that is not finite; `index` is the group in the message.
    """
    values: list[float] = []
    for trajectory, of_group in zip(group.trajectories_G, group.metrics_G, strict=True):
        rows = [*(transition.metrics for transition in trajectory.transitions), of_group]
        found = [float(row[name]) for row in rows if name in row]
        if not found or not all(map(math.isfinite, found)):
            known = ", ".join(sorted({key for row in rows for key in row})) or "none"
            raise DataValidationError(
                f"group {index}: advantage.parts names {name!r}, which is {found or 'missing'} for a member; there are {known}"
            )
        values.append(sum(found))
    return torch.tensor(values, dtype=torch.float64)


def _turn_advantages(group: TrajectoryGroup, config: AdvantageConfig, trained_G: torch.Tensor) -> torch.Tensor:
    """(G, T): the reward of each turn minus the baseline of the same turn; the final reward is added to the last turn."""
    lengths_G = [len(trajectory.transitions) for trajectory in group.trajectories_G]
    advantages_G_T = torch.zeros(len(lengths_G), max(lengths_G, default=0))
    rewards_G_T = torch.zeros(advantages_G_T.shape, dtype=torch.float64)
    for i, trajectory in enumerate(group.trajectories_G):
        for turn, transition in enumerate(trajectory.transitions):
            rewards_G_T[i, turn] = transition.reward
        rewards_G_T[i, lengths_G[i] - 1] += group.final_rewards_G[i]
    for turn in range(advantages_G_T.shape[1]):
        present_G = trained_G & (torch.tensor(lengths_G) > turn)
        baseline = (config.later_baseline or config.baseline) if turn else config.baseline
        advantages_G = subtract_baseline(rewards_G_T[:, turn], present_G, baseline)
        advantages_G_T[:, turn] = torch.where(present_G, advantages_G, 0.0).float()
    return advantages_G_T


def subtract_baseline(rewards_G: torch.Tensor, counted_G: torch.Tensor, baseline: Baseline) -> torch.Tensor:
    """Rewards minus the baseline of the members that count, float64 (G,); undefined for the others."""
    survivors = rewards_G[counted_G]
    if not len(survivors):
        return torch.zeros_like(rewards_G)
    if baseline == "constant":
        return torch.ones_like(rewards_G)
    if baseline == "none":
        return rewards_G
    if bool((survivors == survivors[0]).all()):
        return torch.zeros_like(rewards_G)  # exactly zero, regardless of the rounding of the mean
    advantages_G = rewards_G - survivors.mean()
    if baseline == "maxrl":
        return _maxrl_advantages(rewards_G, survivors)
    if baseline == "zscore":
        deviation = survivors.std(correction=0)
        return advantages_G / deviation if deviation > 0 else torch.zeros_like(rewards_G)
    if baseline == "leave_one_out":
        # r - (sum - r) / (n - 1) = (r - mean) n / (n - 1); survivors differ, so there are at least two.
        return advantages_G * len(survivors) / (len(survivors) - 1)
    return advantages_G


def _maxrl_advantages(rewards_G: torch.Tensor, survivors: torch.Tensor) -> torch.Tensor:
    """MaxRL (arXiv 2602.02710): (r - m) / m, with m the pass rate of a group whose rewards are 0 and 1.

    Its expectation is the gradient of log p = -sum over k >= 1 of (1 - p)^k / k without the terms from k = G on, where p is the
    chance to pass and G the size of the group; plain policy gradient is the first term. A group without success has advantage 0.
    """
    if not bool(((survivors == 0) | (survivors == 1)).all()):
        raise DataValidationError(
            f"baseline=maxrl maximises the likelihood of passing, so rewards must be 0 or 1, got {to_list(survivors)}; use "
            "baseline=mean or zscore for other rewards"
        )
    return (rewards_G - survivors.mean()) / survivors.mean()


def token_scales(
    trajectory_groups_P: Sequence[TrajectoryGroup], scale: Scale, kept_P: Sequence[bool] | None = None
) -> list[list[float]]:
    """Divisor of each member's token advantages: 1, its number of sampled tokens, or that of all members that train.

    With scale=turn it is 1, because each turn is divided by its own length (`data_processing.scale_turns`). `kept_P`
    marks the groups that count among those that train; None means all.
    """
    tokens_P_G = [[float(traj.num_action_tokens) for traj in group.trajectories_G] for group in trajectory_groups_P]
    if scale == "sequence":
        return [[max(1.0, tokens) for tokens in tokens_G] for tokens_G in tokens_P_G]
    total = 1.0
    if scale == "token":
        total = sum(
            tokens
            for i, (group, tokens_G) in enumerate(zip(trajectory_groups_P, tokens_P_G, strict=True))
            for tokens, trained in zip(tokens_G, group.is_trained(), strict=True)
            if trained and (kept_P is None or kept_P[i])
        )
    return [[max(1.0, total)] * len(tokens_G) for tokens_G in tokens_P_G]


def remove_constant_reward_groups(trajectory_groups_P: Sequence[TrajectoryGroup]) -> list[TrajectoryGroup]:
    """Groups whose trained members do not all have the same reward. May be empty."""
    return [group for group in trajectory_groups_P if not is_constant(group)]


def is_constant(group: TrajectoryGroup) -> bool:
    """Whether all members that train have the same reward (or none trains). Such a group has no training signal."""
    return len(set(group.trained_rewards())) <= 1


def lacks_signal(group: TrajectoryGroup, config: AdvantageConfig) -> bool:
    """Whether a group cannot train: `is_constant`, or for gdpo, whether each of its rewards is the same for all members that
    train. Never true with credit=turn: equal totals may be sums of different turns.
    """
    if config.credit == "turn":
        return False
    if config.baseline == "gdpo" and config.parts:
        trained_G = torch.tensor(group.is_trained(), dtype=torch.bool)
        return all(len(set(to_list(part_rewards(group, name)[trained_G]))) <= 1 for name in config.parts)
    return is_constant(group)


def check_advantages(trajectory_groups_P: Sequence[TrajectoryGroup], advantages_P: Sequence[torch.Tensor]) -> None:
    """Raise ZeroAdvantageError, which lists the rewards, when every advantage of the batch is zero."""
    if any(bool((advantages_G != 0).any()) for advantages_G in advantages_P):
        return
    rows: list[str] = []
    same_survivors = False
    for i, group in enumerate(trajectory_groups_P):
        rewards = " ".join(
            f"{reward:.3g}{'' if trained else '(rejected)'}"
            for reward, trained in zip(group.get_total_rewards(), group.is_trained(), strict=True)
        )
        survivors = len(group.trained_rewards())
        same_survivors |= 0 < survivors < len(group.trajectories_G)
        remark = "" if survivors > 1 else f"   <- {survivors or 'no'} survivor{'' if survivors == 1 else 's'}"
        rows.append(f"  group {i:3d}: {rewards}{remark}")
    raise ZeroAdvantageError(
        "every advantage of this batch is zero, so this step would train nothing: within each group the members that train "
        "all have the same reward, or fewer than two are left. Rewards:\n" + "\n".join(rows) + "\n"
        "Use larger groups, a task or reward that varies, a higher temperature, or a judge or filter that rejects less."
        + (SURVIVORS_HINT if same_survivors else "")
    )
