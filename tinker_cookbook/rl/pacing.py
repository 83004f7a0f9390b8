"""Three ways of pacing a run: sample then train, train while sampling, and sample ahead. Each is a generator of batches.

    async for batch in batches(loop, tasks):    # sync_batches, stream_batches or async_batches
        train on it, take a new snapshot, log and save

By default step i trains on batch i of the run, group after group, whatever finished first, and sampling ahead by 0 batches is
the synchronous loop. With `deterministic=False` what finishes first is trained first. Either way every group is trained,
filtered, failed or dropped for its age exactly once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeAlias, TypeVar

from tinker_cookbook.rl.ahead import SamplingAhead
from tinker_cookbook.rl.config import AsyncConfig, StreamMinibatchConfig
from tinker_cookbook.rl.loop import Loop
from tinker_cookbook.rl.minibatch import Minibatch
from tinker_cookbook.rl.rollouts import FailedGroup
from tinker_cookbook.rl.step_files import WrappedTrajectoryGroup
from tinker_cookbook.rl.update import LoopMetrics, Update
from tinker_cookbook.utils.misc_utils import dict_mean, split_list, timed, with_tasks

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True)
class StepBatch:
    """What a step trains on."""

    sampled: Sequence[WrappedTrajectoryGroup]
    minibatch: Minibatch
    """made of them"""
    update: Update | None = None
    """what was submitted of it already; None: nothing"""
    stale: int = 0
    """groups besides these that were dropped for their age"""
    times: LoopMetrics = field(default_factory=LoopMetrics)


Batches: TypeAlias = Callable[[Loop, asyncio.TaskGroup], AsyncGenerator[StepBatch]]
"""Gives the batch of each step of a loop when the step before it is done. Rollouts are tasks of the group; where the data run out
before the steps do, it ends."""


async def sync_batches(loop: Loop, tasks: asyncio.TaskGroup) -> AsyncGenerator[StepBatch]:
    """All groups of a batch, sampled at once with the current snapshot."""
    for step in range(loop.start, loop.end):
        builders, times = loop.batches.get_batch(step), LoopMetrics()
        with timed("sampling", times), loop.session.display.phase("sampling"):
            loop.session.display.expect(len(builders))
            sampled = [await group for group in loop.sample_groups(tasks, step, builders)]
        yield await _prepared(loop, sampled, times)


async def async_batches(loop: Loop, tasks: asyncio.TaskGroup, config: AsyncConfig) -> AsyncGenerator[StepBatch]:
    """Groups of up to `max_steps_off_policy` batches ahead of the step that trains, each sampled with the newest snapshot.

    Which of them a step takes is in `ahead`.
    """
    ahead = SamplingAhead(loop, config, tasks)
    try:
        for step in range(loop.start, loop.end):
            times = LoopMetrics()
            with timed("sampling", times), loop.session.display.phase("sampling"):
                taken = await ahead.take(step)
            if not taken.sampled:
                return
            yield replace(await _prepared(loop, taken.sampled, times), stale=taken.stale)
    finally:
        ahead.close()


async def stream_batches(
    loop: Loop, tasks: asyncio.TaskGroup, config: StreamMinibatchConfig
) -> AsyncGenerator[StepBatch]:
    """Submits the pass over the first groups of a batch as soon as they are done, while others are still being sampled.

    A batch is cut into `num_substeps` optimizer steps of `num_minibatches` passes each. Deterministic: by the groups' places,
    so that gradients add up in the same order on every run. Otherwise the first pass is over the groups that finish first.
    """
    for step in range(loop.start, loop.end):
        builders = loop.batches.get_batch(step)
        running = loop.sample_groups(tasks, step, builders)
        arriving: Iterator[Awaitable[WrappedTrajectoryGroup]]
        arriving = iter(running) if config.deterministic else asyncio.as_completed(running)
        update, times = loop.new_update(step), LoopMetrics()
        sampled: list[WrappedTrajectoryGroup] = []
        parts: list[Minibatch] = []
        for substep in split_list(running, min(loop.config.num_substeps, len(running))):
            for minibatch in split_list(substep, min(config.num_minibatches, len(substep))):
                with timed("sampling", times), loop.session.display.phase("sampling"):
                    arrived = [await _to_wait_for(loop, next(arriving)) for _ in minibatch]
                sampled += arrived
                with timed("prepare_minibatch", times):
                    part = await _to_wait_for(loop, loop.prepare(arrived))
                parts.append(part)
                update.forward_backward(part.data_D)
            if update.optim_step():
                loop.between_steps.clear()
        whole = Minibatch([], [], [], [], dict_mean([part.metrics for part in parts]))
        for part in parts:
            whole.append(part)
        yield StepBatch(*_by_place(sampled, whole), update, times=times)


async def take_steps(loop: Loop, batches: Batches) -> None:
    """Take the steps of a run: evaluate, get a batch, train on it, log, save.

    What is still being sampled when the steps end is cancelled; its environments' `cleanup` comes to its end, unless who ends
    the run insists.
    """
    ending = loop.session.ending
    with ending.stepping():
        await ending.unless_insisted(with_tasks(partial(_take_steps, loop, batches)), loop.between_steps)


async def _take_steps(loop: Loop, batches: Batches, tasks: asyncio.TaskGroup) -> None:
    async with aclosing(batches(loop, tasks)) as source:
        for step in range(loop.start, loop.end):
            metrics: LoopMetrics = {
                "progress/batch": step,
                "progress/done_frac": (step + 1) / loop.end,
                "optim/lr": loop.learning_rate(step),
            }
            loop.session.display.begin_step(step, loop.end)
            with loop.session.traced_step(step) as window, timed("total", metrics):
                metrics |= await loop.evaluate(step)
                batch = await anext(source, None)
                if batch is None:
                    break
                outcome = await loop.train(step, batch.sampled, batch.minibatch, batch.update, stale=batch.stale)
            metrics = window.get_timing_metrics() | metrics | batch.times | outcome.metrics
            await loop.end_step(replace(outcome, metrics=metrics))
    if loop.steps_done < loop.end:
        logger.warning(
            "the data ran out after %d of %d steps: a step trains on as many groups as a batch has, besides those that failed "
            "or were removed (groups/failed, groups/filtered)",
            loop.steps_done,
            loop.end,
        )


async def do_sync_training(loop: Loop) -> None:
    """`take_steps` of `sync_batches`."""
    await take_steps(loop, sync_batches)


async def do_async_training(loop: Loop, config: AsyncConfig) -> None:
    """`take_steps` of `async_batches`."""
    await take_steps(loop, partial(async_batches, config=config))


async def do_sync_training_with_stream_minibatch(loop: Loop, config: StreamMinibatchConfig) -> None:
    """`take_steps` of `stream_batches`."""
    await take_steps(loop, partial(stream_batches, config=config))


async def _prepared(loop: Loop, sampled: Sequence[WrappedTrajectoryGroup], times: LoopMetrics) -> StepBatch:
    with timed("prepare_minibatch", times):
        return StepBatch(sampled, await loop.prepare(sampled), times=times)


async def _to_wait_for(loop: Loop, what: Awaitable[T]) -> T:
    """What a stream waits for. After the first of several optimizer steps of a batch there is nothing to save before the last:
    whoever stops the run then waits for the batch, or stops it once more."""
    return await (what if loop.between_steps.is_set() else loop.to_its_end(what))


def _by_place(
    sampled: Sequence[WrappedTrajectoryGroup], batch: Minibatch
) -> tuple[list[WrappedTrajectoryGroup], Minibatch]:
    """The groups in the order of the batch, as all that is written has them; datums stay in the order of their passes."""
    finished = [item.place for item in sampled if not isinstance(item.trajectory_group, FailedGroup)]
    order = sorted(range(len(finished)), key=finished.__getitem__)
    return sorted(sampled, key=lambda item: item.place), batch.reordered(order)
