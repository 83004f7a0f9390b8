"""Reinforcement learning, synchronous and on-policy: sample a batch of groups, turn rewards into advantages, take one step.

    for each batch:
        rollouts of all groups with the current snapshot          (rollouts.py)
        rewards -> advantages within each group                   (data_processing.py)
        trajectories -> datums                                    (data_processing.py)
        forward_backward + optim_step, submitted together
        a new frozen snapshot for the next batch

Everything is seeded from `config.seed`: the same config on the same machine gives the same metrics.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Literal

import chz
import tinker
import torch

from tinker_cookbook import backends
from tinker_cookbook.checkpoint_utils import save_checkpoint
from tinker_cookbook.clients import SamplingClient, TrainingClient
from tinker_cookbook.completers import TinkerTokenCompleter, derive_seed
from tinker_cookbook.eval.evaluators import SamplingClientEvaluator, SamplingClientEvaluatorBuilder
from tinker_cookbook.exceptions import ConfigurationError, TrainingError, ZeroAdvantageError
from tinker_cookbook.rl.data_processing import (
    AdvantageConfig,
    assemble_training_data,
    check_advantages,
    compute_advantages,
)
from tinker_cookbook.rl.metric_util import RLTestSetEvaluator, compute_trajectory_metrics
from tinker_cookbook.rl.metrics import compute_kl_sample_train
from tinker_cookbook.rl.records import group_records, training_step_record
from tinker_cookbook.rl.rollouts import do_batch_rollout
from tinker_cookbook.rl.types import RLDataset, RLDatasetBuilder, TrajectoryGroup
from tinker_cookbook.runs.bootstrap import Run, open_run
from tinker_cookbook.runs.resume import open_training_client
from tinker_cookbook.utils.misc_utils import split_list, timed

logger = logging.getLogger(__name__)

ZeroAdvantages = Literal["raise", "skip"]
LOSS_FNS = ("importance_sampling", "ppo")
ADAM_BETA1, ADAM_BETA2, ADAM_EPS = 0.9, 0.95, 1e-8


@chz.chz(typecheck=True)
class Config:
    """A reinforcement learning run."""

    learning_rate: float = chz.field(doc="Adam's learning rate, constant over the run", validator=chz.validators.gt(0))
    dataset_builder: RLDatasetBuilder = chz.field(doc="makes the training groups and, if it has any, the test groups")
    model_name: str = chz.field(doc="base model: a directory or a hub id")
    recipe_name: str = chz.field(doc="name of the recipe, for metadata")
    max_tokens: int = chz.field(doc="longest completion of one turn", validator=chz.validators.gt(0))
    log_path: str = chz.field(doc="folder of the run")
    backend: str | None = chz.field(default=None, doc="local or tinker; None: TINKER_BACKEND, else local")
    base_url: str | None = chz.field(default=None, doc="another server that speaks the Tinker protocol")
    lora_rank: int = chz.field(default=32, doc="rank of the adapter", validator=chz.validators.gt(0))
    temperature: float = chz.field(default=1.0, doc="sampling temperature", validator=chz.validators.gt(0))
    loss_fn: str = chz.field(default="importance_sampling", doc=" or ".join(LOSS_FNS))
    loss_fn_config: dict[str, float] | None = chz.field(
        default=None,
        doc="settings of the loss; `temperature` makes the trainer score at the sampling temperature (local)",
    )
    advantage: AdvantageConfig = chz.field(default_factory=AdvantageConfig, doc="how rewards become advantages")
    on_zero_advantages: ZeroAdvantages = chz.field(
        default="raise", doc="what to do with a batch in which no advantage differs from zero"
    )
    num_substeps: int = chz.field(
        default=1, doc="optimizer steps per batch, each on a share of the datums", validator=chz.validators.gt(0)
    )
    grad_clip_norm: float = chz.field(default=0.0, doc="bound on the gradient norm; 0 means none")
    seed: int = chz.field(default=0, doc="seed of adapter, sampling and evaluation")
    max_steps: int | None = chz.field(default=None, doc="stop after this many batches")
    eval_every: int = chz.field(default=20, doc="evaluate before every n-th batch and at the end; 0 means never")
    save_every: int = chz.field(default=20, doc="save a checkpoint after every n-th batch; 0 means only at the end")
    evaluator_builders: list[SamplingClientEvaluatorBuilder] = chz.field(
        default_factory=list, doc="further evaluators, run with the test set"
    )
    load_checkpoint_path: str | None = chz.field(default=None, doc="start from these weights (tinker://...)")
    ttl_seconds: int | None = chz.field(default=604800, doc="life of periodic checkpoints; None keeps them")
    wandb_project: str | None = chz.field(default=None, doc="log to this Weights & Biases project")
    wandb_name: str | None = chz.field(default=None, doc="name of the W&B run")
    write_records: bool = chz.field(
        default=True, doc="write each group's and each step's tokens, logprobs and advantages"
    )


def check_config(config: Config) -> None:
    """Everything that can be wrong without loading a model. Raises ConfigurationError naming the mend."""
    backend = backends.check_backend(config.backend, config.model_name, config.base_url)
    if config.loss_fn not in LOSS_FNS:
        raise ConfigurationError(f"loss_fn={config.loss_fn!r} is unknown; use {' or '.join(LOSS_FNS)}")
    trainer_temperature = (config.loss_fn_config or {}).get("temperature", 1.0)
    if trainer_temperature != config.temperature:
        mend = (
            f"set loss_fn_config={{'temperature': {config.temperature}}}"
            if backend == "local"
            else "the hosted trainer scores at temperature 1: set temperature=1.0"
        )
        raise ConfigurationError(
            f"temperature={config.temperature} samples on another distribution than "
            f"loss_fn_config temperature={trainer_temperature} scores on, which biases every ratio; {mend}"
        )
    if backend == "tinker" and "temperature" in (config.loss_fn_config or {}):
        raise ConfigurationError("loss_fn_config has `temperature`, which only the local engine knows; remove it")


async def main(config: Config) -> None:
    """Run or resume: the whole life of a training run."""
    check_config(config)
    dataset, test_dataset = await config.dataset_builder()
    num_batches = len(dataset) if config.max_steps is None else min(config.max_steps, len(dataset))
    if num_batches < 1:
        raise ConfigurationError(f"nothing to train on: {len(dataset)} batches, max_steps={config.max_steps}")
    with open_run(
        config.log_path,
        config=config,
        recipe_name=config.recipe_name,
        wandb_project=config.wandb_project,
        wandb_name=config.wandb_name,
    ) as run:
        service = backends.create_service_client(config.backend, config.base_url)
        training_client, record = await open_training_client(
            run, service, config.model_name, config.lora_rank, config.seed, config.load_checkpoint_path
        )
        start = record.batch if record is not None else 0
        if start < num_batches:
            run.rewind_metrics(start)
        evaluators = [build() for build in config.evaluator_builders]
        if test_dataset is not None:
            evaluators.append(
                RLTestSetEvaluator(
                    test_dataset, config.max_tokens, "test", config.temperature, derive_seed(config.seed, "test")
                )
            )
        await do_sync_training(config, run, training_client, dataset, evaluators, start, num_batches)


async def do_sync_training(
    config: Config,
    run: Run,
    training_client: TrainingClient,
    dataset: RLDataset,
    evaluators: Sequence[SamplingClientEvaluator],
    start: int,
    end: int,
) -> None:
    """Batches start..end-1, then a last evaluation and checkpoint of the final weights."""
    sampling_client = await training_client.save_weights_and_get_sampling_client()
    for step in range(start, end):
        metrics: dict[str, float | int | str] = {
            "progress/batch": step,
            "progress/done_frac": (step + 1) / end,
            "optim/lr": config.learning_rate,
        }
        with timed("total", metrics):
            if config.eval_every > 0 and step % config.eval_every == 0:
                with timed("eval", metrics):
                    metrics |= await run_evaluators(evaluators, sampling_client)
            groups = await sample_groups(config, run, dataset, sampling_client, step, metrics)
            try:
                trained = await train_on_groups(config, run, training_client, groups, step, metrics)
            except ZeroAdvantageError:
                # The steps before this one are good work: a resumed run (with on_zero_advantages=skip, say) keeps them.
                if step > start:
                    await save_checkpoint(training_client, f"{step:06d}-stopped", run.log_path, {"batch": step})
                raise
            if trained:
                sampling_client = await training_client.save_weights_and_get_sampling_client()
            if config.save_every > 0 and (step + 1) % config.save_every == 0 and step + 1 < end:
                with timed("save_checkpoint", metrics):
                    state = {"batch": step + 1}
                    await save_checkpoint(
                        training_client, f"{step + 1:06d}", run.log_path, state, "both", config.ttl_seconds
                    )
        run.logger.log_metrics(metrics, step=step)
    if start < end:
        if config.eval_every > 0 and evaluators:
            final = await run_evaluators(evaluators, sampling_client)
            run.logger.log_metrics({"progress/batch": end, "progress/done_frac": 1.0, **final}, step=end)
        await save_checkpoint(training_client, "final", run.log_path, {"batch": end, "final": True}, "both")
    else:
        logger.info("nothing left to do: the run had reached batch %d of %d", start, end)


async def run_evaluators(
    evaluators: Sequence[SamplingClientEvaluator], sampling_client: SamplingClient
) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for evaluator in evaluators:
        metrics |= await evaluator(sampling_client)
    return metrics


async def sample_groups(
    config: Config,
    run: Run,
    dataset: RLDataset,
    sampling_client: SamplingClient,
    step: int,
    metrics: dict[str, float | int | str],
) -> list[TrajectoryGroup]:
    """Rollouts of one batch, their metrics, and their records on disk."""
    builders = dataset.get_batch(step)
    policy = TinkerTokenCompleter(
        sampling_client, config.max_tokens, config.temperature, seed=derive_seed(config.seed, "rollouts", step)
    )
    with timed("sampling", metrics):
        groups = await do_batch_rollout(builders, policy)
    metrics |= compute_trajectory_metrics(groups, [builder.logging_tags() for builder in builders])
    if config.write_records:
        with timed("write_records", metrics):
            settings = {
                "max_tokens_per_turn": config.max_tokens,
                "temperature": config.temperature,
                "learning_rate": config.learning_rate,
            }
            for name, content in group_records(groups, step, config.model_name, settings):
                run.write_record(name, content)
    return groups


async def train_on_groups(
    config: Config,
    run: Run,
    training_client: TrainingClient,
    groups: list[TrajectoryGroup],
    step: int,
    metrics: dict[str, float | int | str],
) -> bool:
    """One batch's update. Returns False when it was skipped for want of any advantage."""
    advantages_P = compute_advantages(groups, config.advantage)
    data_D, metadata_D = assemble_training_data(groups, advantages_P)
    with_signal = len({metadata["group_idx"] for metadata in metadata_D})
    metrics |= {
        "groups/sampled": len(groups),
        "groups/trained": with_signal,
        "groups/filtered": len(groups) - with_signal,
        "groups/stale": 0,
        "groups/failed": 0,
        "train/num_datums": len(data_D),
        "train/skipped_steps": int(not data_D),
    }
    if not data_D:
        if config.on_zero_advantages == "raise":
            check_advantages(groups, advantages_P)
            raise TrainingError(
                f"step {step}: rewards differ, but no member with an advantage has a sampled token: every prompt of this "
                "batch was too long. Shorten the prompts, or set on_zero_advantages=skip"
            )
        logger.warning("step %d: nothing to train on (no sampled token with an advantage); skipped", step)
        return False
    with timed("train", metrics):
        training_logprobs_D = await train_step(
            data_D,
            training_client,
            config.learning_rate,
            config.num_substeps,
            config.loss_fn,
            config.loss_fn_config,
            metrics,
            config.grad_clip_norm,
        )
    metrics |= compute_kl_sample_train(data_D, training_logprobs_D)
    if config.write_records:
        record = training_step_record(step, data_D, metadata_D, groups, metrics, config.learning_rate)
        run.write_record(f"training_step_{step + 1:04d}", record)
    return True


async def train_step(
    data_D: list[tinker.Datum],
    training_client: TrainingClient,
    learning_rate: float,
    num_substeps: int,
    loss_fn: str,
    loss_fn_config: dict[str, float] | None = None,
    metrics: dict[str, float | int | str] | None = None,
    grad_clip_norm: float = 0.0,
) -> list[torch.Tensor]:
    """One optimizer step per substep, each on its share of the datums; everything is submitted before anything is awaited.

    Returns:
        The trainer's logprobs of each datum's target tokens, float32 (N,), in the order of `data_D`; with several
        substeps those of the later ones have seen the earlier ones' updates. Metrics of the engine are those of the last
        substep, except sums.
    """
    adam = tinker.AdamParams(
        learning_rate=learning_rate,
        beta1=ADAM_BETA1,
        beta2=ADAM_BETA2,
        eps=ADAM_EPS,
        grad_clip_norm=grad_clip_norm,
    )
    # How many datums a batch gives varies (rejection sampling, equal rewards): a thin one has fewer substeps, and says so.
    num_substeps = min(num_substeps, len(data_D))
    if metrics is not None:
        metrics["train/num_substeps"] = num_substeps
    submitted = []
    for part in split_list(data_D, num_substeps):
        passes = training_client.forward_backward([without_mask(datum) for datum in part], loss_fn, loss_fn_config)
        submitted.append((passes, training_client.optim_step(adam)))
    logprobs_D: list[torch.Tensor] = []
    for forward_backward, optim_step in submitted:
        output = await forward_backward
        logprobs_D.extend(outputs["logprobs"].to_torch() for outputs in output.loss_fn_outputs)
        optim = await optim_step
        if metrics is not None:
            for key, value in output.metrics.items():
                name, _, reduction = key.rpartition(":")
                key = f"train/{name}" if reduction == "mean" else f"train/{name}_{reduction}"
                metrics[key] = metrics.get(key, 0.0) + value if reduction == "sum" else value  # pyright: ignore
            metrics |= {f"optim/{key}": value for key, value in (optim.metrics or {}).items()}
    return logprobs_D


def without_mask(datum: tinker.Datum) -> tinker.Datum:
    """The datum as the losses take it: `mask` is for our own metrics, and advantages are 0 where it is."""
    inputs = {key: value for key, value in datum.loss_fn_inputs.items() if key != "mask"}
    return tinker.Datum(model_input=datum.model_input, loss_fn_inputs=inputs)
