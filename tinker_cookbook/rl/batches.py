"""Three ways to make batches: sample, then train; train while sampling; sample ahead of training.

Each is a generator that yields the batch of a step when the step before is done. Rollouts are tasks of a task group.
If the data run out before the steps do, the generator ends.

By default step i trains on batch i, group by group, in the order in which they finish, and sampling 0 batches ahead equals
the synchronous loop. With `deterministic=False`, groups are trained in the order in which they finish. Either way
every group is trained, filtered, replaced, failed or dropped for its age exactly once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from tinker_cookbook.rl.ahead import PendingGroups
from tinker_cookbook.rl.config import StreamMinibatchConfig
from tinker_cookbook.rl.minibatch import LoopMetrics, Minibatch, StepInProgress, Update
from tinker_cookbook.rl.rollouts import FailedGroup
from tinker_cookbook.rl.sampler import Sampler, WrappedTrajectoryGroup, with_replaced
from tinker_cookbook.utils.misc_utils import split_list, timed

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Batch:
    """The groups of a step. A streamed batch is already in training when its last group is sampled."""

    groups: Sequence[WrappedTrajectoryGroup]
    stale: int = 0
    """number of groups dropped for their age"""
    minibatch: Minibatch | None = None
    """their datums, if already made"""
    update: Update | None = None
    """the update to which these datums are submitted, if any"""
    times: LoopMetrics = field(default_factory=LoopMetrics)


Batches: TypeAlias = Callable[[asyncio.TaskGroup], AsyncGenerator[Batch]]


async def sync_batches(sampler: Sampler, tasks: asyncio.TaskGroup) -> AsyncGenerator[Batch]:
    """All groups of a batch, sampled at once with the newest snapshot."""
    for step in range(sampler.start, sampler.end):
        builders, times = sampler.batches.get_batch(step), LoopMetrics()
        with timed("sampling", times), sampler.session.display.phase("sampling"):
            sampler.session.display.expect(len(builders))
            groups = [await group for group in sampler.sample_groups(tasks, step, builders)]
        yield Batch(with_replaced(groups), times=times)


async def async_batches(sampler: Sampler, pending: PendingGroups, tasks: asyncio.TaskGroup) -> AsyncGenerator[Batch]:
    """Sample groups of up to `max_steps_off_policy` batches ahead of the training step, each with the newest snapshot.

    `ahead` decides which groups a step takes.
    """
    pending.open(tasks)
    try:
        for step in range(sampler.start, sampler.end):
            times = LoopMetrics()
            with timed("sampling", times), sampler.session.display.phase("sampling"):
                groups, stale = await pending.take(step)
            if not groups:
                logger.warning(
                    "the data ran out after %d of %d steps: a step trains on as many groups as a batch has, not counting those "
                    "that failed or were removed (groups/failed, groups/filtered)",
                    step,
                    sampler.end,
                )
                return
            yield Batch(groups, stale, times=times)
    finally:
        pending.close()


async def stream_batches(
    sampler: Sampler,
    config: StreamMinibatchConfig,
    prepare: Callable[[Sequence[WrappedTrajectoryGroup]], Awaitable[Minibatch]],
    new_update: Callable[[int], Update],
    in_progress: StepInProgress,
    tasks: asyncio.TaskGroup,
) -> AsyncGenerator[Batch]:
    """Submit the pass over the first groups of a batch as soon as they are done, while others are still being sampled.

    A batch is split into `num_substeps` optimizer steps of `num_minibatches` passes each. Deterministic: groups are
    assigned by position, so gradients add up in the same order on every run. Otherwise the first pass takes the groups
    that finish first.

    Args:
        prepare: makes the datums of the groups of a pass.
        new_update: begins the update of a step.
        in_progress: between the first and the last of several optimizer steps there is nothing to save, so a run that
            is stopped waits for the batch.
    """
    for step in range(sampler.start, sampler.end):
        builders = sampler.batches.get_batch(step)
        running = sampler.sample_groups(tasks, step, builders)
        arriving: Iterator[Awaitable[WrappedTrajectoryGroup]]
        arriving = iter(running) if config.deterministic else asyncio.as_completed(running)
        update, times = new_update(step), LoopMetrics()
        groups: list[WrappedTrajectoryGroup] = []
        parts: list[Minibatch] = []
        for substep in split_list(running, min(sampler.config.num_substeps, len(running))):
            for minibatch in split_list(substep, min(config.num_minibatches, len(substep))):
                with timed("sampling", times), sampler.session.display.phase("sampling"):
                    arrived = [await in_progress.wait_if_begun(next(arriving)) for _ in minibatch]
                arrived = with_replaced(arrived)
                groups += arrived
                with timed("prepare_minibatch", times):
                    part = await in_progress.wait_if_begun(prepare(arrived))
                parts.append(part)
                update.forward_backward(part.data_D)
            if update.optim_step():
                in_progress.begin()
        # Files list the groups in the order of the batch; datums stay in the order of their passes.
        finished = [item.place for item in groups if not isinstance(item.trajectory_group, FailedGroup)]
        whole = Minibatch.joined(parts, sorted(range(len(finished)), key=finished.__getitem__))
        yield Batch(sorted(groups, key=lambda item: item.place), 0, whole, update, times)
