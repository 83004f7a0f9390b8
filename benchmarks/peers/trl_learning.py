"""Loss curves of TRL's SFTTrainer on given sequences."""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from benchmarks.workload import TrainingSequence
from tinker_cookbook.runs.steps import ADAM

MICRO_BATCH = 4
IGNORED = -100
"""Label of a token without loss."""

PLAIN: dict[str, Any] = {
    "adam_beta1": ADAM["beta1"],
    "adam_beta2": ADAM["beta2"],
    "weight_decay": 0.0,
    "max_grad_norm": 0.0,
    "logging_steps": 1,
    "bf16": False,
    "fp16": False,
    "report_to": [],
    "save_strategy": "no",
    "disable_tqdm": True,
}
"""Arguments of all trainers in the comparisons of learning: the optimizer of this library's loops except its epsilon, without
saving or reporting."""

EPSILON = 1e-12
"""The engine's default."""


def losses_of_trl(
    module: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    rank: int,
    learning_rate: float,
    steps: int,
    sequences: Sequence[TrainingSequence],
) -> list[float]:
    """Mean loss of each step in nats per token, with all sequences in every step.

    LoRA of this rank with alpha 32 on every linear but the head, and the engine's AdamW. Errors of TRL propagate.
    """
    rows = [
        {"input_ids": s.tokens, "completion_mask": [0] * s.prompt_length + [1] * len(s.completion)} for s in sequences
    ]
    micro_batch = min(MICRO_BATCH, len(rows))
    arguments: dict[str, Any] = {
        "per_device_train_batch_size": micro_batch,
        "gradient_accumulation_steps": len(rows) // micro_batch,
        "max_steps": steps,
        "learning_rate": learning_rate,
        "lr_scheduler_type": "constant",
        "adam_epsilon": EPSILON,
    }
    peft: Any = importlib.import_module("peft")
    lora = peft.LoraConfig(r=rank, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    return _losses(importlib.import_module("trl").SFTTrainer, module, tokenizer, rows, arguments, lora)


def full_losses_of_trl(
    module: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    learning_rate: float,
    batches: Sequence[Sequence[tuple[list[int], list[int]]]],
) -> list[float]:
    """Loss of each step of full fine-tuning, as the mean over sequences of their mean nats per token. One step per batch, in
    order, with a learning rate that decays linearly to 0.

    Args:
        module: trained in place.
        batches: equally many sequences each: (tokens, loss mask).

    Errors of TRL propagate.
    """
    rows = [{"input_ids": tokens, "completion_mask": mask} for batch in batches for tokens, mask in batch]
    arguments: dict[str, Any] = {
        "per_device_train_batch_size": len(batches[0]),
        "max_steps": len(batches),
        "learning_rate": learning_rate,
        "lr_scheduler_type": "linear",
        # The losses of this library are sums over the batch, so its gradients and its epsilon are larger by that factor.
        "adam_epsilon": ADAM["eps"] / len(batches[0]),
        "train_sampling_strategy": "sequential",
    }
    return _losses(_trainer_on_means(), module, tokenizer, rows, arguments)


def _trainer_on_means() -> Any:
    """TRL's trainer with the loss of `mean_per_sequence`."""
    trl: Any = importlib.import_module("trl")

    class OnMeans(trl.SFTTrainer):
        def compute_loss(self, model: Any, inputs: dict[str, torch.Tensor], *_: Any, **__: Any) -> torch.Tensor:
            labels = inputs["labels"]
            logits = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
            return mean_per_sequence(logits, labels)

    return OnMeans


def mean_per_sequence(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The mean over sequences of their mean loss per token, a scalar; TRL's default loss is the mean over all tokens.

    Args:
        logits: (D, T, V).
        labels: (D, T), the tokens; -100 for tokens without loss.
    """
    targets = labels[:, 1:]
    nll = torch.nn.functional.cross_entropy(logits[:, :-1].float().mT, targets, reduction="none")
    return (nll.sum(1) / (targets != IGNORED).sum(1)).mean()


def _losses(
    trainer_class: Any,
    module: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    rows: list[dict[str, list[int]]],
    arguments: dict[str, Any],
    lora: Any = None,
) -> list[float]:
    trl, datasets = importlib.import_module("trl"), importlib.import_module("datasets")
    with tempfile.TemporaryDirectory(prefix="trl-learning-") as folder:
        shared = {
            "output_dir": folder,
            "use_cpu": module.device.type == "cpu",
            "max_length": None,
            "completion_only_loss": True,
        }
        trainer = trainer_class(
            model=module,
            args=trl.SFTConfig(**PLAIN, **shared, **arguments),
            train_dataset=datasets.Dataset.from_list(rows),
            processing_class=tokenizer,
            peft_config=lora,
        )
        trainer.train()
        return [float(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]
