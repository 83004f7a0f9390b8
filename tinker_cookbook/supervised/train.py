"""Supervised fine-tuning: batches of weighted tokens, cross-entropy, Adam with a schedule.

Up to `submit_ahead` batches are submitted before the oldest is awaited, so the engine never waits for us. Before an
evaluation or a checkpoint the pipeline is drained: what is measured or saved at step i has seen exactly i batches, and
their metrics are on disk.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Awaitable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import chz
from rich.console import Console

from tinker_cookbook import backends, model_info
from tinker_cookbook.clients import TrainingClient
from tinker_cookbook.display import example_text
from tinker_cookbook.eval.run import EvaluationRounds, run_evaluators
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.runs.session import Session, open_session
from tinker_cookbook.supervised.common import compute_mean_bpb, compute_mean_nll
from tinker_cookbook.supervised.epochs import (
    EpochConfig,
    EpochOptions,
    adam_params,
    check_resumed,
    count_steps,
    cursor,
    data_state,
    evaluation_rounds,
    order_epoch,
    progress_metrics,
)
from tinker_cookbook.supervised.evaluators import NLLEvaluator
from tinker_cookbook.supervised.types import ChatDatasetBuilder, SupervisedDataset, SupervisedDatasetBuilder
from tinker_cookbook.tokenizer_utils import Tokenizer
from tinker_cookbook.utils.lazy import tinker
from tinker_cookbook.utils.misc_utils import timed

if TYPE_CHECKING:
    from tinker.types import OptimStepResponse

logger = logging.getLogger(__name__)

Metrics = dict[str, float | int | str]

CHECKED_BATCHES = 100
"""Batches rendered before a model is loaded; those beyond are checked when their turn comes."""
SHOWN_TOKENS = 512


@chz.chz(typecheck=True)
class SupervisedOptions(EpochOptions):
    """Settings of the supervised loop."""

    submit_ahead: int = chz.field(
        default=1, doc="batches submitted before the oldest is awaited", validator=chz.validators.ge(0)
    )


@chz.chz(typecheck=True)
class Config(SupervisedOptions, EpochConfig):
    """A supervised run."""

    dataset_builder: SupervisedDatasetBuilder = chz.field(doc="makes the training and test batches")

    @chz.validate
    def _check(self) -> None:
        _check_renderer(self.renderer_name, self.dataset_builder)


def _check_renderer(name: str | None, builder: SupervisedDatasetBuilder) -> None:
    """What is recorded with the checkpoints is what made the data."""
    used = builder.common_config.renderer_name if isinstance(builder, ChatDatasetBuilder) else name
    if name is not None and used != name:
        raise ConfigurationError(
            f"renderer_name={name!r}, but the dataset is rendered by {used!r}; name the same one, or leave it out"
        )


@dataclass
class _Submitted:
    """A batch on its way."""

    step: int
    data: list[tinker.Datum]
    forward_backward: Awaitable[tinker.ForwardBackwardOutput]
    optim_step: Awaitable[OptimStepResponse]
    metrics: Metrics


def check_config(config: Config) -> tuple[SupervisedDataset, SupervisedDataset | None, int]:
    """Everything that can be wrong without loading a model. Returns training set, test set and number of steps.

    The first batches of training are rendered, and the whole test set: an example that cannot be used should not end the
    run at step 90.
    """
    backends.check_backend(config.backend, config.model_name, config.base_url)
    dataset, test_dataset = config.dataset_builder()
    total = count_steps(config, dataset)
    context = model_info.get_context_length(config.model_name)
    order_epoch(config, dataset, epoch=0)
    for index in range(min(len(dataset), CHECKED_BATCHES)):
        _check_lengths(dataset.get_batch(index), context, f"batch {index}")
    for index in range(len(test_dataset) if test_dataset is not None else 0):
        _check_lengths(test_dataset.get_batch(index), context, f"test batch {index}")  # pyright: ignore[reportOptionalMemberAccess]
    return dataset, test_dataset, total


def _check_lengths(data: list[tinker.Datum], context: int | None, where: str) -> None:
    if not data:
        raise ConfigurationError(f"{where} of the dataset is empty; a batch needs at least one datum")
    longest = max(datum.model_input.length for datum in data)
    if context is not None and longest > context:
        raise ConfigurationError(
            f"{where} has an example of {longest} tokens, but the model has a context of {context}; "
            f"set the dataset's max_length to {context} or less"
        )


async def main(config: Config) -> None:
    """Run or resume: the whole life of a supervised run."""
    dataset, test_dataset, total = check_config(config)
    check_resumed(config, dataset, total)
    rounds = evaluation_rounds(config, *([partial(NLLEvaluator, test_dataset)] if test_dataset is not None else []))
    async with open_session(config) as session:
        session.checkpoints.loop_state |= data_state(dataset, total)
        await _train(config, session, dataset, rounds, total)


async def _train(
    config: Config, session: Session, dataset: SupervisedDataset, rounds: EvaluationRounds, total: int
) -> None:
    run, client, checkpoints = session.run, session.training_client, session.checkpoints
    start = session.start_step(len(dataset))
    session.rewind(start, total)
    if session.is_complete(start, total):
        return
    clock, context = _Clock(), model_info.get_context_length(config.model_name)
    pending: deque[_Submitted] = deque()

    async def finish(limit: int) -> None:
        while len(pending) > limit:
            await _finish(session, pending.popleft(), clock)

    metrics: Metrics = {}
    ordered_epoch = None
    for step in range(start, total):
        epoch, batch = divmod(step, len(dataset))
        if epoch != ordered_epoch:
            order_epoch(config, dataset, epoch)
            ordered_epoch = epoch
        metrics |= {"epoch": epoch, **progress_metrics(step, total)}
        if due := rounds.due(step):
            await finish(0)
            with timed("evals", metrics):
                metrics |= await run_evaluators(due, client)
        try:
            with timed("get_batch", metrics):
                data = dataset.get_batch(batch)
                _check_lengths(data, context, f"batch {batch}")
        except Exception:
            await finish(0)
            if step > start:
                await checkpoints.save_stopped(step, cursor(step, dataset))
            raise
        if step == 0:
            _show_first(data[0], client.get_tokenizer())
        pending.append(_submit(config, client, step, data, total, metrics))
        metrics = {}
        checkpoints.tokens += _num_tokens(data)
        # Asked once: what is due by the clock must not become due between waiting for the batches and saving.
        if step + 1 < total and checkpoints.should_save(step + 1):
            await finish(0)
            with timed("save_checkpoint", metrics):
                await checkpoints.maybe_save(step + 1, cursor(step + 1, dataset))
        else:
            await finish(config.submit_ahead)
    await finish(0)
    if last := rounds.at_end():
        with timed("evals", metrics):
            metrics |= {**progress_metrics(total, total), **await run_evaluators(last, client)}
        metrics["time/total"] = clock.lap()
        run.logger.log_metrics(metrics, step=total)
    await checkpoints.save_final(cursor(total, dataset))


class _Clock:
    """Seconds from one row of metrics to the next, so that they add up to the run's."""

    def __init__(self) -> None:
        self._last = time.perf_counter()

    def lap(self) -> float:
        now = time.perf_counter()
        elapsed, self._last = now - self._last, now
        return elapsed


def _num_tokens(data: list[tinker.Datum]) -> int:
    return sum(datum.model_input.length for datum in data)


def _show_first(datum: tinker.Datum, tokenizer: Tokenizer) -> None:
    """The first example on the terminal: a wrong renderer or a wrong selection is seen at once."""
    console = Console(soft_wrap=True, highlight=False)
    console.print("The first example (green: trained, yellow: not trained)", style="bold")
    console.print(example_text(datum, tokenizer, max_tokens=SHOWN_TOKENS))


def _submit(
    config: Config, client: TrainingClient, step: int, data: list[tinker.Datum], total: int, metrics: Metrics
) -> _Submitted:
    adam = adam_params(config, step, total)
    metrics["optim/lr"] = metrics["learning_rate"] = adam.learning_rate
    forward_backward = client.forward_backward(data, "cross_entropy")
    return _Submitted(step, data, forward_backward, client.optim_step(adam), metrics)


async def _finish(session: Session, batch: _Submitted, clock: _Clock) -> None:
    metrics = batch.metrics
    with timed("step", metrics):
        output = await batch.forward_backward
        optim = await batch.optim_step
    logprobs = [fields["logprobs"] for fields in output.loss_fn_outputs]
    weights = [datum.loss_fn_inputs["weights"] for datum in batch.data]
    targets = [datum.loss_fn_inputs["target_tokens"] for datum in batch.data]
    tokenizer = session.training_client.get_tokenizer()
    metrics |= {
        "num_sequences": len(batch.data),
        "num_tokens": _num_tokens(batch.data),
        "num_loss_tokens": sum(int((weight.to_numpy() != 0).sum()) for weight in weights),
        "train_mean_nll": compute_mean_nll(logprobs, weights),
        "train_mean_bpb": compute_mean_bpb(logprobs, weights, targets, tokenizer),
        **{f"optim/{key}": value for key, value in (optim.metrics or {}).items()},
        "time/total": clock.lap(),
    }
    session.run.logger.log_metrics(metrics, step=batch.step)
