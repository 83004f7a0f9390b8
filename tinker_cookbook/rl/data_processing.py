"""From trajectories to training data: advantages, merging of turns into datums, and the checks in between."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, TypedDict

import chz
import numpy as np
import tinker
import torch

from tinker_cookbook.exceptions import DataValidationError, ZeroAdvantageError
from tinker_cookbook.rl.types import Trajectory, TrajectoryGroup


@chz.chz(typecheck=True)
class AdvantageConfig:
    """How rewards become advantages. The group is what trains of it: with rejection sampling, the survivors."""

    baseline: Literal["mean", "zscore", "constant"] = chz.field(
        default="mean",
        doc="mean: reward minus the group's mean; zscore: that over its standard deviation; constant: 1 for each member",
    )
    per_token: bool = chz.field(
        default=False,
        doc="divide by the number of tokens the member generated, so that each trajectory weighs the same",
    )


class DatumMetadata(TypedDict):
    """Where a datum came from."""

    group_idx: int
    traj_idx: int


def compute_advantages(
    trajectory_groups_P: list[TrajectoryGroup], config: AdvantageConfig | None = None
) -> list[torch.Tensor]:
    """One advantage per member, float32 (G,) per group; 0 for members that do not train.

    The default is reward minus the mean over the members that train (GRPO without the division, Liu et al. 2025).
    """
    config = config or AdvantageConfig()
    return [_group_advantages(group, config) for group in trajectory_groups_P]


def _group_advantages(group: TrajectoryGroup, config: AdvantageConfig) -> torch.Tensor:
    rewards_G = torch.tensor(group.get_total_rewards(), dtype=torch.float64)
    trained_G = torch.tensor(group.is_trained(), dtype=torch.bool)
    if not bool(trained_G.any()):
        return torch.zeros(len(rewards_G))
    survivors = rewards_G[trained_G]
    centered_G = rewards_G - survivors.mean()
    if bool((survivors == survivors[0]).all()):
        centered_G = torch.zeros_like(rewards_G)  # exactly zero, whatever the mean was rounded to
    if config.baseline == "constant":
        advantages_G = torch.ones_like(rewards_G)
    elif config.baseline == "zscore":
        deviation = survivors.std(correction=0)
        advantages_G = centered_G / deviation if deviation > 0 else torch.zeros_like(rewards_G)
    else:
        advantages_G = centered_G
    if config.per_token:
        lengths_G = torch.tensor([max(1, trajectory.num_action_tokens) for trajectory in group.trajectories_G])
        advantages_G = advantages_G / lengths_G
    return torch.where(trained_G, advantages_G, 0.0).float()


def remove_constant_reward_groups(trajectory_groups_P: list[TrajectoryGroup]) -> list[TrajectoryGroup]:
    """Groups whose trained members do not all have the same reward. May be empty."""
    return [group for group in trajectory_groups_P if len(set(group.trained_rewards())) > 1]


@dataclass
class _Sequence:
    """Tokens that will become one datum, each with logprob, advantage and mask."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    advantages: list[float] = field(default_factory=list)
    mask: list[float] = field(default_factory=list)

    def add_context(self, tokens: Sequence[int]) -> None:
        self.tokens.extend(tokens)
        for values in (self.logprobs, self.advantages, self.mask):
            values.extend([0.0] * len(tokens))

    def add_action(self, tokens: Sequence[int], logprobs: Sequence[float], advantage: float) -> None:
        self.tokens.extend(tokens)
        self.logprobs.extend(logprobs)
        self.advantages.extend([advantage] * len(tokens))
        self.mask.extend([1.0] * len(tokens))

    def to_datum(self) -> tinker.Datum:
        # Position i predicts token i + 1: inputs lose their last token, everything else its first.
        return tinker.Datum(
            model_input=tinker.ModelInput.from_ints(self.tokens[:-1]),
            loss_fn_inputs={
                "target_tokens": tinker.TensorData.from_numpy(np.array(self.tokens[1:], dtype=np.int64)),
                "logprobs": tinker.TensorData.from_numpy(np.array(self.logprobs[1:], dtype=np.float32)),
                "advantages": tinker.TensorData.from_numpy(np.array(self.advantages[1:], dtype=np.float32)),
                "mask": tinker.TensorData.from_numpy(np.array(self.mask[1:], dtype=np.float32)),
            },
        )


def trajectory_to_data(traj: Trajectory, traj_advantage: float) -> list[tinker.Datum]:
    """The datums of one trajectory: one as long as each observation extends what came before, token for token.

    With turns (ob1, ac1), (ob2, ac2) and ob2 = ob1 + ac1 + delta the datum is ob1 ac1 delta ac2, where ob1 and delta have
    mask, advantage and logprob 0. Where an observation does not start with exactly what came before, a new datum begins.

    Raises:
        DataValidationError: tokens and logprobs of an action differ in number, or an observation is not text.
    """
    data: list[tinker.Datum] = []
    current = _Sequence()
    for turn, transition in enumerate(traj.transitions):
        observation, action = _text_tokens(transition.ob), transition.ac
        if not action.tokens:
            continue
        if len(action.tokens) != len(action.logprobs):
            raise DataValidationError(
                f"turn {turn}: {len(action.tokens)} sampled tokens but {len(action.logprobs)} logprobs"
            )
        if observation[: len(current.tokens)] != current.tokens:
            data.append(current.to_datum())
            current = _Sequence()
        current.add_context(observation[len(current.tokens) :])
        current.add_action(action.tokens, action.logprobs, traj_advantage)
    if current.tokens:
        data.append(current.to_datum())
    return data


def _text_tokens(observation: tinker.ModelInput) -> list[int]:
    tokens: list[int] = []
    for chunk in observation.chunks:
        if not isinstance(chunk, tinker.EncodedTextChunk):
            raise DataValidationError(
                f"an observation holds a {type(chunk).__name__}; only text can be trained on here"
            )
        tokens.extend(chunk.tokens)
    return tokens


def assemble_training_data(
    trajectory_groups_P: list[TrajectoryGroup], advantages_P: list[torch.Tensor]
) -> tuple[list[tinker.Datum], list[DatumMetadata]]:
    """Datums of all members that train and whose advantage is not zero, with the group and member each came from."""
    data_D: list[tinker.Datum] = []
    metadata_D: list[DatumMetadata] = []
    for group_idx, (group, advantages_G) in enumerate(zip(trajectory_groups_P, advantages_P, strict=True)):
        members = zip(group.trajectories_G, group.is_trained(), advantages_G.tolist(), strict=True)
        for traj_idx, (trajectory, trained, advantage) in enumerate(members):
            if not trained or advantage == 0:
                continue
            for datum in trajectory_to_data(trajectory, advantage):
                data_D.append(datum)
                metadata_D.append({"group_idx": group_idx, "traj_idx": traj_idx})
    return data_D, metadata_D


def check_advantages(trajectory_groups_P: list[TrajectoryGroup], advantages_P: list[torch.Tensor]) -> None:
    """Raise ZeroAdvantageError, with the rewards that led to it, when no advantage of the batch differs from zero."""
    if any(bool((advantages_G != 0).any()) for advantages_G in advantages_P):
        return
    rows = []
    for i, group in enumerate(trajectory_groups_P):
        rewards = " ".join(
            f"{reward:.3g}{'' if trained else '(rejected)'}"
            for reward, trained in zip(group.get_total_rewards(), group.is_trained(), strict=True)
        )
        survivors = len(group.trained_rewards())
        remark = "" if survivors > 1 else f"   <- {survivors or 'no'} survivor{'' if survivors == 1 else 's'}"
        rows.append(f"  group {i:3d}: {rewards}{remark}")
    raise ZeroAdvantageError(
        "every advantage of this batch is zero, so this step would train nothing: within each group the members that train "
        "all have the same reward, or fewer than two are left. Rewards:\n" + "\n".join(rows) + "\n"
        "Use larger groups, a task or reward that varies, a higher temperature, a judge or filter that rejects less, or "
        "on_zero_advantages=skip to skip such steps and count them."
    )
