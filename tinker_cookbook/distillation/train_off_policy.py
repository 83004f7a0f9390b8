"""Off-policy distillation: the student learns a teacher's probabilities on given conversations.

Each step: a batch of examples from all datasets, the teacher's `n_teacher_targets` likeliest tokens at every position, one
cross-entropy step on those as (N, K) targets. While the engine trains, the teacher reads the next batch. It is asked for
`teacher_concurrency` sequences at a time and for the next ones only when all have answered, so that which sequences
share a pass, and with it the last bit of a probability, is the same in a resumed run.

Left out: a learning-rate schedule, and what the teacher thinks of anything but its likeliest tokens (see `targets`).
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import chz

from tinker_cookbook import backends, model_info
from tinker_cookbook.clients import SamplingClient, TrainingClient
from tinker_cookbook.distillation.mixture import Example, SupervisedMixture
from tinker_cookbook.distillation.scored import ScoredBatch, TeacherKLEvaluator, score_examples
from tinker_cookbook.distillation.teachers import TeacherConfig, check_teachers, open_teachers
from tinker_cookbook.eval.evaluators import EvaluatorBuilder
from tinker_cookbook.eval.run import EvaluationRounds, run_evaluators
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.runs.checkpoints import get_last_checkpoint
from tinker_cookbook.runs.config import RunConfig, RunOptions
from tinker_cookbook.runs.session import Session, open_session
from tinker_cookbook.supervised.types import SupervisedDataset, SupervisedDatasetBuilder
from tinker_cookbook.tokenizer_utils import get_tokenizer
from tinker_cookbook.utils.lazy import tinker
from tinker_cookbook.utils.misc_utils import gather_all, timed

if TYPE_CHECKING:
    from tinker.types import OptimStepResponse

logger = logging.getLogger(__name__)

Metrics = dict[str, float | int | str]

CHECKED_BATCHES = 100
"""Batches of each dataset rendered before a model is loaded. A dataset of that size is thereby checked whole."""
MIXTURE_KEY = "mixture"


@chz.chz(typecheck=True)
class DatasetWithTeacher:
    """Conversations and who is asked about them."""

    dataset_builder: SupervisedDatasetBuilder = chz.field(doc="makes the conversations; its batch size does not matter")
    teacher_config: TeacherConfig = chz.field(doc="the teacher of these conversations")
    weight: float = chz.field(
        default=1.0, doc="share of each batch, relative to the other datasets", validator=chz.validators.gt(0)
    )


@chz.chz(typecheck=True)
class OffPolicyOptions(RunOptions):
    """Settings of the off-policy distillation loop."""

    n_teacher_targets: int = chz.field(
        default=20, doc="the teacher's likeliest tokens per position that are learnt", validator=chz.validators.gt(0)
    )
    teacher_concurrency: int = chz.field(
        default=64, doc="sequences that the teachers are asked about at a time", validator=chz.validators.gt(0)
    )
    batch_size: int = chz.field(default=64, doc="rows per step", validator=chz.validators.gt(0))
    num_epochs: int = chz.field(
        default=1,
        doc="times that the dataset which takes longest is gone through; the others begin again meanwhile",
        validator=chz.validators.gt(0),
    )
    grad_clip_norm: float = chz.field(
        default=0.0, doc="bound on the gradient norm; 0: none", validator=chz.validators.ge(0)
    )
    save_every: int = chz.field(
        default=10, doc="save a checkpoint after every n-th batch; 0: not by batches", validator=chz.validators.ge(0)
    )


@chz.chz(typecheck=True)
class Config(OffPolicyOptions, RunConfig):
    """An off-policy distillation run."""

    learning_rate: float = chz.field(doc="Adam's learning rate, constant over the run", validator=chz.validators.gt(0))
    dataset_configs: list[DatasetWithTeacher] = chz.field(doc="what is learnt, and from whom")
    evaluator_builders: list[EvaluatorBuilder] = chz.field(
        default_factory=list, doc="run with the KL to the teacher on the test sets"
    )


@dataclass(frozen=True)
class _Plan:
    """A checked config's data."""

    mixture: SupervisedMixture
    test: list[Example]
    end: int


def check_config(config: Config) -> _Plan:
    """Everything that can be wrong without loading a model. The first batches are rendered, and the whole test sets.

    Raises ConfigurationError naming field, value and mend; the errors of the dataset builders.
    """
    backends.check_backend(config.backend, config.model_name, config.base_url)
    if not config.dataset_configs:
        raise ConfigurationError("dataset_configs is empty: give at least one dataset with its teacher")
    check_teachers(_teachers(config), config.model_name, config.backend, config.base_url)
    vocabulary = len(get_tokenizer(config.model_name))
    if config.n_teacher_targets > vocabulary:
        raise ConfigurationError(
            f"n_teacher_targets={config.n_teacher_targets} is more than the {vocabulary} tokens of the vocabulary; lower it"
        )
    built = [dataset_config.dataset_builder() for dataset_config in config.dataset_configs]
    datasets = [dataset for dataset, _ in built]
    test: list[Example] = []
    for d, (dataset, test_dataset) in enumerate(built):
        room = _context(config, d)
        _check_data(d, dataset, room, CHECKED_BATCHES)
        if test_dataset is not None:
            test.extend((d, datum) for datum in _check_data(d, test_dataset, room, len(test_dataset)))
    weights = [dataset_config.weight for dataset_config in config.dataset_configs]
    mixture = SupervisedMixture(datasets, weights, config.batch_size, config.seed)
    end = mixture.steps_per_epoch * config.num_epochs
    if config.max_steps is not None:
        if config.max_steps > end:
            logger.warning("max_steps=%d, but the data gives %d; raise num_epochs for more", config.max_steps, end)
        end = min(end, config.max_steps)
    if end < 1:
        raise ConfigurationError(f"max_steps={config.max_steps}: nothing to train; give at least 1")
    return _Plan(mixture, test, end)


def _teachers(config: Config) -> dict[str, TeacherConfig]:
    configs = enumerate(config.dataset_configs)
    return {f"dataset_configs[{d}].teacher_config": dataset_config.teacher_config for d, dataset_config in configs}


def _context(config: Config, d: int) -> int | None:
    """The shorter context of the student's and dataset `d`'s teacher's; None when neither is known."""
    names = (config.model_name, config.dataset_configs[d].teacher_config.base_model)
    known = [length for name in names if (length := model_info.get_context_length(name)) is not None]
    return min(known, default=None)


def _check_data(d: int, dataset: SupervisedDataset, context: int | None, batches: int) -> list[tinker.Datum]:
    """The datums of a dataset's first batches. Raises ConfigurationError for one that a teacher could not be asked about."""
    data = [datum for index in range(min(batches, len(dataset))) for datum in dataset.get_batch(index)]
    for datum in data:
        for chunk in datum.model_input.chunks:
            if not isinstance(chunk, tinker.EncodedTextChunk):
                raise ConfigurationError(
                    f"dataset_configs[{d}] has an example with a {chunk.type} chunk; off-policy distillation takes text only"
                )
        length = datum.model_input.length + 1
        if context is not None and length + 1 > context:
            raise ConfigurationError(
                f"dataset_configs[{d}] has an example of {length} tokens; with the one that the teacher must sample it does "
                f"not fit in the context of {context}. Set max_length to at most {context - 1}"
            )
    return data


def _check_resumed(config: Config, mixture: SupervisedMixture) -> None:
    """A cursor means the same batch only in the same data."""
    record = get_last_checkpoint(config.log_path)
    if record is not None and record.get(MIXTURE_KEY) != mixture.layout:
        raise ConfigurationError(
            f"log_path={config.log_path!r}: the run began with {record.get(MIXTURE_KEY)} per dataset and now has "
            f"{mixture.layout}; resume it with the data, weights and batch_size it began with, or start in another log_path"
        )


async def main(config: Config) -> None:
    """Run or resume: the whole life of an off-policy distillation run."""
    plan = check_config(config)
    _check_resumed(config, plan.mixture)
    async with open_session(config, _teachers(config)) as session:
        start = session.start_step()
        session.rewind(start, plan.end)
        if session.is_complete(start, plan.end):
            return
        session.checkpoints.loop_state[MIXTURE_KEY] = plan.mixture.layout
        teachers = await open_teachers(session.service, _teachers(config))
        await _train(config, session, plan, teachers, start)


async def _train(config: Config, session: Session, plan: _Plan, teachers: Sequence[SamplingClient], start: int) -> None:
    async def ask(examples: Sequence[Example]) -> ScoredBatch:
        return await score_examples(teachers, examples, config.n_teacher_targets, config.teacher_concurrency)

    async def read_ahead(step: int, metrics: Metrics) -> ScoredBatch | None:
        if step == plan.end:
            return None
        with timed("teacher", metrics):
            return await ask(plan.mixture.get_batch(step))

    builders = list(config.evaluator_builders)
    if plan.test and config.eval_every > 0:
        builders.append(partial(TeacherKLEvaluator, await ask(plan.test), config.batch_size))
    rounds = EvaluationRounds.build(builders, config.eval_every)
    client, metrics_logger = session.training_client, session.run.logger
    batch = await read_ahead(start, {})
    for step in range(start, plan.end):
        assert batch is not None
        metrics: Metrics = {
            "progress/batch": step,
            "progress/done_frac": (step + 1) / plan.end,
            "optim/lr": config.learning_rate,
        }
        with timed("total", metrics):
            if due := rounds.due(step):
                with timed("evals", metrics):
                    metrics |= await run_evaluators(due, client)
            # Both calls are on their way before the teacher is asked about the next batch.
            submitted = _submit(config, client, batch)
            _, ahead = await gather_all([_finish(submitted, batch, metrics), read_ahead(step + 1, metrics)])
        metrics_logger.log_metrics(metrics, step=step)
        if step + 1 < plan.end:
            await session.checkpoints.maybe_save(step + 1, {"batch": step + 1}, batch.num_tokens)
        else:
            session.checkpoints.tokens += batch.num_tokens
        batch = ahead
    if last := rounds.at_end():
        final = await run_evaluators(last, client)
        metrics_logger.log_metrics({"progress/batch": plan.end, "progress/done_frac": 1.0, **final}, step=plan.end)
    await session.checkpoints.save_final({"batch": plan.end})


@dataclass(frozen=True)
class _Submitted:
    """A step on its way."""

    forward_backward: Awaitable[tinker.ForwardBackwardOutput]
    optim_step: Awaitable[OptimStepResponse]


def _submit(config: Config, client: TrainingClient, batch: ScoredBatch) -> _Submitted:
    adam = tinker.AdamParams(
        learning_rate=config.learning_rate, beta1=0.9, beta2=0.95, eps=1e-8, grad_clip_norm=config.grad_clip_norm
    )
    return _Submitted(client.forward_backward(batch.soft_data(), "cross_entropy"), client.optim_step(adam))


async def _finish(submitted: _Submitted, batch: ScoredBatch, metrics: Metrics) -> None:
    with timed("train", metrics):
        output = await submitted.forward_backward
        optim = await submitted.optim_step
    metrics |= {
        "train/num_sequences": len(batch.examples),
        "train/num_tokens": batch.num_tokens,
        "train/num_loss_tokens": batch.num_loss_tokens,
        **batch.metrics("train", [output]),
        **{f"optim/{key}": value for key, value in (optim.metrics or {}).items()},
    }
