"""What the tests of training data share: trajectories, groups and datums made by hand, and a reference policy of one number."""

from collections.abc import Awaitable

import numpy as np
import tinker

from tests.fakes import Pending, said
from tinker_cookbook.completers import TokensWithLogprobs
from tinker_cookbook.rl.data_processing import trajectory_to_data
from tinker_cookbook.rl.types import Trajectory, TrajectoryGroup, Transition

EMPTY = tinker.ModelInput.empty()


def turn(observation: list[int], action: TokensWithLogprobs, reward: float = 0.0) -> Transition:
    return Transition(tinker.ModelInput.from_ints(observation), action, reward, False)


def trajectory(*turns: Transition) -> Trajectory:
    return Trajectory(list(turns), EMPTY)


def group(rewards: list[float], trained: list[bool] | None = None, lengths: list[int] | None = None) -> TrajectoryGroup:
    members = [trajectory(turn([1], said([2] * length))) for length in lengths or [1] * len(rewards)]
    return TrajectoryGroup(members, rewards, [{} for _ in rewards], trained_G=trained)


def array(datum: tinker.Datum, key: str) -> np.ndarray:
    return datum.loss_fn_inputs[key].to_numpy().astype(np.float64)


class ScaledSampler:
    """Gives every token the same logprob."""

    def __init__(self, logprob: float):
        self.logprob = logprob
        self.prompts: list[list[int]] = []

    def compute_logprobs(self, prompt: tinker.ModelInput) -> Awaitable[list[float | None]]:
        self.prompts.append(prompt.to_ints())
        values: list[float | None] = [None, *([self.logprob] * (prompt.length - 1))]
        return Pending("compute_logprobs", values, [])


DATA = [
    datum
    for tokens in ([10, 11], [12, 13, 14])
    for datum in trajectory_to_data(trajectory(turn([1, 2], said(tokens))), 2.0)
]
