"""The losses of TRL's SFTTrainer on given sequences, step by step."""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerFast

from benchmarks.workload import TrainingSequence

MICRO_BATCH = 4


def losses_of_trl(
    module: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    rank: int,
    learning_rate: float,
    steps: int,
    sequences: Sequence[TrainingSequence],
) -> list[float]:
    """Mean loss of each step in nats per token, all sequences in every step.

    A LoRA of this rank with alpha 32 on every linear but the head, as this engine's default; AdamW as the engine's.
    Raises whatever TRL raises.
    """
    trl, datasets, peft = (importlib.import_module(name) for name in ("trl", "datasets", "peft"))
    rows = [
        {"input_ids": s.tokens, "completion_mask": [0] * s.prompt_length + [1] * len(s.completion)} for s in sequences
    ]
    with tempfile.TemporaryDirectory(prefix="trl-learning-") as folder:
        micro_batch = min(MICRO_BATCH, len(rows))
        arguments: dict[str, Any] = {
            "output_dir": folder,
            "per_device_train_batch_size": micro_batch,
            "gradient_accumulation_steps": len(rows) // micro_batch,
            "max_steps": steps,
            "learning_rate": learning_rate,
            "lr_scheduler_type": "constant",
            "adam_beta2": 0.95,
            "adam_epsilon": 1e-12,
            "weight_decay": 0.0,
            "max_grad_norm": 0.0,
            "logging_steps": 1,
            "bf16": False,
            "fp16": False,
            "use_cpu": module.device.type == "cpu",
            "report_to": [],
            "save_strategy": "no",
            "disable_tqdm": True,
            "max_length": None,
        }
        trainer = trl.SFTTrainer(
            model=module,
            args=trl.SFTConfig(**arguments),
            train_dataset=datasets.Dataset.from_list(rows),
            processing_class=tokenizer,
            peft_config=peft.LoraConfig(r=rank, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
        )
        trainer.train()
        return [float(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]
