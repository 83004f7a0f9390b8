"""Direct preference optimization: raise the chosen reply over the rejected one, relative to a frozen reference policy.

    for each batch of pairs:
        reference logprobs of both replies                        (a sampling client that never changes)
        forward_backward_custom with the DPO loss + optim_step, submitted together

The reference is the policy that the run started from, or a named one. Its path is in every checkpoint record, and a resumed
run takes it from there. The loss itself is in dpo.py, the pairs come from dpo_datasets.py.

Reference logprobs are not fetched ahead: while a batch trains nothing else is computed, so that a resumed run repeats an
uninterrupted one to the last bit.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import Any

import chz

from tinker_cookbook import backends, model_info
from tinker_cookbook.clients import SamplingClient
from tinker_cookbook.eval.run import EvaluationRounds, run_evaluators
from tinker_cookbook.preference.dpo import (
    DPOEvaluator,
    LossType,
    check_pairs,
    compute_dpo_loss,
    compute_reference_logprobs,
    dpo_loss_fn,
)
from tinker_cookbook.runs.reference import KLReferenceConfig, open_reference
from tinker_cookbook.runs.session import Session, open_session
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
from tinker_cookbook.supervised.types import SupervisedDataset, SupervisedDatasetBuilder
from tinker_cookbook.utils.lazy import tinker
from tinker_cookbook.utils.misc_utils import timed

__all__ = ["Config", "LossType", "check_config", "compute_dpo_loss", "main", "main_async"]

logger = logging.getLogger(__name__)

Metrics = dict[str, float | int | str]

CHECKED_BATCHES = 64
"""Training batches that are rendered before anything is loaded; those beyond are checked when their turn comes."""


@chz.chz(typecheck=True)
class DPOOptions(EpochOptions):
    """Settings of the DPO loop."""

    dpo_beta: float = chz.field(
        default=0.1, doc="how much a log-ratio counts; small: far from the reference", validator=chz.validators.gt(0)
    )
    loss_type: LossType = chz.field(
        default="dpo", doc="dpo, ipo, or dpo_norm (log-ratios per token): see compute_dpo_loss"
    )
    reference: KLReferenceConfig | None = chz.field(
        default=None, doc="reference policy (of the same tokenizer); None: the weights that the run starts from"
    )


@chz.chz(typecheck=True)
class Config(DPOOptions, EpochConfig):
    """A DPO run."""

    dataset_builder: SupervisedDatasetBuilder = chz.field(
        doc="makes batches of pairs, chosen and rejected in turn (DPODatasetBuilderFromComparisons)"
    )
    learning_rate: float = chz.field(default=1e-5, doc="peak learning rate", validator=chz.validators.gt(0))


def check_config(config: Config) -> tuple[SupervisedDataset, SupervisedDataset | None, int]:
    """Everything that can be wrong without loading a model: (training pairs, test pairs, number of steps).

    The first training batches are rendered, and all test pairs.

    Raises:
        ConfigurationError: backend, model, reference, or nothing to train on.
        DataError, RendererError: a comparison that cannot be used; the message says where it stands.
    """
    backends.check_backend(config.backend, config.model_name, config.base_url)
    if config.reference is not None:
        config.reference.check("reference", config.backend, config.base_url)
    dataset, test_dataset = config.dataset_builder()
    total = count_steps(config, dataset)
    order_epoch(config, dataset, epoch=0)
    for batch in range(min(len(dataset), CHECKED_BATCHES)):
        get_pairs(config, dataset, batch)
    for batch in range(len(test_dataset) if test_dataset is not None else 0):
        get_pairs(config, test_dataset, batch)  # pyright: ignore[reportArgumentType]
    return dataset, test_dataset, total


def get_pairs(config: Config, dataset: SupervisedDataset, batch: int) -> list[tinker.Datum]:
    """A batch of the current epoch, checked: pairs that fit the model's context."""
    data = dataset.get_batch(batch)
    check_pairs(data, f"batch {batch}", model_info.get_context_length(config.model_name))
    return data


def main(config: Config) -> None:
    """Run or resume, from outside an event loop."""
    asyncio.run(main_async(config))


async def main_async(config: Config) -> None:
    """Run or resume: the whole life of a DPO run."""
    dataset, test_dataset, total = check_config(config)
    check_resumed(config, dataset, total)
    async with open_session(config, {"reference": config.reference}) as session:
        start = session.start_step(len(dataset))
        session.rewind(start, total)
        if session.is_complete(start, total):
            return
        session.checkpoints.loop_state |= data_state(dataset, total)
        reference = await open_reference(session, config.reference)
        more = []
        if test_dataset is not None:
            more.append(partial(DPOEvaluator, test_dataset, reference, config.dpo_beta, config.loss_type))
        rounds = evaluation_rounds(config, *more)
        await _train(config, session, reference, dataset, rounds, start, total)


async def _train(
    config: Config,
    session: Session,
    reference: SamplingClient,
    dataset: SupervisedDataset,
    rounds: EvaluationRounds,
    start: int,
    total: int,
) -> None:
    ordered_epoch = None
    for step in range(start, total):
        epoch, batch = divmod(step, len(dataset))
        if epoch != ordered_epoch:
            order_epoch(config, dataset, epoch)
            ordered_epoch = epoch
        metrics: Metrics = {"epoch": epoch, **progress_metrics(step, total)}
        with timed("total", metrics):
            if due := rounds.due(step):
                with timed("evals", metrics):
                    metrics |= await run_evaluators(due, session.training_client)
            try:
                with timed("get_batch", metrics):
                    data = get_pairs(config, dataset, batch)
            except Exception:
                if step > start:
                    await session.checkpoints.save_stopped(step, cursor(step, dataset))
                raise
            with timed("get_ref_logprobs", metrics):
                reference_logprobs = await compute_reference_logprobs(reference, data)
            with timed("step", metrics):
                await do_update(config, session, data, reference_logprobs, step, total, metrics)
        session.run.logger.log_metrics(metrics, step=step)
        tokens = sum(datum.model_input.length for datum in data)
        # What stands at the end is saved as final.
        if step + 1 < total:
            await session.checkpoints.maybe_save(step + 1, cursor(step + 1, dataset), tokens)
        else:
            session.checkpoints.tokens += tokens
    if last := rounds.at_end():
        metrics = {**progress_metrics(total, total)}
        with timed("total", metrics), timed("evals", metrics):
            metrics |= await run_evaluators(last, session.training_client)
        session.run.logger.log_metrics(metrics, step=total)
    await session.checkpoints.save_final(cursor(total, dataset))


async def do_update(
    config: Config,
    session: Session,
    data: list[tinker.Datum],
    reference_logprobs: list[Any],
    step: int,
    total: int,
    metrics: Metrics,
) -> None:
    """One optimizer step on the pairs in `data`; adds its metrics."""
    adam = adam_params(config, step, total)
    loss_fn = dpo_loss_fn(reference_logprobs, config.dpo_beta, config.loss_type)
    forward_backward = session.training_client.forward_backward_custom(data, loss_fn)
    optim_step = session.training_client.optim_step(adam)
    output = await forward_backward
    optim = await optim_step
    names = ("dpo_loss", "accuracy", "margin", "chosen_reward", "rejected_reward")
    metrics |= {
        "optim/lr": adam.learning_rate,
        "learning_rate": adam.learning_rate,
        "num_pairs": len(data) // 2,
        "num_tokens": sum(datum.model_input.length for datum in data),
        "num_loss_tokens": sum(int(datum.loss_fn_inputs["weights"].to_numpy().sum()) for datum in data),
        **{name: output.metrics[name] for name in names},
        **{f"optim/{key}": value for key, value in (optim.metrics or {}).items()},
    }
