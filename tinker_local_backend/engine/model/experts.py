"""Routed experts: frozen, and computed expert by expert, each over the rows that are routed to it.

transformers keeps the experts of a layer in tensors (experts, out, in) and multiplies with them through its experts interface.
The function registered there as EXPERTS_NAME is for CPUs: experts without rows cost nothing, weights are not copied, and the
order of a token's sum does not depend on the rest of the pass. Measured in float32 (width 512, 32 experts, 4 per token): as
fast as transformers' functions for few tokens and 1.9 times as fast for 2,048, through oneDNN; `batched_mm`, which copies
weights, takes 25 times as long for 64. On a GPU it would synchronise in every layer; `grouped_mm` is one product.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from tinker_local_backend.engine.model.products import linear

EXPERTS_NAME = "tinker_local_by_expert"

ON_CUDA = "grouped_mm"

ROUTERS = ("gate", "wg", "router", "shared_expert_gate", "classifier")
"""Names of linears that route tokens to experts. They stay frozen, as on the hosted service."""


def routed_experts(model: nn.Module) -> list[nn.Module]:
    """Modules that hold all experts of a layer in tensors of three dimensions."""
    weights = ((module, getattr(module, "down_proj", None)) for module in model.modules())
    return [module for module, weight in weights if isinstance(weight, nn.Parameter) and weight.dim() == 3]


def without_lora(layers: nn.Module, known: Sequence[nn.Module], hidden_size: int) -> list[str]:
    """Names of matrices in decoder layers that an adapter would miss, because they are no linears. `known` are excluded:
    those that have adapters, and the routed experts, which adapters skip by design. So are small ones: routers, norms with a
    weight for each head, and the decay rates of layers with a state.
    """
    beyond = set()
    for module in layers.modules():
        if module not in known and not isinstance(module, nn.Linear | nn.Embedding | nn.Conv1d | nn.Conv2d):
            for name, weight in module.named_parameters(recurse=False):
                sizes = [size for size in weight.shape if size > 1]
                if len(sizes) > 2 or (len(sizes) == 2 and 2 * min(sizes) >= hidden_size):
                    beyond.add(name)
    return sorted(beyond)


def activation_width(experts: nn.Module, chosen: int) -> int:
    """Numbers that the backward pass keeps for one token of a layer that routes each token to `chosen` experts."""
    weights: Any = experts.down_proj
    inner, outer = weights.shape[1:] if getattr(experts, "is_transposed", False) else weights.shape[:0:-1]
    return chosen * (5 * int(inner) + 4 * int(outer))


def by_expert(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Weighted sum of the outputs of each token's experts: hidden_states (T, H), the others (T, k) -> (T, H).

    `self` is the experts module. Differentiable by hidden_states and top_k_weights.
    """
    tokens, chosen = top_k_index.shape
    experts_P = top_k_index.flatten()
    order_P = experts_P.argsort(stable=True)
    back_P = torch.empty_like(order_P).scatter_(0, order_P, torch.arange(len(order_P), device=order_P.device))
    counts = torch.bincount(experts_P, minlength=self.num_experts).tolist()
    rows_PH = _Spread.apply(hidden_states, order_P, back_P, chosen)
    inner = _products(self, "gate_up_proj" if self.has_gate else "up_proj", rows_PH, counts)
    inner = self._apply_gate(inner) if self.has_gate else self.act_fn(inner)
    outer_PH = _products(self, "down_proj", inner, counts)
    if self.has_post_expert_norm:
        outer_PH = self.post_expert_norm(outer_PH)
    by_token = outer_PH.index_select(0, back_P).view(tokens, chosen, -1)
    return (by_token * top_k_weights.unsqueeze(-1)).sum(dim=1).to(hidden_states.dtype)


def _products(experts: Any, name: str, rows: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    weights = getattr(experts, name)
    biases = getattr(experts, f"{name}_bias") if experts.has_bias else None
    result: Any = _ByExpert.apply(rows, weights.transpose(1, 2) if experts.is_transposed else weights, biases, counts)
    return result


class _Spread(torch.autograd.Function):
    """Repeat every row for each of its experts, sorted by expert. Sum the gradients of the copies in the order of the experts."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, order_P: torch.Tensor, back_P: torch.Tensor, chosen: int) -> torch.Tensor:
        ctx.back_P, ctx.chosen = back_P, chosen
        return rows.index_select(0, order_P // chosen)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        by_row = gradients[0].index_select(0, ctx.back_P).unflatten(0, (-1, ctx.chosen))
        return by_row.sum(dim=1), None, None, None


class _ByExpert(torch.autograd.Function):
    """Apply expert e to the next counts[e] rows: rows (P, in), weights (E, out, in), biases (E, out) -> (P, out).

    Differentiable by the rows alone: the weights are frozen.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, weights: torch.Tensor, biases: torch.Tensor | None, counts: Sequence[int]
    ) -> torch.Tensor:
        ctx.weights, ctx.counts = weights, counts  # frozen: they do not change before the backward pass
        return _each(rows, weights, biases, counts)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _each(gradients[0].contiguous(), ctx.weights.transpose(1, 2), None, ctx.counts), None, None, None


def _each(
    rows: torch.Tensor, weights: torch.Tensor, biases: torch.Tensor | None, counts: Sequence[int]
) -> torch.Tensor:
    return torch.cat(
        [
            linear(chunk, weights[expert], None if biases is None else biases[expert])
            for expert, chunk in enumerate(rows.split(list(counts)))
            if len(chunk)
        ]
    )


ALL_EXPERTS_FUNCTIONS.register(EXPERTS_NAME, by_expert)
