"""Writes golden_trl.json: loss, metrics and LoRA gradients of TRL's DPOTrainer on one batch, which test_golden.py compares.

Needs trl, which the tests do not: run it where trl is installed, from the root of the repository.

    python -m tests.preference.golden_trl

Model, adapter and pairs come from numpy generators seeded by names, so that both sides build the very same ones.
"""

import json
import tempfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config

GOLDEN = Path(__file__).with_name("golden_trl.json")
TINY_CHAT = Path(__file__).resolve().parents[2] / "example_data" / "tiny_chat"
RANK, ALPHA = 2, 32
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LOSSES = {"dpo": ("sigmoid", 0.1), "ipo": ("ipo", 0.3), "dpo_norm": ("sigmoid_norm", 2.0)}
"""our loss_type -> TRL's and the beta"""
METRICS = {
    "accuracy": "rewards/accuracies",
    "margin": "rewards/margins",
    "chosen_reward": "rewards/chosen",
    "rejected_reward": "rewards/rejected",
}
LENGTHS = [(5, 7, 3), (1, 2, 9), (8, 4, 4), (3, 1, 6)]
"""tokens of prompt, chosen and rejected of each pair"""


def drawn(name: str, shape: tuple[int, ...], scale: float) -> torch.Tensor:
    """Normal numbers that depend on the name alone."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    return torch.from_numpy((scale * rng.standard_normal(shape)).astype(np.float32))


def new_model() -> Any:
    """A Qwen3 of a few thousand parameters in float32."""
    config = Qwen3Config(
        vocab_size=1536,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        eos_token_id=1513,
        pad_token_id=1511,
        bos_token_id=None,
        tie_word_embeddings=True,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.copy_(drawn(name, tuple(parameter.shape), 0.2))
    return model


def adapter_matrix(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """A matrix of the policy's adapter; `name` is <module>.lora_A.weight or <module>.lora_B.weight."""
    return drawn(name, shape, 0.1 if "lora_A" in name else 0.02)


def pairs() -> list[dict[str, list[int]]]:
    """Token ids of prompt, chosen and rejected."""
    rng = np.random.default_rng(7)
    keys = ("prompt_ids", "chosen_ids", "rejected_ids")
    return [
        {key: rng.integers(0, 1500, n).tolist() for key, n in zip(keys, lengths, strict=True)} for lengths in LENGTHS
    ]


def plain_name(name: str) -> str:
    """PEFT's name of a matrix without its prefixes and the adapter's name."""
    return name.removeprefix("base_model.model.").replace(".default.weight", ".weight")


def trl_numbers(loss_type: str, beta: float, folder: str) -> dict[str, Any]:
    import datasets
    import peft
    import trl  # pyright: ignore[reportMissingImports]

    trainer = trl.DPOTrainer(
        model=new_model(),
        args=trl.DPOConfig(
            output_dir=folder, loss_type=loss_type, beta=beta, use_cpu=True, bf16=False, report_to=[], max_length=None,
            gradient_checkpointing=False,
        ),
        train_dataset=datasets.Dataset.from_list([{"prompt": "a", "chosen": " b", "rejected": " c"}] * 4),
        processing_class=AutoTokenizer.from_pretrained(TINY_CHAT),
        peft_config=peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=LINEARS, task_type="CAUSAL_LM"),
    )  # fmt: skip
    model = trainer.model
    trained = {plain_name(n): p for n, p in model.named_parameters() if p.requires_grad}
    with torch.no_grad():
        for name, parameter in trained.items():
            parameter.copy_(adapter_matrix(name, tuple(parameter.shape)))
    loss = trainer.compute_loss(model, trainer.data_collator(pairs()))
    loss.backward()
    logged = trainer._metrics["train"]
    gradients = {name: parameter.grad.tolist() for name, parameter in sorted(trained.items())}
    return {
        "beta": beta,
        "loss": float(loss.detach()),
        "metrics": {ours: logged[theirs][-1] for ours, theirs in METRICS.items()},
        "gradients": gradients,
    }


def rounded(value: Any) -> Any:
    """Seven significant digits, which float32 has."""
    if isinstance(value, float):
        return float(f"{value:.7g}")
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return {key: rounded(item) for key, item in value.items()} if isinstance(value, dict) else value


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        losses = {ours: trl_numbers(theirs, beta, folder) for ours, (theirs, beta) in LOSSES.items()}
    import trl  # pyright: ignore[reportMissingImports]

    versions = {"trl": trl.__version__, "torch": torch.__version__}
    GOLDEN.write_text(json.dumps(rounded({"versions": versions, "losses": losses})) + "\n")


if __name__ == "__main__":
    main()
