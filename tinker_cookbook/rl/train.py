"""Reinforcement learning: sample groups, turn rewards into advantages, take a step, sample from the new weights.

    for each batch:
        rollouts of all groups with the current snapshot          (rollouts.py)
        rewards -> advantages within each group                   (advantages.py)
        trajectories -> datums                                    (data_processing.py, minibatch.py)
        forward_backward + optim_step, submitted together         (update.py)
        a new frozen snapshot for the next batch                  (loop.py)

pacing.py and ahead.py say how sampling and training overlap. Everything is seeded from `config.seed`: the same config on the same
machine gives the same metrics (when sampling ahead of training, on the local engine without threads of one's own).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from functools import partial

from tinker_cookbook.clients import SamplingClient
from tinker_cookbook.rl.advantages import AdvantageConfig
from tinker_cookbook.rl.ahead import check_order
from tinker_cookbook.rl.algorithms import LOSS_FNS
from tinker_cookbook.rl.algorithms import remove_mask as _remove_mask
from tinker_cookbook.rl.config import AsyncConfig, Config, StreamMinibatchConfig, check_config
from tinker_cookbook.rl.item_dataset import TrainingBatches
from tinker_cookbook.rl.loop import Loop
from tinker_cookbook.rl.metric_util import RLTestSetEvaluator
from tinker_cookbook.rl.metrics import KLPenalty
from tinker_cookbook.rl.minibatch import Penalty, prepare_minibatch
from tinker_cookbook.rl.pacing import (
    Batches,
    async_batches,
    do_async_training,
    do_sync_training,
    do_sync_training_with_stream_minibatch,
    stream_batches,
    sync_batches,
    take_steps,
)
from tinker_cookbook.rl.rollout_executor import get_rollout_executor, set_rollout_executor
from tinker_cookbook.rl.run_clients import clients_of_run
from tinker_cookbook.rl.step_files import WrappedTrajectoryGroup
from tinker_cookbook.rl.token_usage import count_discarded_rollout, rollout_usage, training_usage
from tinker_cookbook.rl.train_steps import (
    DISCARDED_WORK_LOG_INTERVAL_SECONDS,
    DiscardedWorkLog,
    SamplingClientReuse,
    compute_full_batch_metrics_and_get_sampling_client,
    do_train_step_and_get_sampling_client,
    do_train_step_streaming_and_get_sampling_client,
    drop_constant_reward_group,
    gather_with_progress,
    print_group,
    run_evaluations_parallel,
    run_single_evaluation,
    save_checkpoint_and_get_sampling_client,
)
from tinker_cookbook.rl.update import train_step
from tinker_cookbook.runs.outcome import RunSummary, summarize
from tinker_cookbook.runs.reference import KLReferenceConfig, open_reference
from tinker_cookbook.runs.session import open_session
from tinker_cookbook.utils.seeds import derive_seed

__all__ = [
    "DISCARDED_WORK_LOG_INTERVAL_SECONDS",
    "LOSS_FNS",
    "AdvantageConfig",
    "AsyncConfig",
    "Config",
    "DiscardedWorkLog",
    "KLReferenceConfig",
    "Penalty",
    "SamplingClientReuse",
    "StreamMinibatchConfig",
    "WrappedTrajectoryGroup",
    "_remove_mask",  # its name in loops of the cookbook
    "check_config",
    "compute_full_batch_metrics_and_get_sampling_client",
    "count_discarded_rollout",
    "do_async_training",
    "do_sync_training",
    "do_sync_training_with_stream_minibatch",
    "do_train_step_and_get_sampling_client",
    "do_train_step_streaming_and_get_sampling_client",
    "drop_constant_reward_group",
    "gather_with_progress",
    "main",
    "prepare_minibatch",
    "print_group",
    "rollout_usage",
    "run",
    "run_evaluations_parallel",
    "run_single_evaluation",
    "save_checkpoint_and_get_sampling_client",
    "train_step",
    "training_usage",
]


async def main(config: Config, rollout_executor: Executor | None = None) -> RunSummary:
    """Run or resume: the whole life of a training run."""
    return await run(config, rollout_executor=rollout_executor)


async def run(
    config: Config, *, penalties: Sequence[Penalty] = (), rollout_executor: Executor | None = None
) -> RunSummary:
    """`main`, with penalties on single tokens besides the config's own, as distillation needs them.

    Groups run in `rollout_executor`, which the caller shuts down; None: in the one that was set before.
    """
    check_config(config)
    before = get_rollout_executor()
    if rollout_executor is not None:
        set_rollout_executor(rollout_executor)
    try:
        await _run(config, penalties)
    finally:
        set_rollout_executor(before)
    return summarize(config.log_path)


async def _run(config: Config, penalties: Sequence[Penalty]) -> None:
    dataset, test_dataset = await config.dataset_builder()
    pacing = config.async_config or config.stream_minibatch_config
    own: list[Callable[[], RLTestSetEvaluator]] = []
    if test_dataset is not None:
        make_test = partial(
            RLTestSetEvaluator,
            test_dataset,
            config.max_tokens,
            num_groups_to_log=config.num_groups_shown,
            temperature=config.temperature,
            top_k=config.top_k,
            top_p=config.top_p,
            min_p=config.min_p,
            seed=derive_seed(config.seed, "test"),
            config=config.effective_rollout(),
        )
        own.append(make_test)
    rounds = config.evaluation_rounds(*own)
    per_batch = pacing.groups_per_batch if pacing is not None else None
    batches = TrainingBatches(dataset, per_batch, config.max_steps, config.num_epochs, config.max_groups_in_flight)
    weights = {"kl_reference_config": config.kl_reference_config}
    async with open_session(config, weights, config.dataset_builder.shared_system_prompt) as session:
        check_order(session.record, config.async_config)
        session.rewind(session.start_step(), len(batches))
        start: SamplingClient | None = None
        if config.dataset_builder.needs_starting_policy:
            start = await open_reference(session)
        if config.kl_penalty_coef != 0:
            reference = start or await open_reference(session, config.kl_reference_config)
            penalties = [KLPenalty(reference, config.kl_penalty_coef, config.kl_discount_factor), *penalties]
        sampling_client = await session.training_client.save_weights_and_get_sampling_client(
            record_stability_info=config.records_stability_info()
        )
        loop = Loop(config, session, batches, rounds, penalties, sampling_client)
        try:
            run = session.service, session.training_client, config.model_name, session.run.log_path
            with clients_of_run(*run, start):
                await _train(loop, config)
        except (Exception, asyncio.CancelledError):
            with session.ending.saving():
                await loop.save_stopped()
            raise
        finally:
            loop.records.close()


async def _train(loop: Loop, config: Config) -> None:
    batches: Batches = sync_batches
    if config.async_config is not None:
        batches = partial(async_batches, config=config.async_config)
    elif config.stream_minibatch_config is not None:
        batches = partial(stream_batches, config=config.stream_minibatch_config)
    await take_steps(loop, batches)
    await loop.finish()
