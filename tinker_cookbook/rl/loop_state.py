"""State that a run's steps pass on to later ones, in addition to the weights. It is stored with every checkpoint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from tinker_cookbook.exceptions import TrainingError
from tinker_cookbook.rl.advantages import RoleBaselines
from tinker_cookbook.rl.curriculum import ItemPool
from tinker_cookbook.rl.entropy import EntropyBonus, EntropyConfig
from tinker_cookbook.rl.minibatch import Minibatch
from tinker_cookbook.rl.rollouts import RolloutErrorCounter
from tinker_cookbook.rl.sampler import WrappedTrajectoryGroup
from tinker_cookbook.rl.types import TrajectoryGroup
from tinker_cookbook.rl.untrained import UntrainedSteps
from tinker_cookbook.runs.session import Session

_ROLES, _ERRORS, _UNTRAINED = "role_baselines", "rollout_errors", "zero_advantage_steps"
_ENTROPY, _POOL = "entropy_bonus", "curriculum"


class LoopState:
    """The state of the checkpoint that the run starts from, if any, then updated by the steps.

    Attributes:
        role_baselines: for `compute_advantages`, which updates them.
        errors: failed rollouts since the start of the run.
        untrained: consecutive steps that trained nothing.
        entropy: the bonus for entropy, a penalty of the loop; None: the config has none.
        pool: the curriculum, or the dataset's own item pool; None: there is none.
    """

    def __init__(
        self,
        session: Session,
        untrained: UntrainedSteps,
        role_decay: float,
        entropy: EntropyConfig | None,
        pool: ItemPool | None,
    ):
        record = session.record or dict[str, Any]()
        errors = dict[str, Any](record.get(_ERRORS, {}))
        self.role_baselines = RoleBaselines(role_decay, dict(record.get(_ROLES, {})))
        self.errors = RolloutErrorCounter(Counter(errors.get("counts", {})), errors.get("groups_skipped", 0))
        self.untrained = untrained
        self.untrained.in_a_row = record.get(_UNTRAINED, 0)
        self.entropy = None if entropy is None else EntropyBonus(entropy, record.get(_ENTROPY))
        self.pool, self._stored = pool, session.checkpoints.loop_state
        if pool is not None and (state := record.get(_POOL)) is not None:
            pool.restore(state)

    def count_groups(self, sampled: Sequence[WrappedTrajectoryGroup]) -> None:
        """Count the errors of a step's groups, and tell the pool their rewards."""
        for item in sampled:
            self.errors.ingest(item.trajectory_group)
            place = item.env_group_builder.pool_item
            if self.pool is not None and place is not None and isinstance(item.trajectory_group, TrajectoryGroup):
                self.pool.record(place, item.trajectory_group.get_total_rewards())

    def end_step(self, step: int, batch: Minibatch) -> TrainingError | None:
        """Update the state after a step. Returns the error that has to end the run, if the step trained nothing."""
        error = self.untrained.count(step, batch)
        if self.entropy is not None:
            self.entropy.end_step()
        return error

    def store(self, first_batch: int) -> None:
        """Give the state to the next checkpoint. Batches before `first_batch` will not be drawn again."""
        stored = self._stored
        if self.role_baselines.means:
            stored[_ROLES] = dict(self.role_baselines.means)
        stored[_UNTRAINED] = self.untrained.in_a_row
        if self.entropy is not None:
            stored[_ENTROPY] = self.entropy.state
        if self.pool is not None:
            stored[_POOL] = self.pool.state(first_batch)
        if self.errors.counts or self.errors.groups_skipped:
            stored[_ERRORS] = {"counts": dict(self.errors.counts), "groups_skipped": self.errors.groups_skipped}
