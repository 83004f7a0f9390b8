"""SDPO: the policy that is shown a success of its group is its own teacher.

Self-distillation policy optimization (arXiv 2601.20802). A reply that failed is scored again by the same weights, whose prompt
now holds a successful reply of the group or, where there is none, what the environment said of this one:

    A_t = log pi(y_t | question, feedback, y_<t) - log pi(y_t | question, y_<t)

As advantages of a policy gradient these lower KL(student || teacher) per token, the reverse KL on the student's own samples; they
say which tokens were wrong, where a reward says that something was. The loop is that of `sdft`; here is who is shown what.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from tinker_cookbook.renderers.replies import reply_text
from tinker_cookbook.rl.data_processing import DatumMetadata
from tinker_cookbook.rl.types import TrajectoryGroup

if TYPE_CHECKING:
    from tinker_cookbook.renderers import Renderer

FEEDBACK_LOG_KEY = "feedback"
"""A text that an environment puts into `logs` of the last turn: what was wrong with the reply."""


def success_of(group: TrajectoryGroup, success_reward: float) -> int | None:
    """The first member that trains and whose total reward is at least `success_reward`; None: there is none."""
    members = zip(group.get_total_rewards(), group.is_trained(), strict=True)
    return next((i for i, (reward, trained) in enumerate(members) if trained and reward >= success_reward), None)


def shown_to_teacher(group: TrajectoryGroup, member: int, renderer: Renderer, success_reward: float) -> str | None:
    """What the teacher of a member's reply is shown: the text of a successful reply of another member, else the environment's
    feedback on this one. None: the reply was successful itself, or nothing is known; it is not trained on.
    """
    if group.get_total_rewards()[member] >= success_reward:
        return None
    if (best := success_of(group, success_reward)) is not None:
        return reply_text(renderer, group.trajectories_G[best].transitions[-1].ac.tokens)
    feedback = group.trajectories_G[member].transitions[-1].logs.get(FEEDBACK_LOG_KEY)
    return None if feedback is None else str(feedback)


def shown_to_teachers(
    groups_P: Sequence[TrajectoryGroup],
    metadata_D: Sequence[DatumMetadata],
    renderer: Renderer,
    success_reward: float,
) -> Mapping[int, str]:
    """`shown_to_teacher` of each datum that is trained on, by its index; the metadata name its group and member."""
    shown = (
        shown_to_teacher(groups_P[meta["group_idx"]], meta["traj_idx"], renderer, success_reward) for meta in metadata_D
    )
    return {i: text for i, text in enumerate(shown) if text is not None}
