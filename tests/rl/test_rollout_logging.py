"""Summaries of rollouts, a line of JSON each."""

from pathlib import Path

import numpy as np
import pytest
import tinker

from tinker_cookbook.completers import TokensWithLogprobs
from tinker_cookbook.exceptions import DataValidationError
from tinker_cookbook.rl.rollout_logging import (
    RolloutSummaryGroup,
    rollout_summaries_jsonl_path,
    serialize_rollout_summaries,
    write_rollout_summaries_jsonl,
    write_rollout_summaries_jsonl_from_groups,
)
from tinker_cookbook.rl.types import Trajectory, TrajectoryGroup, Transition
from tinker_cookbook.utils.files import read_jsonl


def group(*finals: float) -> TrajectoryGroup:
    """A member for each final reward; each has two turns, of prompts of 3 and 7 tokens and completions of 2."""

    def turn(prompt: int, done: bool) -> Transition:
        action = TokensWithLogprobs(tokens=[1, 2], maybe_logprobs=[-0.5, -0.5], stop_reason="stop")
        metrics = {"score": np.float32(0.5)}
        observation = tinker.ModelInput.from_ints([5] * prompt)
        return Transition(observation, action, 0.25, done, metrics=metrics, logs={"said": "é", "n": np.int64(3)})  # pyright: ignore[reportArgumentType]

    members = [Trajectory([turn(3, False), turn(7, True)], tinker.ModelInput.from_ints([5] * 9)) for _ in finals]
    return TrajectoryGroup(members, [*finals], [{"judged": final} for final in finals])


def test_a_line_says_what_a_trajectory_was_worth_and_how_long_its_turns_were(tmp_path: Path) -> None:
    path = rollout_summaries_jsonl_path(tmp_path / "iteration_000004", "train")
    groups = [RolloutSummaryGroup(group(1.0, 0.0), ["math"], 3), RolloutSummaryGroup(group(2.0), ["code", "hard"])]
    write_rollout_summaries_jsonl_from_groups(path, split="train", iteration=4, groups_P=groups)
    assert path == tmp_path / "iteration_000004" / "train_rollout_summaries.jsonl"
    rows = read_jsonl(path)
    assert [(row["group_idx"], row["traj_idx"]) for row in rows] == [(0, 0), (0, 1), (1, 0)]
    assert rows[1] == {
        "schema_version": 1,
        "split": "train",
        "iteration": 4,
        "group_idx": 0,
        "traj_idx": 1,
        "tags": ["math"],
        "sampling_client_step": 3,
        "total_reward": 0.5,
        "final_reward": 0.0,
        "trajectory_metrics": {"judged": 0.0},
        "steps": [
            {
                "step_idx": i,
                "ob_len": prompt,
                "ac_len": 2,
                "reward": 0.25,
                "episode_done": bool(i),
                "metrics": {"score": 0.5},
                "logs": {"said": "é", "n": 3},
            }
            for i, prompt in enumerate((3, 7))
        ],
        "final_ob_len": 9,
    }
    assert (rows[2]["tags"], rows[2]["sampling_client_step"], rows[2]["total_reward"]) == (["code", "hard"], None, 2.5)
    again = tmp_path / "again.jsonl"
    parts = [[entry.trajectory_group for entry in groups], [entry.tags for entry in groups], [3, None]]
    write_rollout_summaries_jsonl(
        again,
        split="train",
        iteration=4,
        trajectory_groups_P=parts[0],
        taglist_P=parts[1],
        sampling_client_steps_P=parts[2],
    )
    assert again.read_bytes() == path.read_bytes()


def test_lists_that_do_not_fit_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match="lengths differ"):
        serialize_rollout_summaries(split="train", iteration=0, trajectory_groups_P=[group(1.0)], taglist_P=[])
    with pytest.raises(DataValidationError, match="total_reward: nan"):
        serialize_rollout_summaries(split="a", iteration=0, trajectory_groups_P=[group(float("nan"))], taglist_P=[[]])
