"""What a step of the loop writes into its folder: transcripts for people, records down to the token, a line per rollout."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from tinker_cookbook.rl.config import Config
from tinker_cookbook.rl.minibatch import Minibatch
from tinker_cookbook.rl.records import RecordWriter, training_step_name, write_step_records
from tinker_cookbook.rl.rollout_files import StepRollouts, run_settings
from tinker_cookbook.rl.rollout_logging import RolloutSummaryExportConfig, write_summaries
from tinker_cookbook.rl.rollouts import FailedGroup
from tinker_cookbook.rl.transcripts import rollout_rows, write_evaluations, write_page
from tinker_cookbook.rl.types import EnvGroupBuilder, TrajectoryGroup
from tinker_cookbook.rl.update import LoopMetrics
from tinker_cookbook.runs.folder import iteration_folder
from tinker_cookbook.runs.session import Session
from tinker_cookbook.runs.vocabulary import write_vocabulary
from tinker_cookbook.utils.lazy import torch


@dataclass(frozen=True)
class WrappedTrajectoryGroup:
    """A group as it comes back from sampling: with its builder, and which snapshot it was sampled from."""

    trajectory_group: TrajectoryGroup | FailedGroup
    env_group_builder: EnvGroupBuilder
    sampling_client_step: int
    """optimizer updates (batches) that the snapshot had seen"""
    seconds: float
    place: int = 0
    """in its batch"""


class StepFiles:
    """Writes the files of a run's steps, as its config says.

    Args:
        writer: the thread for what is large.
    """

    def __init__(self, config: Config, session: Session, writer: RecordWriter):
        self._config, self._session, self._writer = config, session, writer

    def folder(self, step: int) -> Path:
        return iteration_folder(self._session.run.log_path, step)

    def write_transcripts(self, step: int, sampled: Sequence[WrappedTrajectoryGroup], batch: Minibatch) -> None:
        """The first groups, as pages and for trackers that take them."""
        shown = _rollouts(sampled, batch).first(self._config.num_groups_shown)
        tokenizer, tracker = self._session.training_client.get_tokenizer(), self._session.run.logger
        write_page(self.folder(step) / "train.html", f"Training, step {step}", shown, tokenizer)
        if tracker.takes_rollouts:
            tracker.log_rollouts(rollout_rows(shown, tokenizer), step)

    def write_records(
        self,
        step: int,
        sampled: Sequence[WrappedTrajectoryGroup],
        batch: Minibatch,
        logprobs_D: Sequence[torch.Tensor | None],
        learning_rate: float,
        metrics: LoopMetrics,
    ) -> None:
        """Begin to write the step's records and summaries. They are on disk before a checkpoint that does not redo the step."""
        config, folder, log_path = self._config, self.folder(step), self._session.run.log_path
        if not config.write_records and not config.rollout_json_export:
            return
        about = run_settings(config, step, learning_rate, config.training_loss_fn())
        trainer_D = [None if logprobs is None else logprobs.numpy() for logprobs in logprobs_D]
        rollouts = replace(_rollouts(sampled, batch), trainer_logprobs_D=trainer_D, run=about)
        tokenizer = self._session.training_client.get_tokenizer()

        def write() -> None:
            if config.rollout_json_export:
                write_summaries(folder, RolloutSummaryExportConfig("train", step, "train"), rollouts)
            if config.write_records:
                write_vocabulary(log_path, tokenizer)
                write_step_records(log_path, rollouts, metrics, config.num_groups_shown)

        def say() -> None:
            if config.write_records:
                self._session.display.say(f"Logged: {log_path / training_step_name(step)}")

        self._writer.submit(write, say)


@contextmanager
def evaluation_files(config: Config, step: int, label: str | None = None) -> Iterator[None]:
    """For the body, in which evaluators run: where those that know of it write transcripts and summaries.

    Args:
        label: names the files; None: each evaluator's own name does.
    """
    pages, summaries = config.num_groups_shown > 0, config.rollout_json_export
    folder = iteration_folder(Path(config.log_path).expanduser(), step) if pages or summaries else None
    with write_evaluations(folder, step if summaries else None, label):
        yield


def _rollouts(sampled: Sequence[WrappedTrajectoryGroup], batch: Minibatch) -> StepRollouts:
    """What pages, tables, summaries and records are made from; before the update the trainer's logprobs are missing."""
    return StepRollouts(
        [item.trajectory_group for item in sampled],
        [item.sampling_client_step for item in sampled],
        [advantages_G.tolist() for advantages_G in batch.advantages_P],
        batch.data_D,
        batch.metadata_D,
    )
