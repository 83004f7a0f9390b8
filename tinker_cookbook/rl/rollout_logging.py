"""One line of JSON per trajectory: its rewards, and the lengths, rewards, metrics and logs of its turns, without
tokens.

`rollout_files` stores all rollouts of a step with token ids; this is the short form that scripts of tinker-cookbook
read.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinker_cookbook.rl.rollout_files import StepRollouts
from tinker_cookbook.rl.types import Trajectory, TrajectoryGroup
from tinker_cookbook.stores.training_store import TrainingRunStore
from tinker_cookbook.utils.files import to_jsonable, write_jsonl
from tinker_cookbook.utils.misc_utils import safezip
from tinker_cookbook.utils.secrets import redactor

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class RolloutSummaryExportConfig:
    """Labels of a file of summaries, and its name."""

    split: str
    """train, or eval/<name>"""
    iteration: int
    """the step"""
    base_name: str
    """the file's name begins with it: train, eval_<name>"""
    sampling_client_step: int | None = None
    """optimizer updates that the policy had seen; None: not known, or not the same for all groups"""


@dataclass(frozen=True)
class RolloutSummaryGroup:
    """A group to write, with its labels."""

    trajectory_group: TrajectoryGroup
    tags: list[str]
    sampling_client_step: int | None = None
    """optimizer updates that its policy had seen"""


def rollout_summaries_jsonl_path(iteration_dir: Path, base_name: str) -> Path:
    """The file of summaries in a step's folder."""
    return iteration_dir / f"{base_name}_rollout_summaries.jsonl"


def serialize_rollout_summaries_from_groups(
    *, split: str, iteration: int, groups_P: Sequence[RolloutSummaryGroup]
) -> list[dict[str, Any]]:
    """The lines of the groups, a dict of plain JSON types for each trajectory.

    Args:
        split, iteration: as in `RolloutSummaryExportConfig`.
        groups_P: the groups.

    Returns:
        For each trajectory `schema_version`, `split`, `iteration`, `group_idx`, `traj_idx`, `tags`,
        `sampling_client_step`, `total_reward`, `final_reward`, `trajectory_metrics`, `final_ob_len` (tokens) and
        `steps`. For each turn `step_idx`, `ob_len` and `ac_len` (tokens), `reward`, `episode_done`, `metrics` and
        `logs`.

    Raises:
        DataValidationError: a number is NaN or infinite.
    """
    rows: list[dict[str, Any]] = []
    for group_idx, entry in enumerate(groups_P):
        about = {"schema_version": SCHEMA_VERSION, "split": split, "iteration": iteration, "group_idx": group_idx}
        for member in entry.trajectory_group.members():
            row = about | {
                "traj_idx": member.index,
                "tags": entry.tags,
                "sampling_client_step": entry.sampling_client_step,
                "total_reward": member.total_reward,
                "final_reward": member.final_reward,
                "trajectory_metrics": member.metrics,
                "steps": list(_turns(member.trajectory)),
                "final_ob_len": member.trajectory.final_ob.length,
            }
            rows.append(to_jsonable(row))
    return rows


def _turns(trajectory: Trajectory) -> Iterator[dict[str, Any]]:
    for step_idx, transition in enumerate(trajectory.transitions):
        yield {
            "step_idx": step_idx,
            "ob_len": transition.ob.length,
            "ac_len": len(transition.ac.tokens),
            "reward": transition.reward,
            "episode_done": transition.episode_done,
            "metrics": transition.metrics,
            "logs": transition.logs,
        }


def serialize_rollout_summaries(
    *,
    split: str,
    iteration: int,
    trajectory_groups_P: Sequence[TrajectoryGroup],
    taglist_P: Sequence[list[str]],
    sampling_client_steps_P: Sequence[int | None] | None = None,
) -> list[dict[str, Any]]:
    """`serialize_rollout_summaries_from_groups` for lists of groups, their tags and the updates that their policies
    had seen (None: not known). Raises ValueError if the lists differ in length.
    """
    steps_P = [None] * len(trajectory_groups_P) if sampling_client_steps_P is None else sampling_client_steps_P
    groups_P = [RolloutSummaryGroup(*group) for group in safezip(trajectory_groups_P, taglist_P, steps_P)]
    return serialize_rollout_summaries_from_groups(split=split, iteration=iteration, groups_P=groups_P)


def write_rollout_summaries_jsonl(path: str | Path, **groups: Any) -> None:
    """Write the lines of the groups to a file, atomically; its folder is created. Arguments and errors as in
    `serialize_rollout_summaries`.
    """
    _write(Path(path), serialize_rollout_summaries(**groups))


def write_rollout_summaries_jsonl_from_groups(path: str | Path, **groups: Any) -> None:
    """Like `write_rollout_summaries_jsonl`, with the arguments of `serialize_rollout_summaries_from_groups`."""
    _write(Path(path), serialize_rollout_summaries_from_groups(**groups))


def write_summaries(store: TrainingRunStore, about: RolloutSummaryExportConfig, step: StepRollouts) -> None:
    """Write the lines of a step's successful groups to the step's folder."""
    groups_P = [
        RolloutSummaryGroup(group, group.tags, about.sampling_client_step if version is None else version)
        for group, version, _ in step.groups()
        if isinstance(group, TrajectoryGroup)
    ]
    rows = serialize_rollout_summaries_from_groups(split=about.split, iteration=about.iteration, groups_P=groups_P)
    store.write_rollouts(about.iteration, rows, about.base_name)


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    without_secrets = redactor()
    write_jsonl(path, [without_secrets(row) for row in rows])
