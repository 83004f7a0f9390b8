"""Sampling the groups of a run's batches, each with the newest snapshot of the weights, or with weights in flight."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, replace

from tinker_cookbook.clients import SamplingClient
from tinker_cookbook.completers import TinkerTokenCompleter
from tinker_cookbook.rl.advantages import lacks_signal
from tinker_cookbook.rl.config import Config
from tinker_cookbook.rl.item_dataset import TrainingBatches
from tinker_cookbook.rl.monitors import scan
from tinker_cookbook.rl.overlong import penalize_overlong, without_truncated
from tinker_cookbook.rl.rollout_strategy import describe_group
from tinker_cookbook.rl.rollouts import FailedGroup, try_group_rollout
from tinker_cookbook.rl.types import EnvGroupBuilder, TrajectoryGroup
from tinker_cookbook.runs.session import Session
from tinker_cookbook.utils.misc_utils import run_limited
from tinker_cookbook.utils.seeds import derive_seed


@dataclass(frozen=True)
class WrappedTrajectoryGroup:
    """A sampled group with its builder and the snapshot that it was sampled from."""

    trajectory_group: TrajectoryGroup | FailedGroup
    env_group_builder: EnvGroupBuilder
    sampling_client_step: int
    """number of optimizer updates (batches) of the snapshot"""
    seconds: float
    place: int = 0
    """index in its batch; from the batch's size on, it replaces another group"""
    replaced: tuple[WrappedTrajectoryGroup, ...] = ()
    """the groups without signal, or failed ones, that it replaces"""

    @property
    def has_failed(self) -> bool:
        return isinstance(self.trajectory_group, FailedGroup)


def with_replaced(groups: Sequence[WrappedTrajectoryGroup]) -> list[WrappedTrajectoryGroup]:
    """The groups, followed by all groups that they replaced."""
    return [*groups, *(earlier for group in groups for earlier in group.replaced)]


class Sampler:
    """Samples the groups of a run, from step `start` up to `end`.

    Attributes:
        client: the newest snapshot, used for groups that start now; call `refresh` to take the first one.
        client_step: optimizer updates (batches) that `client` has seen.
        steps_done: steps whose rows are logged.
    """

    client: SamplingClient

    def __init__(self, config: Config, session: Session, batches: TrainingBatches):
        self.config, self.session, self.batches = config, session, batches
        self.start, self.end = session.start_step(), len(batches)
        self.client_step = self.steps_done = self.start
        self._rollout = config.effective_rollout()

    async def refresh(self) -> None:
        """Take a new snapshot of the weights."""
        self.client = await self.submit_snapshot()

    def submit_snapshot(self) -> Awaitable[SamplingClient]:
        """Request a snapshot of the weights after everything submitted so far; with `inflight`, earlier clients
        continue with these weights too.
        """
        ahead, client = self.config.async_config, self.session.training_client
        records = self.config.records_stability_info()
        if ahead is not None and ahead.inflight:
            return client.save_weights_and_get_sampling_client(record_stability_info=records, kind="inflight")
        return client.save_weights_and_get_sampling_client(record_stability_info=records)

    async def sample_group(self, batch: int, place: int, builder: EnvGroupBuilder) -> WrappedTrajectoryGroup:
        """Roll out one group with the newest snapshot at its start.

        Seeds depend on the run's seed, the group's batch and its position there, never on timing.
        """
        config = self.config
        started, version = time.perf_counter(), self.client_step
        policy = TinkerTokenCompleter(
            self.client,
            config.max_tokens,
            config.temperature,
            seed=derive_seed(config.seed, "rollouts", batch),
            top_k=config.top_k,
            top_p=config.top_p,
            min_p=config.min_p,
        )
        is_shown = place < config.num_groups_shown
        group = await try_group_rollout(
            builder,
            policy.fork("group", place),
            self._rollout,
            name=f"{place} of step {batch}, {describe_group(builder)}",
            with_notes=is_shown,
            with_records=config.write_records and is_shown,
        )
        tokens = 0
        if not isinstance(group, FailedGroup):
            await scan(group, self.client.get_tokenizer)
            tokens = sum(trajectory.num_action_tokens for trajectory in group.trajectories_G)
            if config.overlong is not None:
                group = penalize_overlong(group, config.overlong, config.max_tokens)
        self.session.display.advance(tokens, failed=isinstance(group, FailedGroup))
        return WrappedTrajectoryGroup(group, builder, version, time.perf_counter() - started, place)

    async def sample_signal(
        self,
        batch: int,
        place: int,
        builder: EnvGroupBuilder,
        size: int,
        replaced: list[WrappedTrajectoryGroup] | None = None,
    ) -> WrappedTrajectoryGroup:
        """`sample_group`; while the group has no signal, another one in its place, up to `replace_constant_groups` times
        (dynamic sampling: Yu et al. 2025, "DAPO", arXiv 2503.14476, section 3.2). The last is returned with those before it.

        Args:
            size: groups of the batch. Replacements depend only on batch and index, so they are the same with every pacing.
            replaced: filled with the groups replaced so far, for a caller that may cancel this.
        """
        group, replaced = await self.sample_group(batch, place, builder), [] if replaced is None else replaced
        for attempt in range(1, self.config.replace_constant_groups + 1):
            if not self.is_unusable(group):
                break
            replaced.append(group)
            at = place + attempt * size
            self.session.display.expect_more()
            group = await self.sample_group(batch, at, self.batches.replacement(batch, at, size))
        return replace(group, replaced=tuple(replaced)) if replaced else group

    def is_unusable(self, sampled: WrappedTrajectoryGroup) -> bool:
        """Whether a group cannot be trained on: it failed, or it will be removed for its lack of signal, or masked as a whole."""
        group, config = sampled.trajectory_group, self.config
        if isinstance(group, FailedGroup):
            return True
        if not config.removes_groups():
            return False
        masked = config.overlong is not None and config.overlong.mask and not any(without_truncated(group).is_trained())
        return masked or lacks_signal(group, config.advantage)

    def sample_groups(
        self, tasks: asyncio.TaskGroup, batch: int, builders: Sequence[EnvGroupBuilder]
    ) -> list[asyncio.Future[WrappedTrajectoryGroup]]:
        """Roll out all groups of a batch, `max_groups_in_flight` at a time; the groups to come, in order."""
        size = len(builders)
        groups = (self.sample_signal(batch, i, builder, size) for i, builder in enumerate(builders))
        return run_limited(tasks, groups, len(builders), self.config.max_groups_in_flight)
