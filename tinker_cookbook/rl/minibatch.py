"""From groups to the datums of a training pass: filter, advantages, penalties, scale, and what became of each group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tinker_cookbook.exceptions import TrainingError, ZeroAdvantageError
from tinker_cookbook.rl.advantages import (
    AdvantageConfig,
    RoleBaselines,
    check_advantages,
    compute_advantages,
    is_constant,
    token_scales,
)
from tinker_cookbook.rl.data_processing import DatumMetadata, assemble_training_data, scale_advantages, scale_turns
from tinker_cookbook.rl.types import TrajectoryGroup
from tinker_cookbook.utils.cost_estimation import TokenUsage
from tinker_cookbook.utils.lazy import tinker, torch
from tinker_cookbook.utils.trace import scope_span_sync


class Penalty(Protocol):
    """Changes the advantages of single tokens, for example by how far they leave a reference policy.

    It gets all datums of a pass with their metadata (indices into `groups`), members of advantage zero included, and returns
    them in the same order, with metrics and the tokens that it used. It must not change tokens, logprobs or masks.
    """

    async def __call__(
        self, data_D: list[tinker.Datum], groups: Sequence[TrajectoryGroup], metadata_D: Sequence[DatumMetadata]
    ) -> tuple[list[tinker.Datum], dict[str, float], TokenUsage]: ...


@dataclass
class Minibatch:
    """What one training pass takes. Indices in the metadata are those of `groups`."""

    groups: list[TrajectoryGroup]
    advantages_P: list[torch.Tensor]
    data_D: list[tinker.Datum]
    metadata_D: list[DatumMetadata]
    metrics: dict[str, float] = field(default_factory=dict)
    usage: TokenUsage = TokenUsage()  # noqa: RUF009  it is frozen
    """tokens that the penalties used"""

    @property
    def num_trained_groups(self) -> int:
        return len({meta["group_idx"] for meta in self.metadata_D})

    def append(self, other: Minibatch) -> None:
        """Add the groups, datums and tokens of another one, whose metrics are left out."""
        offset = len(self.groups)
        self.groups += other.groups
        self.advantages_P += other.advantages_P
        self.data_D += other.data_D
        self.usage += other.usage
        self.metadata_D += [
            DatumMetadata(group_idx=meta["group_idx"] + offset, traj_idx=meta["traj_idx"]) for meta in other.metadata_D
        ]

    def reordered(self, order: Sequence[int]) -> Minibatch:
        """The same datums in the same order, with the groups in another one: first group `order[0]`, and so on."""
        place = {old: new for new, old in enumerate(order)}
        return Minibatch(
            [self.groups[i] for i in order],
            [self.advantages_P[i] for i in order],
            self.data_D,
            [DatumMetadata(group_idx=place[meta["group_idx"]], traj_idx=meta["traj_idx"]) for meta in self.metadata_D],
            self.metrics,
            self.usage,
        )


async def prepare_minibatch(
    groups: Sequence[TrajectoryGroup],
    advantage: AdvantageConfig,
    remove_constant: bool = False,
    role_baselines: RoleBaselines | None = None,
    penalties: Sequence[Penalty] = (),
    include_provenance: bool = True,
) -> Minibatch:
    """Groups of one pass as datums. A group that does not train keeps its place, so that tags and indices stay true.

    `include_provenance` is that of `trajectory_to_data`.
    """
    groups = list(groups)
    computed_P = compute_advantages(groups, advantage, role_baselines)
    if advantage.credit == "turn":  # equal totals may be made of turns that differ
        constant_P = [not bool(advantages.any()) for advantages in computed_P]
    else:
        constant_P = [is_constant(group) for group in groups]
    kept_P = [not (remove_constant and constant) for constant in constant_P]
    advantages_P = [
        advantages_G if kept else torch.zeros_like(advantages_G)
        for advantages_G, kept in zip(computed_P, kept_P, strict=True)
    ]
    with scope_span_sync("assemble_training_data"):
        data_D, metadata_D = assemble_training_data(groups, advantages_P, include_provenance, keep_zero=bool(penalties))
    metrics, usage = dict[str, float](), TokenUsage()
    if penalties:
        data_D, metadata_D = _select(data_D, metadata_D, [kept_P[meta["group_idx"]] for meta in metadata_D])
        for penalty in penalties if data_D else ():
            data_D, found, used = await penalty(data_D, groups, metadata_D)
            metrics |= found
            usage += used
        data_D, metadata_D = _select(
            data_D, metadata_D, [bool((d.loss_fn_inputs["advantages"].to_numpy() != 0).any()) for d in data_D]
        )
    if advantage.scale == "turn":
        data_D = scale_turns(data_D)
    else:
        data_D = scale_advantages(data_D, metadata_D, token_scales(groups, advantage.scale, kept_P))
    return Minibatch(groups, advantages_P, data_D, metadata_D, metrics, usage)


def _select(
    data_D: Sequence[tinker.Datum], metadata_D: Sequence[DatumMetadata], selected_D: Sequence[bool]
) -> tuple[list[tinker.Datum], list[DatumMetadata]]:
    kept = [i for i, selected in enumerate(selected_D) if selected]
    return [data_D[i] for i in kept], [metadata_D[i] for i in kept]


def why_untrained(step: int, batch: Minibatch) -> TrainingError:
    """Why a batch of a step has no datum, as the error that may end the run."""
    if not batch.groups:
        return TrainingError(
            f"step {step}: every group failed, so there is nothing to train on; the log has each group's error"
        )
    try:
        check_advantages(batch.groups, batch.advantages_P)
    except ZeroAdvantageError as error:
        return error
    return TrainingError(
        f"step {step}: rewards differ, but no member with an advantage has a sampled token: every prompt of this "
        "batch was too long; shorten the prompts"
    )
