"""Three ways of pacing a run: sample then train, train while sampling, and sample ahead.

Step i trains on batch i of the run, whatever finished first. So every group is trained, filtered or failed exactly once, a
run resumes by its step alone, and sampling ahead by 0 batches is the synchronous loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial

from tinker_cookbook.rl.config import AsyncConfig, StreamMinibatchConfig
from tinker_cookbook.rl.loop import Loop, StepOutcome, WrappedTrajectoryGroup
from tinker_cookbook.rl.minibatch import Minibatch
from tinker_cookbook.rl.update import LoopMetrics
from tinker_cookbook.utils.misc_utils import dict_mean, split_list, timed, with_tasks


async def _take_steps(loop: Loop, take_step: Callable[[int], Awaitable[StepOutcome]]) -> None:
    for step in range(loop.start, loop.end):
        metrics: LoopMetrics = {
            "progress/batch": step,
            "progress/done_frac": (step + 1) / loop.end,
            "optim/lr": loop.learning_rate(step),
        }
        with timed("total", metrics):
            metrics |= await loop.evaluate(step)
            outcome = await take_step(step)
        await loop.end_step(replace(outcome, metrics=metrics | outcome.metrics))


async def do_sync_training(loop: Loop) -> None:
    """Sample all groups of a batch, train on them, take a new snapshot."""
    await do_async_training(loop, AsyncConfig(max_steps_off_policy=0))


async def do_async_training(loop: Loop, config: AsyncConfig) -> None:
    """Sample up to `max_steps_off_policy` batches ahead of the one that trains.

    Groups start in order, as many at a time as a batch has, each with the newest snapshot; batch b may start when step
    b - K is next. So no group is ever more than K updates old, and none is thrown away for it.
    """
    if loop.start < loop.end:
        await with_tasks(partial(_train_ahead, loop, config.max_steps_off_policy))


async def _train_ahead(loop: Loop, max_ahead: int, tasks: asyncio.TaskGroup) -> None:
    slots = asyncio.Semaphore(len(loop.batches.get_batch(loop.start))) if max_ahead > 0 else None
    running: dict[int, list[asyncio.Task[WrappedTrajectoryGroup]]] = {}

    async def take_step(step: int) -> StepOutcome:
        times: LoopMetrics = {}
        with timed("sampling", times):
            for ahead in range(step, min(step + max_ahead + 1, loop.end)):
                if ahead not in running:
                    running[ahead] = [
                        tasks.create_task(loop.sample_group(ahead, i, builder, slots))
                        for i, builder in enumerate(loop.batches.get_batch(ahead))
                    ]
            sampled = [await task for task in running.pop(step)]
        with timed("prepare_minibatch", times):
            batch = await loop.prepare(sampled)
        outcome = await loop.train(step, sampled, batch)
        return replace(outcome, metrics=times | outcome.metrics)

    await _take_steps(loop, take_step)


async def do_sync_training_with_stream_minibatch(loop: Loop, config: StreamMinibatchConfig) -> None:
    """Submit the pass over the first groups of a batch as soon as they are done, while others are still being sampled.

    A batch is cut into `num_substeps` optimizer steps of `num_minibatches` passes each, by the groups' places and not by
    which is done first: gradients add up in the same order on every run.
    """

    async def take_step(step: int) -> StepOutcome:
        return await with_tasks(partial(_stream_batch, loop, config, step))

    await _take_steps(loop, take_step)


async def _stream_batch(loop: Loop, config: StreamMinibatchConfig, step: int, tasks: asyncio.TaskGroup) -> StepOutcome:
    running = [
        tasks.create_task(loop.sample_group(step, i, builder)) for i, builder in enumerate(loop.batches.get_batch(step))
    ]
    update, times = loop.new_update(step), LoopMetrics()
    sampled: list[WrappedTrajectoryGroup] = []
    parts: list[Minibatch] = []
    for substep in split_list(running, min(loop.config.num_substeps, len(running))):
        for minibatch in split_list(substep, min(config.num_minibatches, len(substep))):
            with timed("sampling", times):
                arrived = [await task for task in minibatch]
            sampled += arrived
            part = await loop.prepare(arrived)
            parts.append(part)
            update.forward_backward(part.data_D)
        if update.optim_step():
            loop.is_between_steps = False
    whole = Minibatch([], [], [], [], dict_mean([part.metrics for part in parts]))
    for part in parts:
        whole.append(part)
    outcome = await loop.train(step, sampled, whole, update)
    return replace(outcome, metrics=times | outcome.metrics)
