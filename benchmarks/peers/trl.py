"""TRL's trainers, one optimizer step at a time.

A trainer owns its loop. So `train()` runs on a thread that blocks before every step until it is released; a repetition is the
work between two such points: data, forward, backward, optimizer, logging, and fetching the next batch.
"""

from __future__ import annotations

import importlib
import tempfile
import threading
from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoTokenizer, PrinterCallback, TrainerCallback

from benchmarks.harness import Contender
from benchmarks.models import words
from benchmarks.ours import DPO_BETA, LEARNING_RATE
from benchmarks.peers.huggingface import load_model
from benchmarks.peers.setup import Setup
from benchmarks.workload import PAIRS, even_fraction, preference_pairs, training_sequences

MICRO_BATCH = 16
_MANY_STEPS = 100_000


class _Stop(Exception):
    """Raised inside the trainer's loop to leave it."""


class SteppedTrainer(TrainerCallback):
    """Runs a trainer's loop on a separate thread, one step per call of `step`."""

    def __init__(self, trainer: Any, threads: int):
        self._trainer = trainer
        self._threads = threads
        self._go, self._waiting = threading.Semaphore(0), threading.Semaphore(0)
        self._closing = False
        self._error: BaseException | None = None
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(self)
        self._thread = threading.Thread(target=self._train, name="trl", daemon=True)
        self._thread.start()
        self._wait()

    def step(self) -> None:
        """Run one optimizer step. Raises RuntimeError from the trainer's error."""
        self._go.release()
        self._wait()

    def close(self) -> None:
        self._closing = True
        self._go.release()
        self._thread.join(timeout=60)

    def on_step_begin(self, *arguments: Any, **more: Any) -> None:
        self._waiting.release()
        self._go.acquire()
        if self._closing:
            raise _Stop

    def _wait(self) -> None:
        self._waiting.acquire()
        if self._error is not None:
            self._waiting.release()  # a later call fails the same way
            raise RuntimeError(f"the trainer's loop ended: {self._error!r}") from self._error

    def _train(self) -> None:
        torch.set_num_threads(self._threads)
        try:
            self._trainer.train()
            raise RuntimeError(f"the trainer ended after its {_MANY_STEPS} steps")
        except _Stop:
            return
        except BaseException as error:
            self._error = error
            self._waiting.release()


def _contender(setup: Setup, name: str, trainer: Any, tokens: Callable[[], int]) -> Contender:
    """`tokens` returns the number of tokens of the last step."""
    stepped = SteppedTrainer(trainer, setup.config.threads)
    setup.stack.callback(stepped.close)

    def run(round_number: int) -> int:
        stepped.step()
        return tokens()

    return Contender(name, run)


def build_sft(setup: Setup) -> list[Contender]:
    """SFTTrainer on the same 64 sequences at every step, in padded micro-batches, loss on completions."""
    trl, datasets = _modules()
    sequences = training_sequences(setup.workload)
    rows = [
        {"input_ids": s.tokens, "completion_mask": [0] * s.prompt_length + [1] * len(s.completion)} for s in sequences
    ]
    trainer = trl.SFTTrainer(
        model=load_model(setup),
        args=trl.SFTConfig(
            **_arguments(setup, MICRO_BATCH, len(sequences)), max_length=None, completion_only_loss=True
        ),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(setup.model),
        peft_config=_lora(setup),
    )
    tokens = sum(len(s.tokens) for s in sequences)
    return [_contender(setup, "TRL SFTTrainer", trainer, lambda: tokens)]


def build_dpo(setup: Setup) -> list[Contender]:
    """DPOTrainer on the same pairs at every step; its reference, the model without the adapter, also runs at every step."""
    trl, datasets = _modules()
    pairs = preference_pairs(setup.workload)
    # It appends the end-of-sequence token itself.
    rows = [
        {"prompt": words(p.prompt), "chosen": " " + words(p.chosen[:-1]), "rejected": " " + words(p.rejected[:-1])}
        for p in pairs
    ]
    trainer = trl.DPOTrainer(
        model=load_model(setup),
        args=trl.DPOConfig(**_arguments(setup, MICRO_BATCH // 2, PAIRS), max_length=None, beta=DPO_BETA),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(setup.model),
        peft_config=_lora(setup),
    )
    tokens = sum(2 * len(p.prompt) + len(p.chosen) + len(p.rejected) for p in pairs)
    prepared = sum(
        2 * len(row["prompt_ids"]) + len(row["chosen_ids"]) + len(row["rejected_ids"]) for row in trainer.train_dataset
    )
    if prepared != tokens:
        raise RuntimeError(f"DPOTrainer tokenized the pairs to {prepared} tokens, expected {tokens}")
    return [_contender(setup, "TRL DPOTrainer", trainer, lambda: tokens)]


def build_grpo(setup: Setup) -> list[Contender]:
    """GRPOTrainer with transformers' generate on the same prompts at every step, no KL term."""
    trl, datasets = _modules()
    workload = setup.workload
    counted = [0]

    def reward(completion_ids: list[list[int]], **unused: Any) -> list[float]:
        counted[0] = sum(map(len, completion_ids))
        return [even_fraction(tokens) for tokens in completion_ids]

    model = load_model(setup)
    model.generation_config.eos_token_id = workload.stops
    trainer = trl.GRPOTrainer(
        model=model,
        args=trl.GRPOConfig(
            **_arguments(setup, MICRO_BATCH, workload.rows),
            num_generations=workload.group_size,
            max_completion_length=workload.max_new_tokens,
            temperature=1.0,
            top_k=0,
            beta=0.0,
            log_completions=False,
        ),
        reward_funcs=reward,
        train_dataset=datasets.Dataset.from_list([{"prompt": words(prompt)} for prompt in workload.prompts_P]),
        processing_class=AutoTokenizer.from_pretrained(setup.model),
        peft_config=_lora(setup),
    )
    return [_contender(setup, "TRL GRPOTrainer", trainer, lambda: counted[0])]


def _modules() -> tuple[Any, Any]:
    return importlib.import_module("trl"), importlib.import_module("datasets")


def _lora(setup: Setup) -> Any:
    peft: Any = importlib.import_module("peft")
    return peft.LoraConfig(r=setup.config.rank, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")


def _arguments(setup: Setup, micro_batch: int, per_step: int) -> dict[str, Any]:
    """Arguments of all trainers: plain steps of `per_step` examples in padded micro-batches, without saving or reporting."""
    return {
        "output_dir": setup.stack.enter_context(tempfile.TemporaryDirectory(prefix="trl-benchmark-")),
        "per_device_train_batch_size": micro_batch,
        "gradient_accumulation_steps": per_step // micro_batch,
        "max_steps": _MANY_STEPS,
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "gradient_checkpointing": False,
        "bf16": False,
        "fp16": False,
        "use_cpu": setup.config.device == "cpu",
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "dataloader_num_workers": 0,
    }
