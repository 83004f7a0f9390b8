"""Supervised fine-tuning: batches of weighted tokens, cross-entropy, Adam with a schedule.

Batch i + 1 is submitted before batch i is awaited, so the engine never waits for us. Before an evaluation or a checkpoint
the pipeline is drained: what is measured or saved at step i has seen exactly i batches.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import chz
import tinker
from tinker.types import OptimStepResponse

from tinker_cookbook import backends
from tinker_cookbook.checkpoint_utils import save_checkpoint
from tinker_cookbook.clients import TrainingClient
from tinker_cookbook.completers import derive_seed
from tinker_cookbook.eval.evaluators import Evaluator, EvaluatorBuilder, TrainingClientEvaluator
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.runs.bootstrap import Run, open_run
from tinker_cookbook.runs.resume import open_training_client
from tinker_cookbook.supervised.common import compute_mean_bpb, compute_mean_nll
from tinker_cookbook.supervised.evaluators import NLLEvaluator
from tinker_cookbook.supervised.types import SupervisedDataset, SupervisedDatasetBuilder
from tinker_cookbook.utils.lr_scheduling import compute_schedule_lr_multiplier
from tinker_cookbook.utils.misc_utils import timed

logger = logging.getLogger(__name__)

Metrics = dict[str, float | int | str]


@chz.chz(typecheck=True)
class Config:
    """A supervised run."""

    log_path: str = chz.field(doc="folder of the run")
    model_name: str = chz.field(doc="base model: a directory or a hub id")
    recipe_name: str = chz.field(doc="name of the recipe, for metadata")
    dataset_builder: SupervisedDatasetBuilder = chz.field(doc="makes the training and test batches")
    backend: str | None = chz.field(default=None, doc="local or tinker; None: TINKER_BACKEND, else local")
    base_url: str | None = chz.field(default=None, doc="another server that speaks the Tinker protocol")
    load_checkpoint_path: str | None = chz.field(default=None, doc="start from these weights (tinker://...)")
    learning_rate: float = chz.field(default=1e-4, doc="peak learning rate", validator=chz.validators.gt(0))
    lr_schedule: Literal["linear", "cosine", "constant"] = chz.field(default="linear", doc="how it falls over the run")
    num_epochs: int = chz.field(default=1, doc="passes over the data", validator=chz.validators.gt(0))
    max_steps: int | None = chz.field(default=None, doc="stop after this many batches")
    lora_rank: int = chz.field(default=32, doc="rank of the adapter", validator=chz.validators.gt(0))
    seed: int = chz.field(default=0, doc="seed of adapter and order")
    eval_every: int = chz.field(default=10, doc="evaluate before every n-th batch and at the end; 0 means never")
    save_every: int = chz.field(default=20, doc="save a checkpoint after every n-th batch; 0 means only at the end")
    evaluator_builders: list[EvaluatorBuilder] = chz.field(default_factory=list, doc="run with the test set's NLL")
    ttl_seconds: int | None = chz.field(default=604800, doc="life of periodic checkpoints; None keeps them")
    adam_beta1: float = chz.field(default=0.9, doc="Adam's beta1")
    adam_beta2: float = chz.field(default=0.95, doc="Adam's beta2")
    adam_eps: float = chz.field(default=1e-8, doc="Adam's epsilon")
    submit_ahead: int = chz.field(
        default=1, doc="batches submitted before the oldest is awaited", validator=chz.validators.ge(0)
    )
    wandb_project: str | None = chz.field(default=None, doc="log to this Weights & Biases project")
    wandb_name: str | None = chz.field(default=None, doc="name of the W&B run")


@dataclass
class _Submitted:
    """A batch on its way."""

    step: int
    data: list[tinker.Datum]
    forward_backward: Awaitable[tinker.ForwardBackwardOutput]
    optim_step: Awaitable[OptimStepResponse]
    metrics: Metrics


def check_config(config: Config) -> tuple[SupervisedDataset, SupervisedDataset | None, int]:
    """Everything that can be wrong without loading a model. Returns training set, test set and number of steps."""
    backends.check_backend(config.backend, config.model_name, config.base_url)
    dataset, test_dataset = config.dataset_builder()
    total = len(dataset) * config.num_epochs
    if config.max_steps is not None and config.max_steps > total:
        logger.warning("max_steps=%d, but the data gives %d; raise num_epochs for more", config.max_steps, total)
    total = total if config.max_steps is None else min(total, config.max_steps)
    if total < 1:
        raise ConfigurationError(f"nothing to train on: {len(dataset)} batches, max_steps={config.max_steps}")
    # Every example is rendered once before any weight is loaded: one that cannot be used must not end the run at step 900.
    for part in (dataset, test_dataset):
        for index in range(len(part) if part is not None else 0):
            part.get_batch(index)  # pyright: ignore[reportOptionalMemberAccess]
    return dataset, test_dataset, total


async def main(config: Config) -> None:
    """Run or resume: the whole life of a supervised run."""
    dataset, test_dataset, total = check_config(config)
    with open_run(
        config.log_path,
        config=config,
        recipe_name=config.recipe_name,
        wandb_project=config.wandb_project,
        wandb_name=config.wandb_name,
    ) as run:
        service = backends.create_service_client(config.backend, config.base_url)
        client, record = await open_training_client(
            run, service, config.model_name, config.lora_rank, config.seed, config.load_checkpoint_path
        )
        start = (record.epoch or 0) * len(dataset) + record.batch if record is not None else 0
        if start < total:
            run.rewind_metrics(start)
        evaluators: list[Evaluator] = [build() for build in config.evaluator_builders]
        if test_dataset is not None:
            evaluators.append(NLLEvaluator(test_dataset))
        await _train(config, run, client, dataset, evaluators, start, total)


async def _train(
    config: Config,
    run: Run,
    client: TrainingClient,
    dataset: SupervisedDataset,
    evaluators: Sequence[Evaluator],
    start: int,
    total: int,
) -> None:
    pending: deque[_Submitted] = deque()

    async def finish(limit: int) -> None:
        while len(pending) > limit:
            await _finish(run, client, pending.popleft())

    ordered_epoch = None
    for step in range(start, total):
        epoch, batch = divmod(step, len(dataset))
        if epoch != ordered_epoch:
            dataset.set_epoch(derive_seed(config.seed, "epoch", epoch))
            ordered_epoch = epoch
        metrics: Metrics = {"epoch": epoch, "progress": step / total}
        if config.eval_every > 0 and step % config.eval_every == 0:
            await finish(0)
            with timed("evals", metrics):
                metrics |= await run_evaluators(evaluators, client)
        with timed("get_batch", metrics):
            data = dataset.get_batch(batch)
        pending.append(_submit(config, client, step, data, total, metrics))
        await finish(config.submit_ahead)
        if config.save_every > 0 and (step + 1) % config.save_every == 0 and step + 1 < total:
            await finish(0)
            cursor = _cursor(step + 1, dataset)
            await save_checkpoint(client, f"{step + 1:06d}", run.log_path, cursor, "both", config.ttl_seconds)
    await finish(0)
    if start >= total:
        logger.info("nothing left to do: the run had reached step %d of %d", start, total)
        return
    if config.eval_every > 0 and evaluators:
        run.logger.log_metrics({"progress": 1.0, **await run_evaluators(evaluators, client)}, step=total)
    await save_checkpoint(client, "final", run.log_path, {**_cursor(total, dataset), "final": True}, "both")


def _cursor(step: int, dataset: SupervisedDataset) -> dict[str, Any]:
    """Where the next batch stands, as checkpoints record it."""
    epoch, batch = divmod(step, len(dataset))
    return {"epoch": epoch, "batch": batch}


def _submit(
    config: Config, client: TrainingClient, step: int, data: list[tinker.Datum], total: int, metrics: Metrics
) -> _Submitted:
    learning_rate = config.learning_rate * compute_schedule_lr_multiplier(config.lr_schedule, step, total)
    metrics["learning_rate"] = learning_rate
    adam = tinker.AdamParams(
        learning_rate=learning_rate, beta1=config.adam_beta1, beta2=config.adam_beta2, eps=config.adam_eps
    )
    forward_backward = client.forward_backward(data, "cross_entropy")
    return _Submitted(step, data, forward_backward, client.optim_step(adam), metrics)


async def _finish(run: Run, client: TrainingClient, batch: _Submitted) -> None:
    metrics = batch.metrics
    with timed("step", metrics):
        output = await batch.forward_backward
        optim = await batch.optim_step
    logprobs = [fields["logprobs"] for fields in output.loss_fn_outputs]
    weights = [datum.loss_fn_inputs["weights"] for datum in batch.data]
    targets = [datum.loss_fn_inputs["target_tokens"] for datum in batch.data]
    metrics |= {
        "num_sequences": len(batch.data),
        "num_tokens": sum(datum.model_input.length for datum in batch.data),
        "num_loss_tokens": sum(int((weight.to_numpy() != 0).sum()) for weight in weights),
        "train_mean_nll": compute_mean_nll(logprobs, weights),
        "train_mean_bpb": compute_mean_bpb(logprobs, weights, targets, client.get_tokenizer()),
        **{f"optim/{key}": value for key, value in (optim.metrics or {}).items()},
    }
    run.logger.log_metrics(metrics, step=batch.step)


async def run_evaluators(evaluators: Sequence[Evaluator], client: TrainingClient) -> dict[str, float]:
    """All evaluators at the client's current weights; those that sample share one snapshot."""
    metrics: dict[str, float] = {}
    snapshot = None
    for evaluator in evaluators:
        if isinstance(evaluator, TrainingClientEvaluator):
            metrics |= await evaluator(client)
        else:
            snapshot = snapshot or await client.save_weights_and_get_sampling_client()
            metrics |= await evaluator(snapshot)
    return metrics
