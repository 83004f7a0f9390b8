"""Three ways of pacing a run: sample then train, train while sampling, and sample ahead.

By default step i trains on batch i of the run, group after group, whatever finished first, and sampling ahead by 0 batches is
the synchronous loop. With `deterministic=False` what finishes first is trained first. Either way every group is trained,
filtered, failed or dropped for its age exactly once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

from tinker_cookbook.rl.ahead import SamplingAhead
from tinker_cookbook.rl.config import AsyncConfig, StreamMinibatchConfig
from tinker_cookbook.rl.loop import Loop, StepOutcome, WrappedTrajectoryGroup
from tinker_cookbook.rl.minibatch import Minibatch
from tinker_cookbook.rl.rollouts import FailedGroup
from tinker_cookbook.rl.update import LoopMetrics
from tinker_cookbook.utils.misc_utils import dict_mean, split_list, timed, with_tasks

T = TypeVar("T")


async def _take_steps(loop: Loop, take_step: Callable[[int], Awaitable[StepOutcome]]) -> None:
    for step in range(loop.start, loop.end):
        metrics: LoopMetrics = {
            "progress/batch": step,
            "progress/done_frac": (step + 1) / loop.end,
            "optim/lr": loop.learning_rate(step),
        }
        loop.session.display.begin_step(step, loop.end)
        with loop.session.traced_step(step), timed("total", metrics):
            metrics |= await loop.evaluate(step)
            outcome = await take_step(step)
        await loop.end_step(replace(outcome, metrics=metrics | outcome.metrics))


async def do_sync_training(loop: Loop) -> None:
    """Sample all groups of a batch, train on them, take a new snapshot."""
    await do_async_training(loop, AsyncConfig(max_steps_off_policy=0))


async def do_async_training(loop: Loop, config: AsyncConfig) -> None:
    """Sample up to `max_steps_off_policy` batches ahead of the step that trains, each group with the newest snapshot.

    No group is ever more than that many updates old. Which groups a step takes is in `ahead`.
    """
    if loop.start < loop.end:
        await with_tasks(partial(_train_ahead, loop, config))


async def _train_ahead(loop: Loop, config: AsyncConfig, tasks: asyncio.TaskGroup) -> None:
    ahead = SamplingAhead(loop, config, tasks)

    async def take_step(step: int) -> StepOutcome:
        times: LoopMetrics = {}
        with timed("sampling", times), loop.session.display.phase("sampling"):
            taken = await ahead.take(step)
        with timed("prepare_minibatch", times):
            batch = await loop.prepare(taken.sampled)
        outcome = await loop.train(step, taken.sampled, batch, stale=taken.stale)
        return replace(outcome, metrics=times | outcome.metrics)

    try:
        await _take_steps(loop, take_step)
    finally:
        ahead.close()


async def do_sync_training_with_stream_minibatch(loop: Loop, config: StreamMinibatchConfig) -> None:
    """Submit the pass over the first groups of a batch as soon as they are done, while others are still being sampled.

    A batch is cut into `num_substeps` optimizer steps of `num_minibatches` passes each. Deterministic: by the groups' places,
    so that gradients add up in the same order on every run. Otherwise the first pass is over the groups that finish first.
    """

    async def take_step(step: int) -> StepOutcome:
        return await with_tasks(partial(_stream_batch, loop, config, step))

    await _take_steps(loop, take_step)


async def _stream_batch(loop: Loop, config: StreamMinibatchConfig, step: int, tasks: asyncio.TaskGroup) -> StepOutcome:
    running = [
        tasks.create_task(loop.sample_group(step, i, builder)) for i, builder in enumerate(loop.batches.get_batch(step))
    ]
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
            part = await _to_wait_for(loop, loop.prepare(arrived))
            parts.append(part)
            update.forward_backward(part.data_D)
        if update.optim_step():
            loop.is_between_steps = False
    whole = Minibatch([], [], [], [], dict_mean([part.metrics for part in parts]))
    for part in parts:
        whole.append(part)
    outcome = await loop.train(step, *_by_place(sampled, whole), update)
    return replace(outcome, metrics=times | outcome.metrics)


async def _to_wait_for(loop: Loop, what: Awaitable[T]) -> T:
    """What a stream waits for. After the first of several optimizer steps of a batch there is nothing to save before the last:
    whoever stops the run then waits for the batch, or stops it once more."""
    return await (what if loop.is_between_steps else loop.to_its_end(what))


def _by_place(
    sampled: Sequence[WrappedTrajectoryGroup], batch: Minibatch
) -> tuple[list[WrappedTrajectoryGroup], Minibatch]:
    """The groups in the order of the batch, as all that is written has them; datums stay in the order of their passes."""
    finished = [item.place for item in sampled if not isinstance(item.trajectory_group, FailedGroup)]
    order = sorted(range(len(finished)), key=finished.__getitem__)
    return sorted(sampled, key=lambda item: item.place), batch.reordered(order)
