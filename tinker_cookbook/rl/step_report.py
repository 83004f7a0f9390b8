"""Reports of a step: its row of metrics, transcripts for people, records of all tokens, and one summary line per
rollout.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from tinker_cookbook.rl.config import Config
from tinker_cookbook.rl.metric_util import compute_trajectory_metrics
from tinker_cookbook.rl.metrics import (
    compute_advantage_metrics,
    compute_inflight_metrics,
    compute_sampling_client_metrics,
    rollout_usage,
    training_usage,
)
from tinker_cookbook.rl.minibatch import LoopMetrics, Minibatch
from tinker_cookbook.rl.records import RecordWriter, training_step_name, write_step_records
from tinker_cookbook.rl.rollout_files import StepRollouts, run_settings
from tinker_cookbook.rl.rollout_logging import RolloutSummaryExportConfig, write_summaries
from tinker_cookbook.rl.sampler import WrappedTrajectoryGroup
from tinker_cookbook.rl.transcripts import rollout_rows, write_evaluations, write_page
from tinker_cookbook.runs.session import Session
from tinker_cookbook.runs.vocabulary import write_vocabulary
from tinker_cookbook.stores.training_store import TrainingRunStore
from tinker_cookbook.utils.cost_estimation import TokenUsage
from tinker_cookbook.utils.lazy import torch
from tinker_cookbook.utils.narrowing import to_list


def account_for_groups(
    step: int, sampled: Sequence[WrappedTrajectoryGroup], batch: Minibatch, stale: int, errors: Mapping[str, float]
) -> LoopMetrics:
    """Account for each sampled group: trained, filtered, replaced (by one with signal), stale or failed.

    Args:
        step: updates that the trained weights have seen: `async/staleness_*` count how many more these are than the
            sampler's.
        batch: the successful groups.
        stale: how many other groups were dropped for their age.
        errors: metrics of the failures since the run's start.
    """
    versions_P, trained = [item.sampling_client_step for item in sampled], batch.num_trained_groups
    replaced = sum(not earlier.has_failed for item in sampled for earlier in item.replaced)
    metrics: LoopMetrics = {
        **compute_trajectory_metrics(batch.groups),
        **errors,
        **compute_sampling_client_metrics(versions_P, [item.seconds for item in sampled]),
        **compute_inflight_metrics(batch.groups),
        "async/staleness_max": step - min(versions_P),
        "async/staleness_min": step - max(versions_P),
        "async/staleness_mean": step - sum(versions_P) / len(versions_P),
        **batch.metrics,
        "groups/sampled": len(sampled) + stale,
        "groups/trained": trained,
        "groups/filtered": len(batch.groups) - trained - replaced,
        "groups/replaced": replaced,
        "groups/stale": stale,
        "groups/failed": len(sampled) - len(batch.groups),
        "train/num_datums": len(batch.data_D),
        "train/skipped_steps": int(not batch.data_D),
        "advantages/nonzero_count": 0,
    }
    if batch.data_D:
        metrics |= compute_advantage_metrics(batch.data_D)
        members = {(meta["group_idx"], meta["traj_idx"]) for meta in batch.metadata_D}
        metrics["train/branches_per_rollout"] = len(batch.data_D) / len(members)
    return metrics


def training_data_line(metrics: Mapping[str, float | int | str]) -> str:
    """The terminal line about a step's training data, from the result of `account_for_groups`."""
    names = ("count", "min", "max", "mean")
    stats = {name: metrics[key] for name in names if (key := f"advantages/nonzero_{name}") in metrics}
    shown = ", ".join(
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in stats.items()
    )
    return f"Training data: {metrics['train/num_datums']} datums. Advantage stats (nonzero): {shown}"


def tokens_used(batch: Minibatch, removes_constant: bool) -> tuple[TokenUsage, TokenUsage, int]:
    """Tokens that a step used, those that it discarded (the samples of removed groups), and the number of sampled tokens
    that it threw away: of members without a datum, in whatever group.
    """
    trained = {meta["group_idx"] for meta in batch.metadata_D}
    kept = [group for i, group in enumerate(batch.groups) if not removes_constant or i in trained]
    discarded = [group for i, group in enumerate(batch.groups) if removes_constant and i not in trained]
    members = {(meta["group_idx"], meta["traj_idx"]) for meta in batch.metadata_D}
    thrown_away = sum(
        one.num_action_tokens
        for i, group in enumerate(batch.groups)
        for j, one in enumerate(group.trajectories_G)
        if (i, j) not in members
    )
    return rollout_usage(kept) + batch.usage + training_usage(batch.data_D), rollout_usage(discarded), thrown_away


class StepReport:
    """Writes the transcripts and records of a run's steps. Records are written in a thread, while the loop continues; they
    are on disk before a checkpoint that does not redo the step.
    """

    def __init__(self, session: Session):
        self._session, self._writer = session, RecordWriter()
        self.wait, self.close = self._writer.wait, self._writer.close

    def write_transcripts(
        self, num_groups: int, step: int, sampled: Sequence[WrappedTrajectoryGroup], batch: Minibatch
    ) -> None:
        """Write the first groups of a step as a page, and to trackers that support them."""
        session, shown = self._session, step_rollouts(sampled, batch).first(num_groups)
        tokenizer, tracker = session.training_client.get_tokenizer(), session.run.logger
        write_page(session.run.store, step, "train", f"Training, step {step}", shown, tokenizer)
        if tracker.takes_rollouts:
            tracker.log_rollouts(rollout_rows(shown, tokenizer), step)

    def write_records(
        self,
        config: Config,
        step: int,
        sampled: Sequence[WrappedTrajectoryGroup],
        batch: Minibatch,
        logprobs_D: Sequence[torch.Tensor | None],
        metrics: LoopMetrics,
    ) -> None:
        """Start to write the records and summaries of a step.

        Args:
            config: the run's config, which selects what is written.
            logprobs_D: the trainer's, from `Loop.update`; empty if there was no update.
            metrics: of the step, with its learning rate.
        """
        session = self._session
        if not config.write_records and not config.rollout_json_export:
            return
        about = run_settings(config, step, float(metrics["optim/lr"]), config.training_loss_fn())
        rollouts, metrics = step_rollouts(sampled, batch, logprobs_D, about), dict(metrics)
        store, tokenizer = session.run.store, session.training_client.get_tokenizer()

        def write() -> None:
            if config.rollout_json_export:
                write_summaries(store, RolloutSummaryExportConfig("train", step, "train"), rollouts)
            if config.write_records:
                write_vocabulary(store, tokenizer)
                write_step_records(store, rollouts, metrics, config.num_groups_shown)

        def report() -> None:
            if config.write_records:
                session.display.say(f"Logged: {session.run.log_path / training_step_name(step)}")

        self._writer.submit(write, report)


@contextmanager
def evaluation_files(config: Config, step: int, label: str | None = None) -> Generator[None]:
    """Context in which evaluators run: those that support it write transcripts and summaries to the folder of this step.

    Args:
        label: names the files; None: use each evaluator's name.
    """
    pages, summaries = config.num_groups_shown > 0, config.rollout_json_export
    store = TrainingRunStore.in_folder(config.log_path) if pages or summaries else None
    with write_evaluations(store, step, label, summaries):
        yield


def step_rollouts(
    sampled: Sequence[WrappedTrajectoryGroup],
    batch: Minibatch,
    logprobs_D: Sequence[torch.Tensor | None] = (),
    run: Mapping[str, Any] | None = None,
) -> StepRollouts:
    """The data of pages, tables, summaries and records.

    Args:
        logprobs_D: the trainer's, from `Loop.update`; empty before the update.
        run: the settings of the step (`run_settings`); pages need none.
    """
    return StepRollouts(
        [item.trajectory_group for item in sampled],
        [item.sampling_client_step for item in sampled],
        [to_list(advantages_G) for advantages_G in batch.advantages_P],
        batch.data_D,
        batch.metadata_D,
        [None if logprobs is None else logprobs.numpy() for logprobs in logprobs_D],
        run or {},
    )
