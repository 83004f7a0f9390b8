"""Three ways to give a run its batches: sample, then train; train while sampling; sample ahead of training.

Each is a generator, which gives the batch of a step when the step before it is done. Rollouts are tasks of a group; where the
data run out before the steps do, the generator ends.

By default step i trains on batch i of the run, group after group, whatever finishes first, and sampling ahead by 0 batches is
the synchronous loop. With `deterministic=False` what finishes first is trained first. Either way every group is trained,
filtered, failed or dropped for its age exactly once.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from tinker_cookbook.rl.ahead import PendingGroups
from tinker_cookbook.rl.config import StreamMinibatchConfig
from tinker_cookbook.rl.minibatch import LoopMetrics, Minibatch, StepInProgress, Update
from tinker_cookbook.rl.rollouts import FailedGroup
from tinker_cookbook.rl.sampler import Sampler, WrappedTrajectoryGroup
from tinker_cookbook.utils.misc_utils import split_list, timed


@dataclass(frozen=True)
class Batch:
    """The groups of a step. Those of a stream are in training already when the last of them is sampled."""

    groups: Sequence[WrappedTrajectoryGroup]
    stale: int = 0
    """groups besides these that were dropped for their age"""
    minibatch: Minibatch | None = None
    """their datums, if they are made already"""
    update: Update | None = None
    """the update that these datums are submitted to, if they are"""
    times: LoopMetrics = field(default_factory=LoopMetrics)


Batches: TypeAlias = Callable[[asyncio.TaskGroup], AsyncGenerator[Batch]]


async def sync_batches(sampler: Sampler, tasks: asyncio.TaskGroup) -> AsyncGenerator[Batch]:
    """All groups of a batch, sampled at once with the newest snapshot."""
    for step in range(sampler.start, sampler.end):
        builders, times = sampler.batches.get_batch(step), LoopMetrics()
        with timed("sampling", times), sampler.session.display.phase("sampling"):
            sampler.session.display.expect(len(builders))
            groups = [await group for group in sampler.sample_groups(tasks, step, builders)]
        yield Batch(groups, times=times)


async def async_batches(sampler: Sampler, pending: PendingGroups, tasks: asyncio.TaskGroup) -> AsyncGenerator[Batch]:
    """Groups of up to `max_steps_off_policy` batches ahead of the step that trains, each sampled with the newest snapshot.

    Which of them a step takes is in `ahead`.
    """
    pending.open(tasks)
    try:
        for step in range(sampler.start, sampler.end):
            times = LoopMetrics()
            with timed("sampling", times), sampler.session.display.phase("sampling"):
                groups, stale = await pending.take(step)
            if not groups:
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
    """Submits the pass over the first groups of a batch as soon as they are done, while others are still being sampled.

    A batch is cut into `num_substeps` optimizer steps of `num_minibatches` passes each. Deterministic: by the groups' places,
    so that gradients add up in the same order on every run. Otherwise the first pass is over the groups that finish first.

    Args:
        prepare: makes the datums of the groups of a pass.
        new_update: begins the update of a step.
        in_progress: after the first of several optimizer steps of a batch there is nothing to save before the last, so that
            a run that is stopped then waits for the batch.
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
                groups += arrived
                with timed("prepare_minibatch", times):
                    part = await in_progress.wait_if_begun(prepare(arrived))
                parts.append(part)
                update.forward_backward(part.data_D)
            if update.optim_step():
                in_progress.begin()
        # All that is written has the groups in the order of the batch; datums stay in the order of their passes.
        finished = [item.place for item in groups if not isinstance(item.trajectory_group, FailedGroup)]
        whole = Minibatch.joined(parts, sorted(range(len(finished)), key=finished.__getitem__))
        yield Batch(sorted(groups, key=lambda item: item.place), 0, whole, update, times)
