"""Steps of DPO for custom synchronous loops: clients, one update, printing an example.

The library's own loop is train_dpo.py, which pipelines, resumes bitwise and records its reference policy.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tinker_cookbook.clients import SamplingClient, TrainingClient
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.models.renderer import check_renderer_name_for_checkpoint
from tinker_cookbook.preference.dpo import LOSS_METRICS, Config, check_pairs, compute_reference_logprobs, dpo_loss_fn
from tinker_cookbook.renderers.datum_text import colorize_example
from tinker_cookbook.runs.evaluation import Evaluator, run_evaluators
from tinker_cookbook.runs.loggers import Logger
from tinker_cookbook.runs.manager import CheckpointManager
from tinker_cookbook.runs.steps import Metrics, count_loss_tokens, count_tokens
from tinker_cookbook.stores.checkpoint_record import CheckpointRecord
from tinker_cookbook.supervised.types import SupervisedDataset
from tinker_cookbook.tokenizer_utils import Tokenizer
from tinker_cookbook.utils.lazy import tinker
from tinker_cookbook.utils.lr_scheduling import learning_rate_at
from tinker_cookbook.utils.metric_names import with_aliases
from tinker_cookbook.utils.misc_utils import timed

logger = logging.getLogger(__name__)

SHOWN_PAIRS = 10


def create_dpo_clients(
    config: Config,
    service_client: Any,
    resume_info: CheckpointRecord | None = None,
    user_metadata: dict[str, str] | None = None,
) -> tuple[TrainingClient, SamplingClient]:
    """The training client and the reference: the policy that the run started from, even when it is resumed.

    Args:
        service_client: a client whose calls return futures with `result()`.
        resume_info: the checkpoint to resume from, with optimizer state; None: start from
            `config.load_checkpoint_path` or a new adapter.

    Raises:
        ConfigurationError: the checkpoint has no training state, or was made with another renderer.
    """
    start = config.load_checkpoint_path
    if start is not None:
        check_renderer_name_for_checkpoint(service_client, start, config.renderer_name)
        first = service_client.create_training_client_from_state(start, user_metadata=user_metadata).result()
    else:
        first = service_client.create_lora_training_client(
            config.model_name, rank=config.lora_rank, seed=config.seed, user_metadata=user_metadata
        ).result()
    reference = first.save_weights_and_get_sampling_client().result()
    if resume_info is None:
        return first, reference
    if (path := resume_info.state_path) is None:
        raise ConfigurationError(f"resume_info: checkpoint {resume_info.name!r} has no state_path to train on from")
    check_renderer_name_for_checkpoint(service_client, path, config.renderer_name)
    training = service_client.create_training_client_from_state_with_optimizer(path, user_metadata=user_metadata)
    return training.result(), reference


def do_update(
    epoch_idx: int,
    batch_idx: int,
    n_batches: int,
    total_steps: int,
    config: Config,
    training_client: Any,
    reference_client: SamplingClient,
    evaluators: Sequence[Evaluator],
    infrequent_evaluators: Sequence[Evaluator],
    dataset: SupervisedDataset,
    ml_logger: Logger,
    log_path: str | Path,
    tokenizer: Tokenizer,
    checkpoint_mgr: CheckpointManager | None = None,
) -> None:
    """One step: save and evaluate if due, then train on one batch of pairs and log its row.

    Args:
        n_batches: batches per epoch; the step is epoch_idx * n_batches + batch_idx, and counts from 0.
        total_steps: for the learning rate schedule; evaluators also run before the last step.
        training_client: a client whose calls return futures with `result()`.
        dataset: batches of pairs, alternating chosen and rejected, as `config.dataset_builder` makes them.
        log_path: the run's folder, named in data errors.
        tokenizer: decodes the first pairs of step 0 for the log.
        checkpoint_mgr: saves before the step; the checkpoint names this batch as the next one.

    Raises:
        DataValidationError: the batch does not consist of pairs.
    """
    step = epoch_idx * n_batches + batch_idx
    metrics: Metrics = {"epoch": epoch_idx, "progress": step / total_steps}
    if checkpoint_mgr is not None:
        asyncio.run(checkpoint_mgr.maybe_save(step, {"epoch": epoch_idx, "batch": batch_idx}))
    rate = learning_rate_at(config, step, total_steps)
    metrics["optim/lr"] = rate
    is_last = step == total_steps - 1
    due = list(evaluators) if config.eval_every > 0 and (step % config.eval_every == 0 or is_last) else []
    if config.infrequent_eval_every > 0 and step % config.infrequent_eval_every == 0:
        due += infrequent_evaluators
    if due:
        with timed("evals", metrics):
            metrics |= asyncio.run(run_evaluators(due, training_client))
    with timed("get_batch", metrics):
        data = dataset.get_batch(batch_idx)
    check_pairs(data, f"batch {batch_idx} of {log_path}")
    if step == 0:
        for chosen, rejected in list(zip(data[::2], data[1::2], strict=True))[:SHOWN_PAIRS]:
            print_example(chosen, tokenizer, "Chosen")
            print_example(rejected, tokenizer, "Rejected")
    with timed("get_ref_logprobs", metrics):
        reference_logprobs = asyncio.run(compute_reference_logprobs(reference_client, data))
    adam = tinker.AdamParams(learning_rate=rate, beta1=config.adam_beta1, beta2=config.adam_beta2, eps=config.adam_eps)
    with timed("step", metrics):
        loss_fn = dpo_loss_fn(reference_logprobs, config.dpo_beta, config.loss_type)
        passes = training_client.forward_backward_custom(data, loss_fn)
        update = training_client.optim_step(adam)
        output, optimizer_metrics = passes.result(), update.result().metrics
    metrics |= {
        "num_pairs": len(data) // 2,
        "num_tokens": count_tokens(data),
        "num_loss_tokens": count_loss_tokens(data),
    }
    metrics |= {name: output.metrics[name] for name in LOSS_METRICS} | dict(optimizer_metrics or {})
    ml_logger.log_metrics(with_aliases(metrics), step=step)


def print_example(datum: tinker.Datum, tokenizer: Tokenizer, label: str = "") -> None:
    """Log an example, coloured by its weights (`display.colorize_example`)."""
    logger.info("%s example:\n%s", label or "An", colorize_example(datum, tokenizer))
