"""What the loops over epochs of a dataset share (supervised, DPO): their settings, the learning rate of a step, the cursor."""

from __future__ import annotations

import logging
from typing import Any

import chz

from tinker_cookbook.eval.evaluators import EvaluatorBuilder
from tinker_cookbook.eval.run import EvaluationRounds
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.runs.checkpoints import get_last_checkpoint
from tinker_cookbook.runs.config import RunConfig, RunOptions
from tinker_cookbook.supervised.types import SupervisedDataset
from tinker_cookbook.utils.lazy import tinker
from tinker_cookbook.utils.lr_scheduling import LRSchedule, compute_schedule_lr_multiplier
from tinker_cookbook.utils.seeds import derive_seed

logger = logging.getLogger(__name__)

BATCHES_KEY, SCHEDULE_KEY = "batches_per_epoch", "schedule_steps"


@chz.chz(typecheck=True)
class EpochOptions(RunOptions):
    """Settings of the loops over epochs of a dataset."""

    lr_schedule: LRSchedule = chz.field(
        default="linear",
        doc="how it falls over the run, linear, cosine or constant: over all epochs, or over max_steps where that is less",
    )
    num_epochs: int = chz.field(default=1, doc="passes over the data", validator=chz.validators.gt(0))
    eval_every: int = chz.field(
        default=10, doc="evaluate before every n-th batch and at the end; 0: never", validator=chz.validators.ge(0)
    )
    adam_beta1: float = chz.field(default=0.9, doc="Adam's beta1")
    adam_beta2: float = chz.field(default=0.95, doc="Adam's beta2")
    adam_eps: float = chz.field(default=1e-8, doc="Adam's epsilon")

    @chz.validate
    def _check_adam(self) -> None:
        for name, beta in (("adam_beta1", self.adam_beta1), ("adam_beta2", self.adam_beta2)):
            if not 0 <= beta < 1:
                raise ConfigurationError(f"{name}={beta}: must be at least 0 and less than 1")
        if self.adam_eps <= 0:
            raise ConfigurationError(f"adam_eps={self.adam_eps}: must be greater than 0")


@chz.chz(typecheck=True)
class EpochConfig(EpochOptions, RunConfig):
    """A run over epochs of a dataset."""

    learning_rate: float = chz.field(default=1e-4, doc="peak learning rate", validator=chz.validators.gt(0))
    infrequent_eval_every: int = chz.field(
        default=100, doc="as eval_every, for infrequent_evaluator_builders", validator=chz.validators.ge(0)
    )
    evaluator_builders: list[EvaluatorBuilder] = chz.field(default_factory=list, doc="run with the test set")
    infrequent_evaluator_builders: list[EvaluatorBuilder] = chz.field(default_factory=list, doc="run less often")


def count_steps(config: EpochConfig, dataset: SupervisedDataset) -> int:
    """Steps of the whole run: those of all epochs, or max_steps where that is less.

    Raises ConfigurationError when there is none.
    """
    total = len(dataset) * config.num_epochs
    if config.max_steps is not None:
        if config.max_steps > total:
            logger.warning("max_steps=%d, but the data gives %d; raise num_epochs for more", config.max_steps, total)
        total = min(total, config.max_steps)
    if total < 1:
        raise ConfigurationError(f"nothing to train on: {len(dataset)} batches, max_steps={config.max_steps}")
    return total


def order_epoch(config: EpochConfig, dataset: SupervisedDataset, epoch: int) -> None:
    """Put the dataset in the order of an epoch, which depends on the run's seed and the epoch alone."""
    dataset.set_epoch(derive_seed(config.seed, "epoch", epoch))


def check_resumed(config: EpochConfig, dataset: SupervisedDataset, total: int) -> None:
    """A cursor means the same batch only in the same data; a longer run has another schedule than the one begun.

    Raises:
        ConfigurationError: the run in log_path began with another number of batches per epoch.
    """
    record = get_last_checkpoint(config.log_path)
    if record is None:
        return
    if (batches := record.get(BATCHES_KEY, len(dataset))) != len(dataset):
        raise ConfigurationError(
            f"log_path={config.log_path!r}: the run has {batches} batches per epoch, and the dataset now gives {len(dataset)}; "
            "resume it with the data and batch_size it began with, or start in another log_path"
        )
    if (steps := record.get(SCHEDULE_KEY, total)) != total and config.lr_schedule != "constant":
        logger.warning(
            "the run began with a %s schedule over %d steps and goes on with one over %d: the steps that are done keep their "
            "learning rates, so the result is not that of a run of %d steps from the start",
            config.lr_schedule,
            steps,
            total,
            total,
        )


def data_state(dataset: SupervisedDataset, total: int) -> dict[str, Any]:
    """What each checkpoint says of the data and the schedule, for `check_resumed`."""
    return {BATCHES_KEY: len(dataset), SCHEDULE_KEY: total}


def evaluation_rounds(config: EpochConfig, *more: EvaluatorBuilder) -> EvaluationRounds:
    """The config's evaluators at their two frequencies; `more` are run with the frequent ones."""
    return EvaluationRounds.build(
        [*config.evaluator_builders, *more],
        config.eval_every,
        config.infrequent_evaluator_builders,
        config.infrequent_eval_every,
    )


def adam_params(config: EpochConfig, step: int, total: int) -> tinker.AdamParams:
    """Adam with the learning rate of `step` (0-based) of `total`."""
    return tinker.AdamParams(
        learning_rate=config.learning_rate * compute_schedule_lr_multiplier(config.lr_schedule, step, total),
        beta1=config.adam_beta1,
        beta2=config.adam_beta2,
        eps=config.adam_eps,
    )


def progress_metrics(step: int, total: int) -> dict[str, float | int]:
    """Where the run is in the row of `step`; `total` stands for the row after the last one.

    `progress/batch` and `progress/done_frac` (the share that is done with this step) are what every loop logs, `progress` (the
    share before it) what the learning rate's schedule goes by.
    """
    return {
        "progress/batch": step,
        "progress/done_frac": min(1.0, (step + 1) / total),
        "progress": step / total,
    }


def cursor(step: int, dataset: SupervisedDataset) -> dict[str, int]:
    """Where the next batch stands when `step` steps are done, as checkpoints record it."""
    epoch, batch = divmod(step, len(dataset))
    return {"epoch": epoch, "batch": batch}
