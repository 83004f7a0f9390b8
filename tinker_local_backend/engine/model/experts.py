"""Routed experts: frozen, and computed expert by expert, each over the rows that were routed to it.

transformers keeps the experts of a layer in tensors (experts, out, in) and asks its experts interface how to multiply with
them. What is registered there under EXPERTS_NAME is for a CPU: experts without rows cost nothing, their weights are not copied,
and a token's sum has one order whatever else is in the pass. Measured there in float32 (width 512, 32 experts, 4 to a token): as
fast as transformers' own ways for few tokens and 1.9 times as fast for 2,048, through oneDNN; `batched_mm`, which copies weights,
takes 25 times as long for 64. On a GPU it would wait for the device in every layer; there
transformers' `grouped_mm` does the same in one product.
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

ROUTERS = ("gate", "wg", "router", "shared_expert_gate")
"""Names of linears that say how much of which expert a token gets. They stay frozen, as on the hosted service."""


def routed_experts(model: nn.Module) -> list[nn.Module]:
    """Modules that hold all experts of a layer and compute through transformers' experts interface."""
    return [module for module in model.modules() if hasattr(module, "is_transposed") and hasattr(module, "has_gate")]


def without_lora(layers: nn.Module, experts: Sequence[nn.Module]) -> list[str]:
    """Names of weights in decoder layers that an adapter would leave out although nobody asked for it: linears that LoRA does
    not know, and matrices in tensors of more dimensions. `experts` and what routes to them are left out knowingly.
    """
    paths = {module: path for path, module in layers.named_modules()}
    blocks = tuple(paths[module].rpartition(".")[0] + "." for module in experts if module in paths)
    beyond = set()
    for module, path in paths.items():
        leaf = path.rpartition(".")[2]
        routes = leaf in ROUTERS and path.startswith(blocks)
        if (isinstance(module, nn.Linear) and not routes) or type(module).__name__ == "Conv1D":
            beyond.add(leaf)
        if module not in experts and not isinstance(module, nn.Conv1d | nn.Conv2d):
            beyond |= {name for name, weight in module.named_parameters(recurse=False) if weight.dim() > 2}
    return sorted(beyond)


def activation_width(experts: nn.Module, chosen: int) -> int:
    """Numbers that the backward pass keeps for one token of a layer whose tokens go to `chosen` experts each."""
    weights: Any = experts.down_proj
    inner, outer = weights.shape[1:] if experts.is_transposed else weights.shape[:0:-1]
    return chosen * (5 * int(inner) + 4 * int(outer))


def by_expert(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """What a token's experts make of it, weighted and summed: hidden_states (T, H), the others (T, k) -> (T, H).

    `self` is the module of the experts. Differentiable by hidden_states and top_k_weights.
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
    """Every row once for each of its experts, by expert. Gradients of its copies are summed in the order of its experts."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, order_P: torch.Tensor, back_P: torch.Tensor, chosen: int) -> torch.Tensor:
        ctx.back_P, ctx.chosen = back_P, chosen
        return rows.index_select(0, order_P // chosen)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        by_row = gradients[0].index_select(0, ctx.back_P).unflatten(0, (-1, ctx.chosen))
        return by_row.sum(dim=1), None, None, None


class _ByExpert(torch.autograd.Function):
    """The next counts[e] rows through expert e: rows (P, in), weights (E, out, in), biases (E, out) -> (P, out).

    Differentiable by the rows alone: the weights are frozen.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, weights: torch.Tensor, biases: torch.Tensor | None, counts: Sequence[int]
    ) -> torch.Tensor:
        ctx.weights, ctx.counts = weights, counts  # nothing changes them before the backward pass
        return _each(rows, weights, biases, counts)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _each(gradients[0].contiguous(), ctx.weights.transpose(1, 2), None, ctx.counts), None, None, None


def _each(
    rows: torch.Tensor, weights: torch.Tensor, biases: torch.Tensor | None, counts: Sequence[int]
) -> torch.Tensor:
    parts = rows.split(list(counts))
    return torch.cat(
        [
            linear(part, weights[expert], None if biases is None else biases[expert])
            for expert, part in enumerate(parts)
            if len(part)
        ]
    )


ALL_EXPERTS_FUNCTIONS.register(EXPERTS_NAME, by_expert)
