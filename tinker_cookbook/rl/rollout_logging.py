"""A line of JSON per trajectory: what it was worth, and the lengths, rewards, metrics and logs of its turns, without tokens.

`rollout_files` keeps all of a step's rollouts, down to token ids; this is the short form that scripts of tinker-cookbook read.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinker_cookbook.rl.types import Trajectory, TrajectoryGroup
from tinker_cookbook.utils.files import to_jsonable, write_jsonl
from tinker_cookbook.utils.misc_utils import safezip
from tinker_cookbook.utils.secrets import redactor

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class RolloutSummaryExportConfig:
    """What a file of summaries says of its groups, and how it is called."""

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
    """A group to write, with what is said of it."""

    trajectory_group: TrajectoryGroup
    tags: list[str]
    sampling_client_step: int | None = None
    """optimizer updates that its policy had seen"""


def rollout_summaries_jsonl_path(iteration_dir: Path, base_name: str) -> Path:
    """The file of summaries in a step's folder."""
    return iteration_dir / f"{base_name}_rollout_summaries.jsonl"


def serialize_rollout_summaries(
    *,
    split: str,
    iteration: int,
    trajectory_groups_P: Sequence[TrajectoryGroup],
    taglist_P: Sequence[list[str]],
    sampling_client_steps_P: Sequence[int | None] | None = None,
) -> list[dict[str, Any]]:
    """The lines of the groups, a dict of plain JSON types for each trajectory.

    Args:
        split, iteration: as in `RolloutSummaryExportConfig`.
        trajectory_groups_P: the groups.
        taglist_P: the tags of each.
        sampling_client_steps_P: the optimizer updates that each one's policy had seen; None: not known.

    Returns:
        Of each trajectory `schema_version`, `split`, `iteration`, `group_idx`, `traj_idx`, `tags`, `sampling_client_step`,
        `total_reward`, `final_reward`, `trajectory_metrics`, `final_ob_len` (tokens) and `steps`: of each turn `step_idx`,
        `ob_len` and `ac_len` (tokens), `reward`, `episode_done`, `metrics` and `logs`.

    Raises:
        ValueError: the lists differ in length.
        DataValidationError: a number is NaN or infinite.
    """
    steps_P = [None] * len(trajectory_groups_P) if sampling_client_steps_P is None else sampling_client_steps_P
    rows: list[dict[str, Any]] = []
    for group_idx, (group, tags, sampled_at) in enumerate(safezip(trajectory_groups_P, taglist_P, steps_P)):
        about = {"schema_version": SCHEMA_VERSION, "split": split, "iteration": iteration, "group_idx": group_idx}
        members = safezip(group.trajectories_G, group.get_total_rewards(), group.final_rewards_G, group.metrics_G)
        for traj_idx, (trajectory, total_reward, final_reward, metrics) in enumerate(members):
            row = about | {
                "traj_idx": traj_idx,
                "tags": tags,
                "sampling_client_step": sampled_at,
                "total_reward": total_reward,
                "final_reward": final_reward,
                "trajectory_metrics": metrics,
                "steps": list(_turns(trajectory)),
                "final_ob_len": trajectory.final_ob.length,
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


def serialize_rollout_summaries_from_groups(
    *, split: str, iteration: int, groups_P: Sequence[RolloutSummaryGroup]
) -> list[dict[str, Any]]:
    """`serialize_rollout_summaries` of groups that bring their tags along."""
    return serialize_rollout_summaries(
        split=split,
        iteration=iteration,
        trajectory_groups_P=[group.trajectory_group for group in groups_P],
        taglist_P=[group.tags for group in groups_P],
        sampling_client_steps_P=[group.sampling_client_step for group in groups_P],
    )


def write_rollout_summaries_jsonl(
    path: str | Path,
    *,
    split: str,
    iteration: int,
    trajectory_groups_P: Sequence[TrajectoryGroup],
    taglist_P: Sequence[list[str]],
    sampling_client_steps_P: Sequence[int | None] | None = None,
) -> None:
    """Write the lines of the groups to a file, whole or not at all; its folder is made. Arguments and errors as above."""
    rows = serialize_rollout_summaries(
        split=split,
        iteration=iteration,
        trajectory_groups_P=trajectory_groups_P,
        taglist_P=taglist_P,
        sampling_client_steps_P=sampling_client_steps_P,
    )
    _write(Path(path), rows)


def write_rollout_summaries_jsonl_from_groups(
    path: Path, *, split: str, iteration: int, groups_P: Sequence[RolloutSummaryGroup]
) -> None:
    """`write_rollout_summaries_jsonl` of groups that bring their tags along."""
    _write(Path(path), serialize_rollout_summaries_from_groups(split=split, iteration=iteration, groups_P=groups_P))


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    without_secrets = redactor()
    write_jsonl(path, [without_secrets(row) for row in rows])
