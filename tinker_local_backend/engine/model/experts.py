"""Routed experts and the updates of their adapters, computed expert by expert over the rows routed to each.

transformers keeps the experts of a layer in tensors (experts, out, in) and applies them through its experts interface. The
function registered there as EXPERTS_NAME is for CPUs: experts without rows cost nothing, weights are not copied, and the
order of a token's sum does not depend on the rest of the pass. Measured in float32 (width 512, 32 experts, 4 per token): as
fast as transformers' functions for few tokens and 1.9 times as fast for 2,048, through oneDNN; `batched_mm`, which copies
weights, takes 25 times as long for 64. On a GPU it would synchronise in every layer (grouped_experts.py is for GPUs).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from tinker_local_backend.engine.model.lora import Adapter, AdapterRouting, Spans
from tinker_local_backend.engine.model.products import linear
from tinker_local_backend.engine.model.routes import note_routes

EXPERTS_NAME = "tinker_local_by_expert"


def routed_experts(model: nn.Module) -> list[nn.Module]:
    """Modules that hold all experts of a layer in three-dimensional tensors."""
    weights = ((module, getattr(module, "down_proj", None)) for module in model.modules())
    return [module for module, weight in weights if isinstance(weight, nn.Parameter) and weight.dim() == 3]


def matrices_without_lora(layers: nn.Module, known: Sequence[nn.Module], hidden_size: int) -> list[str]:
    """Names of matrices in decoder layers that an adapter would miss, because they are not linears.

    Excludes modules in `known` (those with adapters, and routed experts, whose layout decides) and small matrices: routers, norms
    with a weight per head, and decay rates of recurrent layers.
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
    """Numbers saved for the backward pass per token, in a layer that routes each token to `chosen` experts."""
    weights: Any = experts.down_proj
    inner, outer = weights.shape[1:] if getattr(experts, "is_transposed", False) else weights.shape[:0:-1]
    return saved_in_experts(chosen, int(inner), int(outer))


def saved_in_experts(chosen: int, inner: int, outer: int) -> int:
    """`activation_width` of experts with intermediate size `inner` and hidden size `outer`. Measured in Qwen3-MoE."""
    return chosen * (8 * inner + 3 * outer) // 2


def use_adapters(experts: nn.Module, path: str, routing: AdapterRouting) -> bool:
    """Make the experts of a layer look up the adapters of each pass. False if their class does not call the experts interface."""
    if not hasattr(experts, "is_concatenated"):
        return False
    setattr(experts, _USED, _Used(path, routing))
    return True


_USED = "_tinker_local_adapters"


@dataclass(frozen=True)
class _Used:
    """Attached to an experts module: its path in the model, and the adapters of the current pass."""

    path: str
    routing: AdapterRouting


def adapters_of(experts: nn.Module) -> tuple[str, AdapterRouting | None]:
    """The path and routing that `use_adapters` attached to an experts module; "" and None if it has no adapters."""
    used: _Used | None = getattr(experts, _USED, None)
    return ("", None) if used is None else (used.path, used.routing)


class Update(NamedTuple):
    """A low-rank update of the experts: A (experts or 1, rank, in) and B (experts or 1, out, rank) on some outputs."""

    columns: slice
    a: torch.Tensor
    b: torch.Tensor


def by_expert(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Weighted sum of the outputs of each token's experts: hidden_states (T, H), the others (T, k) -> (T, H).

    `self` is the experts module. Differentiable by hidden_states, top_k_weights and the adapter's matrices.
    """
    tokens, chosen = top_k_index.shape
    note_routes(self, top_k_index)
    experts_P = top_k_index.flatten()
    order_P = experts_P.argsort(stable=True)
    back_P = torch.empty_like(order_P).scatter_(0, order_P, torch.arange(len(order_P), device=order_P.device))
    rows_PH = spread(hidden_states, order_P, back_P, chosen)
    routed = _Routed(self, experts_P, order_P, chosen)
    inner = routed.product("gate_up_proj" if self.has_gate else "up_proj", rows_PH)
    inner = self._apply_gate(inner) if self.has_gate else self.act_fn(inner)
    outer_PH = routed.product("down_proj", inner)
    by_token = after_experts(self, outer_PH).index_select(0, back_P).view(tokens, chosen, -1)
    return (by_token * top_k_weights.unsqueeze(-1)).sum(dim=1).to(hidden_states.dtype)


def after_experts(experts: Any, rows: torch.Tensor) -> torch.Tensor:
    """Apply the norm of each expert's outputs (P, H), if the model has one (from transformers 5.20 on)."""
    return experts.post_expert_norm(rows) if getattr(experts, "has_post_expert_norm", False) else rows


class _Routed:
    """Rows sorted by expert, and the adapters that they use."""

    def __init__(self, experts: Any, experts_P: torch.Tensor, order_P: torch.Tensor, chosen: int):
        self._experts, self._order_P, self._chosen = experts, order_P, chosen
        self._experts_P = experts_P
        self._counts = torch.bincount(experts_P, minlength=experts.num_experts).tolist()
        self._path, routing = adapters_of(experts)
        self._spans: Spans = [] if routing is None else routing.spans

    def product(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        """Each row times its expert's matrix of this name, with the updates of its adapter."""
        experts = self._experts
        weights = getattr(experts, name)
        biases = getattr(experts, f"{name}_bias") if experts.has_bias else None
        weights = weights.transpose(1, 2) if experts.is_transposed else weights
        result: Any
        if torch.is_grad_enabled():
            updates, scale = [], 0.0
            if self._spans:
                ((_, adapter),) = self._spans  # only sampling mixes adapters, or rows without one
                updates, scale = list(updates_of(adapter, self._path, name)), adapter.spec.scale
            matrices = [matrix for update in updates for matrix in (update.a, update.b)]
            columns = [update.columns for update in updates]
            result = _ByExpert.apply(rows, weights, biases, self._counts, scale, columns, *matrices)
            return result
        result = _each(rows, weights, biases, self._counts)
        for which, adapter in self._spans:
            updates = list(updates_of(adapter, self._path, name))
            if not updates:
                continue
            if isinstance(which, slice) and which == slice(None):
                _add(result, rows, updates, self._counts, adapter.spec.scale)
                continue
            tokens = torch.zeros(len(self._order_P) // self._chosen, dtype=torch.bool, device=rows.device)
            tokens[which] = True
            at = tokens[self._order_P // self._chosen].nonzero()[:, 0]
            counts = torch.bincount(self._experts_P[self._order_P[at]], minlength=len(self._counts)).tolist()
            part = result[at]
            _add(part, rows[at], updates, counts, adapter.spec.scale)
            result[at] = part
        return result


def updates_of(adapter: Adapter, path: str, tensor: str) -> Iterator[Update]:
    """The adapter's updates of a tensor of the experts at this path."""
    for matrix in adapter.experts_at(path):
        if matrix.tensor == tensor:
            yield Update(matrix.columns, adapter.a[matrix.name], adapter.b[matrix.name])


def spread(rows: torch.Tensor, order_P: torch.Tensor, back_P: torch.Tensor, chosen: int) -> torch.Tensor:
    """A copy of each row (T, H) for each of its experts -> (T * chosen, H), in the order `order_P`, whose inverse is `back_P`."""
    copies: Any = _Spread.apply(rows, order_P, back_P, chosen)
    return copies


class _Spread(torch.autograd.Function):
    """Repeats every row for each of its experts, sorted by expert. The backward pass sums the copies in the order of experts."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, order_P: torch.Tensor, back_P: torch.Tensor, chosen: int) -> torch.Tensor:
        ctx.back_P, ctx.chosen = back_P, chosen
        return rows.index_select(0, order_P // chosen)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        by_row = gradients[0].index_select(0, ctx.back_P).unflatten(0, (-1, ctx.chosen))
        return by_row.sum(dim=1), None, None, None


class _ByExpert(torch.autograd.Function):
    """Apply expert e to its counts[e] consecutive rows: rows (P, in), weights (E, out, in), biases (E, out) -> (P, out), and add
    an adapter's updates. `matrices` are A and B of each update; `columns` its outputs.

    Differentiable by the rows and the matrices: the weights are frozen.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        weights: torch.Tensor,
        biases: torch.Tensor | None,
        counts: Sequence[int],
        scale: float,
        columns: Sequence[slice],
        *matrices: torch.Tensor,
    ) -> torch.Tensor:
        ctx.weights, ctx.counts = weights, counts  # frozen: they do not change before the backward pass
        ctx.scale, ctx.columns = scale, columns
        y = _each(rows, weights, biases, counts)
        inner = _add(y, rows, _updates(columns, matrices), counts, scale)
        ctx.save_for_backward(*((rows, *inner, *matrices) if matrices else ()))
        return y

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *gradients: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        grad_y, counts = gradients[0].contiguous(), ctx.counts
        needs_rows = ctx.needs_input_grad[0]
        grad_rows = _each(grad_y, ctx.weights.transpose(1, 2), None, counts) if needs_rows else None
        grads: list[torch.Tensor | None] = []
        if ctx.columns:
            rows, *saved = ctx.saved_tensors
            inner, matrices = saved[: len(ctx.columns)], saved[len(ctx.columns) :]
            for (columns, a, b), inner_i in zip(_updates(ctx.columns, matrices), inner, strict=True):
                grad_i = grad_y[:, columns]
                grad_inner = _times(grad_i, b.to(rows.dtype).transpose(1, 2), counts).mul_(ctx.scale)
                grads.append(_outer(grad_inner, rows, a, counts, 1.0))
                grads.append(_outer(grad_i, inner_i, b, counts, ctx.scale))
                if grad_rows is not None:
                    _add_times(grad_rows, grad_inner, a.to(rows.dtype).transpose(1, 2), counts, 1.0)
        return grad_rows, None, None, None, None, None, *grads


def _updates(columns: Sequence[slice], matrices: Sequence[torch.Tensor]) -> list[Update]:
    return [Update(*part) for part in zip(columns, matrices[::2], matrices[1::2], strict=True)]


def _add(
    y: torch.Tensor, rows: torch.Tensor, updates: Sequence[Update], counts: Sequence[int], scale: float
) -> list[torch.Tensor]:
    """Add the updates to the products y (P, out) of rows (P, in), and return rows @ A.T of each; not recorded by autograd."""
    inner = [_times(rows, update.a.detach().to(rows.dtype), counts) for update in updates]
    for (columns, _, b), inner_i in zip(updates, inner, strict=True):
        _add_times(y[:, columns], inner_i, b.detach().to(rows.dtype), counts, scale)
    return inner


def _times(rows: torch.Tensor, matrices: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """rows (P, in) times the matrix (out, in) of their expert, or the shared one -> (P, out)."""
    return linear(rows, matrices[0]) if len(matrices) == 1 else _each(rows, matrices, None, counts)


def _add_times(
    y: torch.Tensor, rows: torch.Tensor, matrices: torch.Tensor, counts: Sequence[int], scale: float
) -> None:
    """y += scale * `_times`."""
    if len(matrices) == 1:
        y.addmm_(rows, matrices[0].t(), alpha=scale)
        return
    for expert, at in _chunks(counts):
        y[at].addmm_(rows[at], matrices[expert].t(), alpha=scale)


def _outer(
    left: torch.Tensor, right: torch.Tensor, like: torch.Tensor, counts: Sequence[int], scale: float
) -> torch.Tensor:
    """scale * left.T @ right of each expert's rows, or of all rows for a shared factor, in the shape and dtype of `like`."""
    if len(like) == 1:
        return linear(left.t(), right.t()).mul_(scale).to(like.dtype)[None]
    products = torch.zeros_like(like)
    for expert, at in _chunks(counts):
        products[expert] = linear(left[at].t(), right[at].t()).mul_(scale)
    return products


def _chunks(counts: Sequence[int]) -> Iterator[tuple[int, slice]]:
    """The experts that have rows, with their rows."""
    start = 0
    for expert, count in enumerate(counts):
        if count:
            yield expert, slice(start, start + count)
        start += count


def _each(
    rows: torch.Tensor, weights: torch.Tensor, biases: torch.Tensor | None, counts: Sequence[int]
) -> torch.Tensor:
    return torch.cat(
        [
            linear(rows[at], weights[expert], None if biases is None else biases[expert])
            for expert, at in _chunks(counts)
        ]
    )


ALL_EXPERTS_FUNCTIONS.register(EXPERTS_NAME, by_expert)
