"""What the three ways of pacing a run share: evaluate, sample a group, train on a batch, log and save a step, finish.

A step is one batch. Its row is on disk before the checkpoint that follows it, so a run that is killed resumes to what it
would have been (`runs.manager`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from tinker_cookbook.clients import SamplingClient
from tinker_cookbook.completers import TinkerTokenCompleter
from tinker_cookbook.exceptions import TrainingError, UntrainedRunError
from tinker_cookbook.rl.advantages import RoleBaselines
from tinker_cookbook.rl.config import Config
from tinker_cookbook.rl.data_processing import replace_inputs
from tinker_cookbook.rl.item_dataset import TrainingBatches
from tinker_cookbook.rl.metrics import (
    compute_kl_sample_train,
    compute_post_kl,
    kl_alarm,
)
from tinker_cookbook.rl.minibatch import Minibatch, Penalty, prepare_minibatch, why_untrained
from tinker_cookbook.rl.off_policy import correct_off_policy
from tinker_cookbook.rl.records import RecordWriter
from tinker_cookbook.rl.rollout_strategy import describe_group
from tinker_cookbook.rl.rollouts import FailedGroup, RolloutErrorCounter, finished_groups, try_group_rollout
from tinker_cookbook.rl.step_files import StepFiles, WrappedTrajectoryGroup, evaluation_files
from tinker_cookbook.rl.step_metrics import account_for_groups, training_data_line
from tinker_cookbook.rl.token_usage import rollout_usage, training_usage
from tinker_cookbook.rl.trajectory_text import one_example
from tinker_cookbook.rl.types import EnvGroupBuilder
from tinker_cookbook.rl.update import LoopMetrics, Update
from tinker_cookbook.runs.evaluation import EvaluationRounds, Evaluator, run_evaluators
from tinker_cookbook.runs.progress import count_trained_tokens
from tinker_cookbook.runs.session import Session
from tinker_cookbook.utils.lazy import torch
from tinker_cookbook.utils.lr_scheduling import learning_rate_at
from tinker_cookbook.utils.misc_utils import in_turn, timed, to_its_end
from tinker_cookbook.utils.seeds import derive_seed
from tinker_cookbook.utils.trace import scope_span_sync

logger = logging.getLogger(__name__)

T = TypeVar("T")

_ROLES_KEY, _ERRORS_KEY, _UNTRAINED_KEY = "role_baselines", "rollout_errors", "zero_advantage_steps"
AHEAD_KEY = "groups_ahead"


class KeepsGroups(Protocol):
    """Has groups that no step has trained on, of which a checkpoint keeps what it can (`ahead.SamplingAhead`)."""

    async def settle(self) -> None: ...

    async def keep(self, name: str) -> None: ...

    def keep_stopped(self, name: str) -> None: ...

    def finish(self) -> None: ...


@dataclass(frozen=True)
class StepOutcome:
    """What a step came to. The loop logs it, or ends with its error."""

    step: int
    metrics: LoopMetrics
    sampled_tokens: int
    trained_tokens: int
    error: TrainingError | None = None
    """why the step trained nothing, if so"""


class Loop:
    """The state of a run between its steps."""

    def __init__(
        self,
        config: Config,
        session: Session,
        batches: TrainingBatches,
        rounds: EvaluationRounds,
        penalties: Sequence[Penalty],
        sampling_client: SamplingClient,
    ):
        self.config, self.session, self.batches = config, session, batches
        self.progress = session.progress  # whose clock starts now
        self.rounds, self.penalties = rounds, penalties
        self.sampling_client, self.sampling_client_step = sampling_client, session.start_step()
        self.start, self.end = session.start_step(), len(batches)
        self.rollout, self.num_shown = config.effective_rollout(), config.num_groups_shown
        self.errors = RolloutErrorCounter()
        self.role_baselines = RoleBaselines(config.advantage.role_decay)
        self.steps_done = self.start
        self.records = RecordWriter()
        self.files = StepFiles(config, session, self.records)
        self.untrained = 0
        """steps in a row that trained nothing"""
        self.ahead: KeepsGroups | None = None
        self.between_steps = asyncio.Event()
        """is set while no optimizer step is submitted beyond `steps_done` steps, whose weights these are"""
        self.between_steps.set()
        self._was_cancelled = False
        if session.record is not None:
            self.role_baselines.means.update(session.record.get(_ROLES_KEY, {}))
            errors = session.record.get(_ERRORS_KEY, {})
            self.errors.counts.update(errors.get("counts", {}))
            self.errors.groups_skipped = errors.get("groups_skipped", 0)
            self.untrained = session.record.get(_UNTRAINED_KEY, 0)
        self._said_why = False
        self._example: str | None = None
        """of the first step that trained nothing"""
        self._keep_state()

    async def evaluate(self, step: int) -> LoopMetrics:
        """What the evaluators that are due before this step say of the current snapshot."""
        metrics: LoopMetrics = {}
        if due := self.rounds.due(step):
            with timed("eval", metrics), self.session.display.phase("evaluating"):
                metrics |= await self._run_evaluators(due, step)
        return metrics

    async def _run_evaluators(self, evaluators: Sequence[Evaluator], step: int) -> dict[str, float]:
        with evaluation_files(self.config, step):
            evaluation = run_evaluators(evaluators, self.session.training_client, self.sampling_client)
            return await self.session.ending.unless_insisted(evaluation)

    async def sample_group(self, batch: int, place: int, builder: EnvGroupBuilder) -> WrappedTrajectoryGroup:
        """Roll out one group with the snapshot that is current when it starts.

        Seeds depend on the run's seed, the group's batch and its place in it, never on timing.
        """
        config = self.config
        started, version = time.perf_counter(), self.sampling_client_step
        policy = TinkerTokenCompleter(
            self.sampling_client,
            config.max_tokens,
            config.temperature,
            seed=derive_seed(config.seed, "rollouts", batch),
            top_k=config.top_k,
            top_p=config.top_p,
            min_p=config.min_p,
        )
        group = await try_group_rollout(
            builder,
            policy.fork("group", place),
            self.rollout,
            name=f"{place} of step {batch}, {describe_group(builder)}",
            with_notes=place < self.num_shown,
            with_records=config.write_records and place < self.num_shown,
        )
        has_failed = isinstance(group, FailedGroup)
        tokens = 0 if has_failed else sum(trajectory.num_action_tokens for trajectory in group.trajectories_G)
        self.session.display.advance(tokens, failed=has_failed)
        return WrappedTrajectoryGroup(group, builder, version, time.perf_counter() - started, place)

    def sample_groups(
        self, tasks: asyncio.TaskGroup, batch: int, builders: Sequence[EnvGroupBuilder]
    ) -> list[asyncio.Future[WrappedTrajectoryGroup]]:
        """Roll out all groups of a batch, `max_groups_in_flight` at a time; the groups to come, in order."""
        groups = (self.sample_group(batch, i, builder) for i, builder in enumerate(builders))
        return in_turn(tasks, groups, len(builders), self.config.max_groups_in_flight)

    async def prepare(self, sampled: Sequence[WrappedTrajectoryGroup]) -> Minibatch:
        """The datums of some groups."""
        return await prepare_minibatch(
            finished_groups(item.trajectory_group for item in sampled),
            self.config.advantage,
            self.config.remove_constant_reward_groups,
            self.role_baselines,
            self.penalties,
            self.config.records_stability_info(),
        )

    def learning_rate(self, step: int) -> float:
        """That of a step's update."""
        return learning_rate_at(self.config, step, self.end)

    def new_update(self, step: int) -> Update:
        client, config = self.session.training_client, self.config
        return Update(
            client,
            self.learning_rate(step),
            config.training_loss_fn(),
            config.loss_fn_config,
            config.grad_clip_norm,
            config.on_nonfinite,
        )

    async def train(
        self,
        step: int,
        sampled: Sequence[WrappedTrajectoryGroup],
        batch: Minibatch,
        update: Update | None = None,
        stale: int = 0,
    ) -> StepOutcome:
        """One batch's update, then a new snapshot; without a token to train on, neither.

        Args:
            sampled: the groups of the batch, of which `batch` was made.
            update: what was submitted of it already; None: nothing.
            stale: groups besides these that were dropped for their age.
        """
        for item in sampled:
            self.errors.ingest(item.trajectory_group)
        versions_P, seconds_P = [item.sampling_client_step for item in sampled], [item.seconds for item in sampled]
        metrics: LoopMetrics = account_for_groups(batch, versions_P, seconds_P, stale, self.errors.get_metrics(), step)
        display = self.session.display
        display.say_stages("replies")
        if batch.data_D:
            display.say(training_data_line(metrics))
        if self.num_shown:
            with timed("write_transcripts", metrics):
                self.files.write_transcripts(step, sampled, batch)
        logprobs_D: list[torch.Tensor | None] = []
        try:
            if batch.data_D:
                with display.phase("training"), scope_span_sync("update"):
                    found, logprobs_D = await self._update(step, batch, update)
                metrics |= found
        finally:  # what was sampled is not lost by an update that fails
            with timed("write_records", metrics):
                self.files.write_records(step, sampled, batch, logprobs_D, self.learning_rate(step), dict(metrics))
        metrics |= self._count_tokens(batch)
        sampled_tokens = sum(t.num_action_tokens for group in batch.groups for t in group.trajectories_G)
        error = None if batch.data_D else why_untrained(step, batch)
        if error is not None and self._example is None:
            self._example = one_example(batch.groups, self.session.training_client.get_tokenizer())
        passed_D = [datum for datum, logprobs in zip(batch.data_D, logprobs_D, strict=True) if logprobs is not None]
        return StepOutcome(step, metrics, sampled_tokens, count_trained_tokens(passed_D), error)

    async def _update(
        self, step: int, batch: Minibatch, update: Update | None
    ) -> tuple[LoopMetrics, list[torch.Tensor | None]]:
        """Submit the batch, unless that has been done, wait for the weights and take a snapshot.

        Returns:
            What the engine says of it, and the trainer's logprobs of each datum's targets before the update (None: its pass
            was not finite, and is skipped).
        """
        metrics: LoopMetrics = {}
        data_D, config = batch.data_D, self.config
        if config.off_policy_correction is not None:
            with timed("off_policy_correction", metrics):
                data_D, found = await correct_off_policy(
                    batch.data_D,
                    self.session.training_client,
                    config.off_policy_correction,
                    str(config.training_loss_fn()),
                    config.loss_fn_config,
                )
            metrics |= found
            # The batch's own datums get the advantages, but keep the logprobs of when they were sampled.
            batch.data_D = [
                replace_inputs(corrected, logprobs=datum.loss_fn_inputs["logprobs"].to_numpy())
                for corrected, datum in zip(data_D, batch.data_D, strict=True)
            ]
        self.between_steps.clear()
        with timed("train", metrics):
            if update is None:
                update = self.new_update(step)
                update.submit(data_D, config.num_substeps)
            logprobs_D, found = await self.to_its_end(update.finish())
        passed = [
            (datum, logprobs) for datum, logprobs in zip(batch.data_D, logprobs_D, strict=True) if logprobs is not None
        ]
        passed_D = [datum for datum, _ in passed]
        with scope_span_sync("after_update"):
            with timed("compute_kl_sample_train", metrics):
                metrics |= found | compute_kl_sample_train(passed_D, [logprobs for _, logprobs in passed])
            if (alarm := kl_alarm(metrics, config.kl_alarm)) is not None:
                logger.warning("step %d: %s", step, alarm)
            metrics["optim/kl_alarm"] = int(alarm is not None)
            with timed("snapshot", metrics):
                snapshot = self.session.training_client.save_weights_and_get_sampling_client(
                    record_stability_info=config.records_stability_info()
                )
                self.sampling_client = await self.to_its_end(snapshot)
            self.sampling_client_step = step + 1
            if config.compute_post_kl:
                with timed("post_kl", metrics):
                    found, used = await self.to_its_end(compute_post_kl(batch.data_D, self.sampling_client))
                metrics |= found
                batch.usage += used
        self.session.checkpoints.tokens += sum(datum.model_input.length for datum in batch.data_D)
        return metrics, logprobs_D

    def _count_tokens(self, batch: Minibatch) -> dict[str, float]:
        """Those that the step used; of groups that are removed, what was sampled counts as discarded."""
        kept = {meta["group_idx"] for meta in batch.metadata_D} if self.config.remove_constant_reward_groups else None
        discarded = [group for i, group in enumerate(batch.groups) if kept is not None and i not in kept]
        used = [group for i, group in enumerate(batch.groups) if kept is None or i in kept]
        usage = rollout_usage(used) + batch.usage + training_usage(batch.data_D)
        return self.progress.count(usage, rollout_usage(discarded))

    async def to_its_end(self, submitted: Awaitable[T]) -> T:
        """Wait for what is submitted, which cannot be called back. A cancellation meanwhile counts when the step is done."""
        return await to_its_end(submitted, self._note_cancellation)

    def _note_cancellation(self) -> None:
        if not self._was_cancelled:
            self._was_cancelled = True
            logger.info("the run is ending; the step under way comes to its end first")

    async def end_step(self, outcome: StepOutcome) -> None:
        """Log the step, then save what is due. In this order: metrics reach at least as far as the last checkpoint.

        Raises:
            ZeroAdvantageError, TrainingError: the step trained nothing, and ends the run as `on_zero_advantages` says.
        """
        step, session = outcome.step, self.session
        progress = self.progress.row(outcome.sampled_tokens, outcome.trained_tokens)
        session.run.log_metrics(outcome.metrics | progress, step)
        self.steps_done = step + 1
        self.between_steps.set()
        self.sampling_client_step = step + 1
        self.untrained = self.untrained + 1 if outcome.error is not None else 0
        ends = outcome.error is not None and self._is_too_much()
        if ends:
            self.untrained = 0  # the run that goes on has as many tries again
        self._keep_state()
        if outcome.error is not None:
            self._say_untrained(outcome.error, step, ends)
        if self._was_cancelled:
            raise asyncio.CancelledError
        session.ending.check()
        if session.checkpoints.should_save(step + 1):
            self.records.wait()
            if self.ahead is not None and step + 1 < self.end:
                await self.ahead.settle()
                await self.ahead.keep(f"{step + 1:06d}")
        if step + 1 < self.end:
            await session.checkpoints.maybe_save(step + 1, {"batch": step + 1})

    def _is_too_much(self) -> bool:
        most = {"skip": None, "raise": 1, "stop": self.config.max_zero_advantage_steps}[self.config.on_zero_advantages]
        return most is not None and self.untrained >= most

    def _say_untrained(self, error: TrainingError, step: int, ends: bool) -> None:
        if ends:
            steps = (
                "step" if self.config.on_zero_advantages == "raise" else f"{self.config.max_zero_advantage_steps} steps"
            )
            error.add_note(
                f"The last {steps} trained nothing, so the run ends after step {step} (on_zero_advantages="
                f"{self.config.on_zero_advantages}; skip goes on however many there are). {self.session.run.log_path} keeps "
                "what is done, and behavior_if_log_dir_exists=resume goes on with the next batch."
            )
            raise self._with_example(error)
        if self._said_why:
            logger.warning("step %d: nothing to train on; skipped.", step)
        else:
            logger.warning("step %d: nothing to train on; skipped. %s\n%s", step, error, self._example or "")
        self._said_why = True

    def _with_example(self, error: TrainingError) -> TrainingError:
        if self._example is not None:
            error.add_note(self._example)
        return error

    def _keep_state(self) -> None:
        """What a checkpoint of the steps that are done says besides their number."""
        state = self.session.checkpoints.loop_state
        if self.role_baselines.means:
            state[_ROLES_KEY] = dict(self.role_baselines.means)
        state[_UNTRAINED_KEY] = self.untrained
        if self.errors.counts or self.errors.groups_skipped:
            state[_ERRORS_KEY] = {"counts": dict(self.errors.counts), "groups_skipped": self.errors.groups_skipped}

    async def save_stopped(self) -> None:
        """Before an error ends the run: the steps so far are good work, and a resumed run keeps them."""
        self.records.close()
        if self.between_steps.is_set() and self.steps_done > self.start:
            if self.ahead is not None:
                self.ahead.keep_stopped(f"{self.steps_done:06d}-stopped")
            await self.session.checkpoints.save_stopped(self.steps_done, {"batch": self.steps_done})

    async def finish(self) -> None:
        """Evaluate and save the final weights, unless that has been done."""
        if self.session.is_complete(self.start, self.end):
            return
        self.records.wait()
        if self.progress.trained_tokens == 0:
            told = (
                f"the run has come to its end and trained nothing: none of its {self.end} batches had a token with an "
                f"advantage; logs.log in {self.session.run.log_path} has the rewards of the first"
            )
            if self.config.on_zero_advantages != "skip":
                raise self._with_example(UntrainedRunError(told))
            logger.warning("%s", told)
        if due := self.rounds.at_end():
            final = await self._run_evaluators(due, self.steps_done)
            about = {"progress/batch": self.steps_done, "progress/done_frac": 1.0, **self.progress.row()}
            self.session.run.log_final({**about, **self.progress.tokens.cumulative_metrics(), **final}, self.steps_done)
        self.session.checkpoints.loop_state.pop(AHEAD_KEY, None)
        await self.session.checkpoints.save_final({"batch": self.end})
        if self.ahead is not None:
            self.ahead.finish()
