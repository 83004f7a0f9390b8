"""A hand-written training loop with torch and PEFT: packed sequences, each attending only to itself.

Sequences are packed to at most `PACK_TOKENS`; attention (transformers' AttentionInterface) and layers with a state run per
sequence. The loss is computed in three ways: from full logits, from logits of completion positions only, and in chunks whose
gradient is computed in the forward pass, so that no [tokens, vocabulary] matrix outlives its chunk.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F
from transformers import AttentionInterface
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

from benchmarks.harness import Contender
from benchmarks.ours import LEARNING_RATE
from benchmarks.peers.huggingface import load_model, sharing_weights
from benchmarks.peers.setup import Setup
from benchmarks.workload import TrainingSequence, training_sequences

PACK_TOKENS = 2048
CHUNK = 512
ATTENTION_LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj"]
LINEARS = [*ATTENTION_LINEARS, "gate_proj", "up_proj", "down_proj"]
EXPERT_TENSORS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
DELTA_LINEARS = ["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"]

_ATTENTION = "benchmark_per_sequence"


@dataclass(frozen=True)
class Pack:
    """Tensors of shape (1, T), and the lengths of the sequences in them. `loss_mask`: the target is a completion token."""

    tokens: torch.Tensor
    positions: torch.Tensor
    targets: torch.Tensor
    loss_mask: torch.Tensor
    lengths: list[int]


Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(hidden (1, T, H), head (V, H), targets (1, T), loss_mask (1, T)) -> sum of the loss."""


def build(setup: Setup) -> list[Contender]:
    """One contender per loss function, each with a model and an optimizer, over the same base weights."""
    AttentionInterface.register(_ATTENTION, _attend_per_sequence)
    base = load_model(setup)
    base.set_attn_implementation(_ATTENTION)
    for module in base.modules():
        if isinstance(module, Qwen3_5GatedDeltaNet):
            setattr(module, "forward", partial(_mix_per_sequence, module))  # noqa: B010 (its type differs from the class's)
    losses: dict[str, Loss] = {
        "full logits": full_logits_loss,
        "completion logits": completion_logits_loss,
        "fused chunks": fused_loss,
    }
    sequences = training_sequences(setup.workload)
    packs = pack(sequences, setup.config.device)
    return [
        Contender(f"torch + peft, packed, {name}", _Loop(setup, sharing_weights(base), packs, sequences, loss).step)
        for name, loss in losses.items()
    ]


class _Loop:
    def __init__(self, setup: Setup, model: Any, packs: list[Pack], sequences: Sequence[TrainingSequence], loss: Loss):
        peft: Any = importlib.import_module("peft")
        linears = [*LINEARS, *(DELTA_LINEARS if setup.shape.delta else [])]
        targets: dict[str, Any] = {"target_modules": linears}
        if setup.shape.experts is not None:
            targets = {"target_modules": ATTENTION_LINEARS, "target_parameters": EXPERT_TENSORS}
        lora = peft.LoraConfig(r=setup.config.rank, lora_alpha=32, task_type="CAUSAL_LM", lora_dropout=0.0, **targets)
        adapted = peft.get_peft_model(model, lora).train()
        self._inner = adapted.get_base_model()
        self._optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=LEARNING_RATE)
        self._packs = packs
        self._tokens = sum(len(s.tokens) for s in sequences)
        self._loss = loss

    def step(self, round_number: int) -> int:
        """Forward, backward and one AdamW step; returns the number of tokens."""
        head = self._inner.lm_head.weight.detach()
        for p in self._packs:
            hidden = self._inner.model(
                input_ids=p.tokens, position_ids=p.positions, use_cache=False, sequence_lengths=p.lengths
            ).last_hidden_state
            self._loss(hidden, head, p.targets, p.loss_mask).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return self._tokens


def pack(sequences: Sequence[TrainingSequence], device: str) -> list[Pack]:
    """Pack sequences in order; a new pack begins if the next one would not fit."""
    groups: list[list[TrainingSequence]] = [[]]
    for sequence in sequences:
        if groups[-1] and sum(len(s.tokens) for s in groups[-1]) + len(sequence.tokens) > PACK_TOKENS:
            groups.append([])
        groups[-1].append(sequence)

    def tensor(values: list) -> torch.Tensor:
        return torch.tensor([values], device=device)

    return [
        Pack(
            tokens=tensor([token for s in group for token in s.tokens[:-1]]),
            positions=tensor([i for s in group for i in range(len(s.tokens) - 1)]),
            targets=tensor([token for s in group for token in s.tokens[1:]]),
            loss_mask=tensor([i >= s.prompt_length for s in group for i in range(1, len(s.tokens))]),
            lengths=[len(s.tokens) - 1 for s in group],
        )
        for group in groups
    ]


def full_logits_loss(
    hidden: torch.Tensor, head: torch.Tensor, targets: torch.Tensor, loss_mask: torch.Tensor
) -> torch.Tensor:
    logprobs = F.linear(hidden, head).float().log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    return -(logprobs * loss_mask).sum()


def completion_logits_loss(
    hidden: torch.Tensor, head: torch.Tensor, targets: torch.Tensor, loss_mask: torch.Tensor
) -> torch.Tensor:
    return F.cross_entropy(F.linear(hidden[loss_mask], head).float(), targets[loss_mask], reduction="sum")


def fused_loss(
    hidden: torch.Tensor, head: torch.Tensor, targets: torch.Tensor, loss_mask: torch.Tensor
) -> torch.Tensor:
    return _FusedCrossEntropy.apply(hidden[loss_mask], head, targets[loss_mask])  # pyright: ignore


class _FusedCrossEntropy(torch.autograd.Function):
    """Cross-entropy through a frozen head, chunk by chunk; the gradient of the hidden states is computed in the forward pass."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, head: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        gradient = torch.empty_like(hidden)
        total = torch.zeros((), device=hidden.device)
        for start in range(0, len(hidden), CHUNK):
            piece = slice(start, start + CHUNK)
            logits = (hidden[piece] @ head.t()).float()
            chunk_targets = targets[piece, None]
            log_norm = logits.logsumexp(-1, keepdim=True)
            total += (log_norm - logits.gather(1, chunk_targets)).sum()
            probabilities = logits.sub_(log_norm).exp_()
            minus_one = torch.full_like(chunk_targets, -1, dtype=torch.float32)
            probabilities.scatter_add_(1, chunk_targets, minus_one)
            gradient[piece] = probabilities.to(hidden.dtype) @ head
        ctx.save_for_backward(gradient)
        return total

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * upstream[0].to(gradient.dtype), None, None


def _attend_per_sequence(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sequence_lengths: Sequence[int] = (),
    **unused: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention of packed sequences; query, key, value of shape (1, heads, T, head_dim)."""
    lengths = list(sequence_lengths)
    outputs = [
        F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True)
        for q, k, v in zip(query.split(lengths, 2), key.split(lengths, 2), value.split(lengths, 2), strict=True)
    ]
    return torch.cat(outputs, 2).transpose(1, 2).contiguous(), None


def _mix_per_sequence(
    module: Qwen3_5GatedDeltaNet, hidden_states: torch.Tensor, sequence_lengths: Sequence[int] = (), **options: Any
) -> torch.Tensor:
    """The delta rule over packed sequences (1, T, H)."""
    pieces = hidden_states.split(list(sequence_lengths), 1)
    return torch.cat([type(module).forward(module, piece, **options) for piece in pieces], 1)
