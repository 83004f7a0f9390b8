"""Steps of the loop as functions, for custom loops: evaluate, train on groups, take a snapshot, count tokens.

The loop itself (`train`) uses the same parts; these functions take the arguments that scripts of tinker-cookbook pass.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from tinker_cookbook.clients import SamplingClient, TrainingClient
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.renderers.datum_text import colorize_example
from tinker_cookbook.rl.advantages import AdvantageConfig, compute_advantages, is_constant
from tinker_cookbook.rl.algorithms import LOSS_FNS
from tinker_cookbook.rl.config import Config
from tinker_cookbook.rl.data_processing import assemble_training_data
from tinker_cookbook.rl.metric_util import RLTestSetEvaluator, compute_trajectory_metrics
from tinker_cookbook.rl.metrics import (
    KLPenalty,
    compute_kl_sample_train,
    compute_post_kl,
    compute_sampling_client_metrics,
    count_discarded_rollout,
    rollout_usage,
    training_usage,
)
from tinker_cookbook.rl.minibatch import LoopMetrics, Minibatch, Update, finite_passes, prepare_minibatch, train_step
from tinker_cookbook.rl.rollouts import finished_groups
from tinker_cookbook.rl.sampler import WrappedTrajectoryGroup
from tinker_cookbook.rl.step_report import evaluation_files
from tinker_cookbook.rl.types import EnvGroupBuilder, TrajectoryGroup
from tinker_cookbook.runs.evaluation import SamplingClientEvaluator
from tinker_cookbook.runs.loggers import Logger
from tinker_cookbook.runs.manager import CheckpointManager
from tinker_cookbook.tokenizer_utils import Tokenizer
from tinker_cookbook.utils.cost_estimation import CostTracker, TokenUsage
from tinker_cookbook.utils.lazy import tinker, torch
from tinker_cookbook.utils.misc_utils import gather_all

logger = logging.getLogger(__name__)

T = TypeVar("T")

__all__ = [
    "DISCARDED_WORK_LOG_INTERVAL_SECONDS",
    "LOSS_FNS",
    "DiscardedWorkLog",
    "SamplingClientReuse",
    "_remove_mask",  # its name in loops of the cookbook
    "compute_full_batch_metrics_and_get_sampling_client",
    "count_discarded_rollout",
    "do_train_step_and_get_sampling_client",
    "do_train_step_streaming_and_get_sampling_client",
    "drop_constant_reward_group",
    "gather_with_progress",
    "print_group",
    "rollout_usage",
    "run_evaluations_parallel",
    "run_single_evaluation",
    "save_checkpoint_and_get_sampling_client",
    "train_step",
    "training_usage",
]

DISCARDED_WORK_LOG_INTERVAL_SECONDS = 60.0
_remove_mask = Update.loss_datum
_PRINTED = 4
"""Members that `print_group` shows."""


async def gather_with_progress(coroutines: Iterable[Coroutine[Any, Any, T]], desc: str) -> list[T]:
    """`gather_all` with a progress bar: results in the order of the coroutines; the first failure cancels the others."""
    from rich.progress import Progress  # slow to import

    waiting = list(coroutines)
    with Progress(transient=True) as bar:
        row = bar.add_task(desc, total=len(waiting))

        async def counted(one: Coroutine[Any, Any, T]) -> T:
            result = await one
            bar.advance(row)
            return result

        return await gather_all(counted(one) for one in waiting)


def print_group(traj_group: TrajectoryGroup, tokenizer: Tokenizer) -> None:
    """Log a group for people: up to four members from worst to best, with rewards, metrics and coloured tokens."""
    rewards = traj_group.get_total_rewards()
    order = sorted(range(len(rewards)), key=rewards.__getitem__)
    spread = max(1, min(_PRINTED, len(order)) - 1)
    shown = sorted({order[i * (len(order) - 1) // spread] for i in range(spread + 1)}) if order else []
    data_D, metadata_D = assemble_training_data(
        [traj_group], compute_advantages([traj_group], AdvantageConfig()), keep_zero=True
    )
    lines = ["Group"]
    for i in shown:
        lines.append(f"Member {i}: reward {rewards[i]:.3g} {traj_group.metrics_G[i] or ''}".rstrip())
        turns = traj_group.trajectories_G[i].transitions
        lines += [f"  turn {turn}: {transition.metrics}" for turn, transition in enumerate(turns) if transition.metrics]
        of_member = [datum for datum, meta in zip(data_D, metadata_D, strict=True) if meta["traj_idx"] == i]
        lines += [colorize_example(datum, tokenizer, "advantages") for datum in of_member]
    logger.info("%s", "\n".join(lines))


class DiscardedWorkLog:
    """Reports the sampled tokens of dropped groups to trackers while no step logs a row.

    Args:
        cost_tracker: counts them; None: nothing is reported.
        ml_logger: gets the tracker's totals as a summary of the run, which belongs to no step.
        interval_seconds: time between two reports; None: a minute.
        clock: the time in seconds.
    """

    def __init__(
        self,
        cost_tracker: CostTracker | None,
        ml_logger: Logger,
        *,
        interval_seconds: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.cost_tracker, self.ml_logger, self.clock = cost_tracker, ml_logger, clock
        self.interval_seconds = DISCARDED_WORK_LOG_INTERVAL_SECONDS if interval_seconds is None else interval_seconds
        self._last = clock()

    def step_logged(self) -> None:
        """A row with the totals was logged: restart the interval."""
        self._last = self.clock()

    def discarded(self, step: int) -> None:
        """A group was dropped and counted before `step`: report the totals if due."""
        if self.cost_tracker is not None and self.clock() - self._last >= self.interval_seconds:
            self._last = self.clock()
            self.ml_logger.log_summary(self.cost_tracker.cumulative_metrics())


def drop_constant_reward_group(
    trajectory_group: TrajectoryGroup | None,
    config: Config,
    cost_tracker: CostTracker | None,
    discarded_log: DiscardedWorkLog | None = None,
    step: int = 0,
) -> TrajectoryGroup | None:
    """The group, or None if `config.remove_constant_reward_groups` drops it; its sampled tokens are then counted."""
    if trajectory_group is None or not (config.remove_constant_reward_groups and is_constant(trajectory_group)):
        return trajectory_group
    count_discarded_rollout(cost_tracker, trajectory_group)
    if discarded_log is not None:
        discarded_log.discarded(step)
    return None


async def run_single_evaluation(
    evaluator: SamplingClientEvaluator,
    config: Config,
    i_batch: int,
    sampling_client: SamplingClient,
    evaluator_label: str,
    store: Any = None,
) -> dict[str, float]:
    """An evaluator's metrics. An evaluator of a test set writes transcripts and summaries to the step's folder, as in
    the loop.

    Args:
        evaluator_label: names the files.
        store: must be None, because the loops of this library write to their folder.
    """
    if store is not None:
        raise ConfigurationError("store: evaluations are written into log_path; leave it out")
    with evaluation_files(config, i_batch, evaluator_label):
        return await evaluator(sampling_client)


async def run_evaluations_parallel(
    evaluators: Sequence[SamplingClientEvaluator],
    sampling_client: SamplingClient,
    config: Config,
    i_batch: int,
    store: Any = None,
) -> dict[str, float]:
    """The metrics of all evaluators, run concurrently. If two metrics have the same name, the later evaluator's counts."""
    results = await gather_all(
        run_single_evaluation(one, config, i_batch, sampling_client, _label(one, i), store)
        for i, one in enumerate(evaluators)
    )
    return {key: value for metrics in results for key, value in metrics.items()}


def _label(evaluator: SamplingClientEvaluator, place: int) -> str:
    name = evaluator.name if isinstance(evaluator, RLTestSetEvaluator) else str(place)
    return re.sub(r"[^A-Za-z0-9_.-]+", "_", name)


async def save_checkpoint_and_get_sampling_client(
    training_client: TrainingClient,
    checkpoint_mgr: CheckpointManager,
    i_batch: int,
    start_batch: int = 0,
    record_stability_info: bool = False,
    cost_tracker: CostTracker | None = None,
) -> tuple[SamplingClient, dict[str, Any]]:
    """A snapshot of the weights, after a periodic checkpoint if one is due after `i_batch` steps; and no metrics.

    Args:
        start_batch: the step at which the run begins; nothing is saved there.
        record_stability_info: store in the snapshot what `stable_reinforce` needs.
        cost_tracker: its totals go into the checkpoint's record.
    """
    if i_batch > start_batch and checkpoint_mgr.should_save_periodic(i_batch):
        await checkpoint_mgr.save_periodic(i_batch, {"batch": i_batch, **_totals(cost_tracker)})
    snapshot = training_client.save_weights_and_get_sampling_client(record_stability_info=record_stability_info)
    return await snapshot, {}


def _totals(tracker: CostTracker | None) -> dict[str, Any]:
    if tracker is None:
        return {}
    return {"cumulative_tokens": vars(tracker.cumulative), "discarded_tokens": vars(tracker.discarded)}


@dataclass
class SamplingClientReuse:
    """An earlier snapshot, which may be reused when no rollout will start."""

    sampling_client: SamplingClient
    rollout_workers_finished: asyncio.Event
    """set when no rollout will start"""
    reused: bool = False
    """whether it was taken, so that the weights have changed"""


async def compute_full_batch_metrics_and_get_sampling_client(
    training_client: TrainingClient,
    checkpoint_mgr: CheckpointManager,
    i_batch: int,
    data_D: list[tinker.Datum],
    training_logprobs_D: list[torch.Tensor],
    do_compute_post_kl: bool,
    record_stability_info: bool = False,
    usage: TokenUsage = TokenUsage(),  # noqa: B008  it is frozen
    cost_tracker: CostTracker | None = None,
    sampling_client_reuse: SamplingClientReuse | None = None,
) -> tuple[SamplingClient, dict[str, Any]]:
    """After an update: compare sampler and trainer, count the tokens, save a checkpoint if due, take a snapshot.

    Args:
        i_batch: number of finished steps.
        usage: tokens that the step used before its training.
        sampling_client_reuse: an earlier snapshot, returned if no rollout will start, nothing is to be saved and no KL
            after the update is requested.

    Returns:
        The snapshot, and the metrics.
    """
    metrics: dict[str, Any] = {**compute_kl_sample_train(data_D, training_logprobs_D)}
    if cost_tracker is not None:  # before the checkpoint, which stores the totals
        metrics |= cost_tracker.record_step(usage + training_usage(data_D))
    reuse = sampling_client_reuse
    is_due = i_batch > 0 and checkpoint_mgr.should_save_periodic(i_batch)
    if reuse is not None and reuse.rollout_workers_finished.is_set() and not (do_compute_post_kl or is_due):
        reuse.reused = True
        return reuse.sampling_client, metrics
    snapshot, _ = await save_checkpoint_and_get_sampling_client(
        training_client, checkpoint_mgr, i_batch, 0, record_stability_info, cost_tracker
    )
    if do_compute_post_kl:
        moved, used = await compute_post_kl(data_D, snapshot)
        metrics |= moved
        if cost_tracker is not None:
            metrics |= cost_tracker.extend_step(used)
    return snapshot, metrics


async def do_train_step_and_get_sampling_client(
    config: Config,
    i_batch: int,
    training_client: TrainingClient,
    checkpoint_mgr: CheckpointManager,
    kl_reference_client: SamplingClient | None,
    tokenizer: Tokenizer,
    env_group_builders_P: Sequence[EnvGroupBuilder],
    trajectory_groups_P: Sequence[TrajectoryGroup],
    cost_tracker: CostTracker | None = None,
    sampling_client_reuse: SamplingClientReuse | None = None,
) -> tuple[SamplingClient, dict[str, Any]]:
    """Train on some groups according to the config: datums, update, snapshot.

    Args:
        i_batch: the step, from 0.
        kl_reference_client: for the KL penalty, if `config.kl_penalty_coef` is not 0.
        tokenizer: decodes the first two groups for printing.
        env_group_builders_P: their tags name the metrics.

    Returns:
        The snapshot of the new weights (the earlier one, if `sampling_client_reuse.reused`), and the step's metrics.
    """
    for group in trajectory_groups_P[:2]:
        print_group(group, tokenizer)
    batch = await _prepare(config, trajectory_groups_P, kl_reference_client)
    update = Update.of_config(config, training_client, config.learning_rate)
    update.submit(batch.data_D, config.num_substeps)
    clients = training_client, checkpoint_mgr
    return await _finish(
        config, i_batch, *clients, env_group_builders_P, batch, update, cost_tracker, sampling_client_reuse
    )


async def do_train_step_streaming_and_get_sampling_client(
    config: Config,
    i_batch: int,
    trajectory_groups_queue: asyncio.Queue[Any],
    training_client: TrainingClient,
    checkpoint_mgr: CheckpointManager,
    kl_reference_client: SamplingClient | None,
    tokenizer: Tokenizer,
    trajectory_group_filter: Callable[[WrappedTrajectoryGroup | None], bool] = lambda _: True,
    cost_tracker: CostTracker | None = None,
) -> tuple[SamplingClient | None, dict[str, Any], list[WrappedTrajectoryGroup]] | None:
    """Train on groups from a queue: a pass is submitted as soon as its groups have arrived.

    Args:
        trajectory_groups_queue: items are WrappedTrajectoryGroup; None is a group that failed or was dropped. Anything
            else ends the step with the groups that have arrived, and is put back.
        trajectory_group_filter: returns False for items to ignore.

    Returns:
        Snapshot (None: nothing was trained), metrics, and the groups that were trained on. None: the queue ended
        before any group arrived.

    Raises:
        ConfigurationError: stream_minibatch_config is missing, or its groups cannot be divided into substeps and passes.
    """
    queue, taken = trajectory_groups_queue, list[WrappedTrajectoryGroup]()
    parts, ended = list[Minibatch](), False
    update = Update.of_config(config, training_client, config.learning_rate)
    per_pass, passes = _pass_size(config)
    for _ in range(config.num_substeps):
        for _ in range(passes):
            items: list[WrappedTrajectoryGroup | None] = []
            while len(items) < per_pass and not ended:
                item = await queue.get()
                ended = item is not None and not isinstance(item, WrappedTrajectoryGroup)
                if ended:
                    queue.put_nowait(item)
                elif trajectory_group_filter(item):
                    items.append(item)
            arrived = [one for one in items if one is not None and isinstance(one.trajectory_group, TrajectoryGroup)]
            taken += arrived
            groups = finished_groups(one.trajectory_group for one in arrived)
            parts.append(await _prepare(config, groups, kl_reference_client))
            update.forward_backward(parts[-1].data_D)
        update.optim_step()
    if not taken:
        metrics = cost_tracker.record_step(TokenUsage()) if cost_tracker is not None else {}
        return None if ended else (None, metrics, [])
    whole = Minibatch.joined(parts)
    for group in whole.groups[:2]:
        print_group(group, tokenizer)
    builders = [one.env_group_builder for one in taken]
    client, metrics = await _finish(
        config, i_batch, training_client, checkpoint_mgr, builders, whole, update, cost_tracker
    )
    seconds, steps = [one.seconds for one in taken], [one.sampling_client_step for one in taken]
    return client, compute_sampling_client_metrics(steps, seconds) | metrics, taken


def _pass_size(config: Config) -> tuple[int, int]:
    """Groups per pass, and passes per optimizer step."""
    stream = config.stream_minibatch_config
    if stream is None or stream.groups_per_batch is None:
        raise ConfigurationError("stream_minibatch_config.groups_per_batch: must be given")
    passes = config.num_substeps * stream.num_minibatches
    if stream.groups_per_batch % passes:
        raise ConfigurationError(
            f"stream_minibatch_config.groups_per_batch={stream.groups_per_batch}: must be divisible by num_substeps="
            f"{config.num_substeps} times num_minibatches={stream.num_minibatches}"
        )
    return stream.groups_per_batch // passes, stream.num_minibatches


async def _prepare(config: Config, groups: Sequence[TrajectoryGroup], reference: SamplingClient | None) -> Minibatch:
    for name, unused in (
        ("entropy", None),
        ("curriculum", None),
        ("replace_constant_groups", 0),
        ("top_entropy_share", 1),
    ):
        if (value := getattr(config, name)) != unused:
            raise ConfigurationError(f"{name}={value} is for the library's own loop (rl.train.main); leave it out here")
    penalties: list[KLPenalty] = []
    if config.kl_penalty_coef > 0 and reference is not None:
        penalties.append(KLPenalty(reference, config.kl_penalty_coef, config.kl_discount_factor))
    return await prepare_minibatch(
        groups,
        config.advantage,
        config.remove_constant_reward_groups,
        penalties=penalties,
        include_provenance=config.records_stability_info(),
        mask_truncated=config.overlong is not None and config.overlong.mask,
    )


async def _finish(
    config: Config,
    i_batch: int,
    training_client: TrainingClient,
    checkpoint_mgr: CheckpointManager,
    builders: Sequence[EnvGroupBuilder],
    batch: Minibatch,
    update: Update,
    cost_tracker: CostTracker | None,
    reuse: SamplingClientReuse | None = None,
) -> tuple[SamplingClient, dict[str, Any]]:
    logprobs_D, of_update = await update.finish()
    tags = [builder.logging_tags() for builder in builders]
    metrics: LoopMetrics = {**compute_trajectory_metrics(batch.groups, tags), **batch.metrics, **of_update}
    client, more = await compute_full_batch_metrics_and_get_sampling_client(
        training_client,
        checkpoint_mgr,
        i_batch + 1,
        *finite_passes(batch.data_D, logprobs_D),
        config.compute_post_kl,
        config.records_stability_info(),
        usage=rollout_usage(batch.groups) + batch.usage,
        cost_tracker=cost_tracker,
        sampling_client_reuse=reuse,
    )
    return client, {**metrics, **more}
