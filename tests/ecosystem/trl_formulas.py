"""What TRL computes of a batch, from its own code: run with trl importable, reads a JSON file and writes another one.

`python -m tests.ecosystem.trl_formulas GIVEN FOUND`. The loss is `GRPOTrainer._compute_loss` on given logprobs and entropies;
what stands in the middle of a longer method (importance ratios, advantages of several rewards) is its own statements, found by
what they test.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import ast
import contextlib
import inspect
import json
import sys
import textwrap
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

Lists = dict[str, Any]


def tensor(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


class Alone:
    """An accelerator of one process."""

    num_processes = 1
    process_index = 0
    sync_gradients = True

    def pad_across_processes(self, values: torch.Tensor, **_: Any) -> torch.Tensor:
        return values

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        return values

    def reduce(self, values: torch.Tensor, **_: Any) -> torch.Tensor:
        return values


class Trainer(SimpleNamespace):
    """Has what `_compute_loss` reads, and nothing that would need a model."""

    def __init__(self, **settings: Any):
        super().__init__(
            aux_loss_enabled=False, top_entropy_quantile=1.0, off_policy_mask_threshold=None, importance_sampling_level="token",
            beta=0.0, loss_type="dapo", epsilon_low=0.2, epsilon_high=0.2, use_vllm=False, accelerator=Alone(),
            vllm_importance_sampling_correction=False, model=SimpleNamespace(training=False), entropy_coef=0.0,
            current_gradient_accumulation_steps=1, _entropy_bonus_enabled=False, use_adaptive_entropy=False,
            args=SimpleNamespace(sapo_temperature_pos=1.0, sapo_temperature_neg=1.05, delta=None, use_bias_correction_kl=False),
            _metrics=defaultdict(lambda: defaultdict(list)),
        )  # fmt: skip
        self.__dict__.update(settings)


def loss_gradient(batch: Lists, **settings: Any) -> list[list[float]]:
    """Gradient of the sum over tokens by the logprobs, (B, T). TRL divides by the number of tokens; that is undone."""
    from trl.trainer.grpo_trainer import GRPOTrainer

    mask = tensor(batch["mask"])
    logprobs = tensor(batch["logprobs"]).requires_grad_()
    trainer = Trainer(**settings)
    trainer.get_high_entropy_mask = lambda *given: GRPOTrainer.get_high_entropy_mask(trainer, *given)
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (logprobs, tensor(batch["entropies"]), None)
    nothing = torch.zeros(len(mask), 1, dtype=torch.int64)
    inputs = {
        "prompt_ids": nothing,
        "prompt_mask": nothing,
        "completion_ids": mask.long(),
        "completion_mask": mask,
        "advantages": tensor(batch["advantages"]),
        "old_per_token_logps": tensor(batch["old_logprobs"]),
        "num_items_in_batch": mask.sum(),
    }
    if "importance_ratio" in batch:
        inputs["importance_sampling_ratio"] = tensor(batch["importance_ratio"])
    loss = GRPOTrainer._compute_loss(trainer, None, inputs)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    if trainer.loss_type in ("grpo", "sapo"):
        return (gradient * mask.sum(dim=1, keepdim=True) * len(mask)).tolist()
    return (gradient * mask.sum()).tolist()


def statements(method: Callable[..., Any], wanted: Callable[[ast.If], bool]) -> str:
    """The body of the first `if` of a method that is `wanted`, as a program."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(method)))
    found = next(node for node in ast.walk(tree) if isinstance(node, ast.If) and wanted(node))
    return "\n".join(ast.unparse(statement) for statement in found.body)


def importance_ratios(batch: Lists, mode: str, low: float | None, high: float | None) -> list[list[float]]:
    """The weights of vLLM's logprobs, (B, T) or (B, 1)."""
    import math

    from trl.trainer.grpo_trainer import GRPOTrainer

    def computes(node: ast.If) -> bool:
        return "vllm_importance_sampling_correction" in ast.unparse(node.test) and "logps_diff" in ast.unparse(node)

    program = statements(
        GRPOTrainer._generate_and_score_completions,
        lambda node: computes(node) and "per_token_logps_diff = " in ast.unparse(node.body[1]),
    )
    names: Lists = {
        "torch": torch,
        "math": math,
        "tool_mask": None,
        "completion_mask": tensor(batch["mask"]),
        "old_per_token_logps": tensor(batch["old_logprobs"]),
        "sampling_per_token_logps": tensor(batch["sampling_logprobs"]),
        "self": SimpleNamespace(
            vllm_importance_sampling_mode=mode,
            vllm_importance_sampling_clip_min=low,
            vllm_importance_sampling_clip_max=high,
        ),
    }
    exec(program, names)
    return names["vllm_importance_sampling_ratio"].tolist()


def gdpo(rewards: list[list[float]], weights: list[float], group_size: int) -> list[float]:
    """Advantages by `multi_objective_aggregation="normalize_then_sum"`, (B,)."""
    from trl.trainer.grpo_trainer import GRPOTrainer
    from trl.trainer.utils import nanstd

    program = statements(
        GRPOTrainer._generate_and_score_completions,
        lambda node: ast.unparse(node.test) == "self.multi_objective_aggregation == 'normalize_then_sum'",
    )
    names: Lists = {
        "torch": torch,
        "nanstd": nanstd,
        "device": "cpu",
        "rewards_per_func": tensor(rewards),
        "num_generations": group_size,
        "unscorable_mask": torch.zeros(len(rewards), dtype=torch.bool),
        "self": SimpleNamespace(reward_funcs=weights, reward_weights=tensor(weights)),
    }
    exec(program, names)
    return names["advantages"].tolist()


def sdpo_gradient(student: Any, teacher: Any, ids: Any) -> list[list[list[float]]]:
    """Gradient of the sum over sampled tokens by the student's logits, (B, T, V): SDPO's default mode."""
    from trl.experimental.sdpo.loss_utils import compute_sampled_token_self_distillation_loss

    logits = tensor(student).requires_grad_()
    loss = compute_sampled_token_self_distillation_loss(
        logits, tensor(teacher), torch.tensor(ids), distillation_alpha=1.0
    )
    (gradient,) = torch.autograd.grad(loss.sum(), logits)
    return gradient.tolist()


def main(given: Path, found: Path) -> None:
    import trl
    from trl.rewards import get_soft_overlong_punishment

    read = json.loads(given.read_text())
    batch = read["batch"]
    penalty = get_soft_overlong_punishment(read["max_tokens"], read["penalty_tokens"])
    results = {
        "version": trl.__version__,
        "sapo": loss_gradient(batch, loss_type="sapo"),
        "top_entropy": loss_gradient(batch, top_entropy_quantile=read["share"]),
        "overlong": penalty([[0] * length for length in read["lengths"]]),
        "gdpo": gdpo(read["rewards"], read["weights"], read["group_size"]),
        "sdpo": sdpo_gradient(**read["sdpo"]),
        "ratios": {
            mode: importance_ratios(batch, mode, read["low"] if mode.endswith("mask") else None, read["cap"])
            for mode in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
        },
    }
    results["weighted"] = {
        mode: loss_gradient(
            {**batch, "importance_ratio": ratio}, use_vllm=True, vllm_importance_sampling_correction=True
        )
        for mode, ratio in results["ratios"].items()
    }
    found.write_text(json.dumps(results))


if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):
        main(Path(sys.argv[1]), Path(sys.argv[2]))
