"""LoRA adapters outside the model: one base model, any number of adapters, one per row of a batch.

A `LoraLinear` replaces an `nn.Linear` and looks up at each call which rows use which adapter (`AdapterRouting`). An `Adapter`
is a table of A and B matrices in float32; training updates it in place, `snapshot()` returns a frozen copy.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, cast

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from transformers.pytorch_utils import Conv1D

from tinker_local_backend.engine.model.expert_matrices import ExpertMatrix, ExpertSlots
from tinker_local_backend.engine.model.lora_spec import LoraSpec, Part
from tinker_local_backend.engine.model.products import linear
from tinker_local_backend.engine.model.quantized import QuantizedLinear


@dataclass(frozen=True)
class PeftNames:
    """The targets of an adapter in PEFT's config."""

    modules: tuple[str, ...] = ()
    """`target_modules`: path suffixes that no other module of the model has"""
    parameters: tuple[str, ...] = ()
    """`target_parameters`: paths of the experts' tensors, and of weights of MLP linears next to them, whose names PEFT would
    match with those tensors"""
    fan_in_fan_out: bool = False
    """some base weights are (in, out)"""


@dataclass(eq=False)
class Adapter:
    """Weights of one LoRA adapter: module path -> A of shape (rank, in) and B of shape (out, rank), float32.

    Those of routed experts have another first dimension, experts or 1 (expert_matrices.py).
    """

    spec: LoraSpec
    a: dict[str, torch.Tensor]
    b: dict[str, torch.Tensor]
    names: PeftNames = field(default_factory=PeftNames)
    unembed: str | None = None
    """path of the head, if it has matrices"""
    experts: tuple[ExpertMatrix, ...] = ()
    """the matrices of routed experts in the tables"""
    quantization: str | None = None
    """TINKER_LOCAL_QUANTIZATION of the base model that it was trained on"""

    def parameters(self) -> list[torch.Tensor]:
        """All matrices: A and B of each module, modules sorted by name."""
        return [matrix for name in sorted(self.a) for matrix in (self.a[name], self.b[name])]

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """`parameters` with PEFT's names."""
        for name in sorted(self.a):
            yield f"{name}.lora_A.weight", self.a[name]
            yield f"{name}.lora_B.weight", self.b[name]

    def experts_at(self, path: str) -> Sequence[ExpertMatrix]:
        """The matrices on the experts module at this path."""
        return self._experts_by_path.get(path, ())

    @cached_property
    def _experts_by_path(self) -> dict[str, list[ExpertMatrix]]:
        by_path: dict[str, list[ExpertMatrix]] = {}
        for matrix in self.experts:
            by_path.setdefault(matrix.module, []).append(matrix)
        return by_path

    def snapshot(self, dtype: torch.dtype) -> Adapter:
        """A frozen copy to sample from, in the dtypes that training computes in: the model's, and float32 at the head."""

        def frozen(table: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            return {
                name: matrix.detach().to(torch.float32 if name == self.unembed else dtype, copy=True)
                for name, matrix in table.items()
            }

        return replace(self, a=frozen(self.a), b=frozen(self.b))


Rows = slice | torch.Tensor
"""The rows of a packed batch that use one adapter: a slice if they are contiguous, else an index tensor."""

Spans = list[tuple[Rows, Adapter]]
"""Which rows use which adapter. Rows in no span use the base model alone."""


AddLora = Callable[[str, torch.Tensor, torch.Tensor], None]
"""(path of a linear, its input (rows, in), its output (rows, out)): adds the adapters' deltas to the output in place."""


@dataclass
class AdapterRouting:
    """Which rows of the current forward pass use which adapter. Owned by the engine's worker thread."""

    spans: Spans = field(default_factory=list)
    add: AddLora | None = None
    """used instead of `spans` when the adapters are in slots (cuda/adapter_slots.py)"""
    slots: ExpertSlots | None = None
    """with `add`: the adapters on routed experts"""

    @contextmanager
    def use(self, spans: Spans) -> Iterator[None]:
        """Within: forward passes use these adapters; adapters in slots are unchanged."""
        previous, self.spans = self.spans, spans
        try:
            yield
        finally:
            self.spans = previous

    @contextmanager
    def use_slots(self, add: AddLora, slots: ExpertSlots | None) -> Iterator[None]:
        """Within: forward passes without spans use the adapters in slots."""
        previous = self.add, self.slots
        self.add, self.slots = add, slots
        try:
            with self.use([]):
                yield
        finally:
            self.add, self.slots = previous


def spans_of(adapters: Adapter | Spans | None) -> Spans:
    """Spans unchanged; an adapter as one span of all rows; None (the base model) as no span."""
    if isinstance(adapters, list):
        return adapters
    return [] if adapters is None else [(slice(None), adapters)]


def group_rows(adapters: Sequence[Adapter | None], device: torch.device) -> Spans:
    """Route row i through adapters[i]; rows with None are in no span. Index tensors are on `device`."""
    by_id: dict[int, tuple[Adapter, list[int]]] = {}
    for row, adapter in enumerate(adapters):
        if adapter is not None:
            by_id.setdefault(id(adapter), (adapter, []))[1].append(row)
    spans: Spans = []
    for adapter, rows in by_id.values():
        if rows[-1] - rows[0] + 1 == len(rows):
            whole = len(rows) == len(adapters)
            spans.append((slice(None) if whole else slice(rows[0], rows[-1] + 1), adapter))
        else:
            spans.append((torch.tensor(rows, device=device), adapter))
    return spans


def owners_of(spans: Spans, rows: int) -> list[Adapter | None] | None:
    """The adapter of each row; None if all have the same one."""
    if not spans or (isinstance(spans[0][0], slice) and spans[0][0] == slice(None)):
        return None
    owners: list[Adapter | None] = [None] * rows
    for which, adapter in spans:
        for row in which.tolist() if isinstance(which, torch.Tensor) else range(rows)[which]:
            owners[row] = adapter
    return owners


class _TrainedProduct(torch.autograd.Function):
    """x @ weight.T + bias, plus scale * (x @ a.T) @ b.T on ranges of the outputs, with gradients for x, a and b only.

    `columns` are the ranges (first output, number of outputs); `matrices` are all A, then all B.
    Autograd's graph of this would write three more tensors of the size of x or of the result.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | QuantizedLinear,
        bias: torch.Tensor | None,
        scale: float,
        columns: Sequence[tuple[int, int]],
        *matrices: torch.Tensor,
    ) -> torch.Tensor:
        rows, count = x.flatten(0, -2), len(columns)
        a, b = matrices[:count], matrices[count:]
        ctx.ranks = [len(matrix) for matrix in a]
        joined_a = (torch.cat(a) if count > 1 else a[0].detach()).to(x.dtype)
        inner = linear(rows, joined_a)
        is_plain = isinstance(weight, torch.Tensor)
        y = linear(rows, weight, bias) if is_plain else weight.product(rows)
        for (first, size), inner_i, b_i in zip(columns, inner.split(ctx.ranks, dim=1), b, strict=True):
            y.narrow(1, first, size).addmm_(inner_i, b_i.to(x.dtype).t(), alpha=scale)
        ctx.save_for_backward(x, weight if is_plain else None, joined_a, inner, *matrices)
        ctx.scale, ctx.columns, ctx.quantized = scale, columns, None if is_plain else weight
        # Not a view, because models such as OLMo modify it in place.
        return torch.ops.aten._unsafe_view(y, [*x.shape[:-1], y.shape[1]])

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *outputs: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        x, weight, joined_a, inner, *matrices = ctx.saved_tensors
        count, rows = len(ctx.columns), x.detach().flatten(0, -2)
        b = [matrix.detach() for matrix in matrices[count:]]
        grad_y = outputs[0].flatten(0, -2).contiguous()
        grad_columns = [grad_y.narrow(1, first, size) for first, size in ctx.columns]
        grad_inner = [linear(grad_y_i, b_i.to(grad_y.dtype).t()) for grad_y_i, b_i in zip(grad_columns, b, strict=True)]
        joined_grad_inner = (torch.cat(grad_inner, dim=1) if count > 1 else grad_inner[0]).mul_(ctx.scale)
        grad_a = linear(joined_grad_inner.t(), rows.t()).split(ctx.ranks)
        grad_b = [
            linear(inner_i.t(), grad_y_i.t()).t()
            for inner_i, grad_y_i in zip(inner.mul(ctx.scale).split(ctx.ranks, dim=1), grad_columns, strict=True)
        ]
        grad_x = None
        if ctx.needs_input_grad[0]:  # not in the first layer
            weight = weight if ctx.quantized is None else ctx.quantized.dequantized(grad_y.dtype)
            grad_x = linear(grad_y, weight.t()).addmm_(joined_grad_inner, joined_a).view(x.shape)
        grad_matrices = [
            gradient.to(matrix.dtype) for gradient, matrix in zip([*grad_a, *grad_b], matrices, strict=True)
        ]
        return grad_x, None, None, None, None, *grad_matrices


@dataclass(frozen=True, eq=False)
class Factors:
    """An adapter's matrices for one product."""

    a: torch.Tensor
    """(ranks, in): the concatenated A matrices"""
    parts: list[tuple[slice, slice, torch.Tensor]]
    """columns of the output, ranks, and B transposed (rank, out)"""


Linear = nn.Linear | Conv1D | QuantizedLinear
"""Modules to which an adapter can be added."""


class LoraLinear(nn.Module):
    """A linear with an adapter per row; or several linears with the same input as one product.

    Args:
        base: an `nn.Linear`; transformers' Conv1D, whose weight (in, out) is viewed as (out, in); or a QuantizedLinear, which
            computes its products itself, so that there is no `weight`.
        part: part of the model; BaseModel sets it to "attn" where the check at load shows attention.
    """

    def __init__(self, base: Linear, name: str, routing: AdapterRouting, part: Part = "mlp"):
        super().__init__()
        self.is_transposed = isinstance(base, Conv1D)
        self.quantized: QuantizedLinear | None = None
        if isinstance(base, QuantizedLinear):
            self.quantized, self.bias, self.is_transposed = base, None, base.is_transposed
            self.out_features, self.in_features = base.out_features, base.in_features
        else:
            self.weight = nn.Parameter(base.weight.t(), requires_grad=False) if self.is_transposed else base.weight
            self.bias = base.bias
            self.out_features, self.in_features = self.weight.shape
        self.name = name
        self.part: Part = part
        self.routing = routing
        self.sizes = {name: self.out_features}
        """number of outputs of each linear in the product, by its path in the model"""
        self._factors: weakref.WeakKeyDictionary[Adapter, Factors | None] = weakref.WeakKeyDictionary()

    @classmethod
    def joined(cls, parts: Sequence[LoraLinear]) -> LoraLinear:
        """Join linears with the same input: (rows, in) -> (rows, out of the first, of the second, ...).

        Their weights become views of the joined one.
        """
        sizes = [part.out_features for part in parts]
        with torch.device("meta"):
            base = nn.Linear(parts[0].in_features, sum(sizes), bias=False)
        base.weight = nn.Parameter(torch.cat([part.weight for part in parts]), requires_grad=False)
        biases: list[torch.Tensor] = [part.bias for part in parts if part.bias is not None]
        if biases:
            base.bias = nn.Parameter(torch.cat(biases), requires_grad=False)
        for part, rows in zip(parts, base.weight.split(sizes), strict=True):
            part.weight = nn.Parameter(rows, requires_grad=False)
        joined = cls(base, "+".join(part.name for part in parts), parts[0].routing)
        joined.sizes = {part.name: part.out_features for part in parts}
        return joined

    def shapes(self, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of an adapter's A and B."""
        return (rank, self.in_features), (self.out_features, rank)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the linear and the adapters of the current pass: (1, rows, in) or (rows, in) -> the same with out."""
        y = self.product(x, self.routing.spans)
        if self.routing.add is not None:
            self.routing.add(self.name, x.flatten(0, -2), y.flatten(0, -2))
        return y

    def product(self, x: torch.Tensor, spans: Spans) -> torch.Tensor:
        """x @ weight.T + bias, plus the deltas of the rows' adapters: (..., rows, in) -> (..., rows, out).

        While autograd records, all rows must use one adapter.
        """
        if torch.is_grad_enabled() and spans:
            ((_, adapter),) = spans  # only sampling mixes adapters, or rows without one
            if trained := [name for name in self.sizes if name in adapter.a]:
                firsts = dict(zip(self.sizes, accumulate(self.sizes.values(), initial=0), strict=False))
                columns = [(firsts[name], self.sizes[name]) for name in trained]
                matrices = [table[name] for table in (adapter.a, adapter.b) for name in trained]
                weight = self.weight if self.quantized is None else self.quantized
                y = _TrainedProduct.apply(x, weight, self.bias, adapter.spec.scale, columns, *matrices)
                return cast(torch.Tensor, y)
        y = linear(x, self.weight, self.bias) if self.quantized is None else self.quantized(x)
        if spans:
            self.add(x.flatten(0, -2), y.flatten(0, -2), spans)
        return y

    def add(self, x_RI: torch.Tensor, y_RO: torch.Tensor, spans: Spans) -> None:
        """Add the adapters' deltas to the output, computed in the dtype of x; not recorded by autograd."""
        for rows, adapter in spans:
            factors, scale = self.factors(adapter, x_RI.dtype), adapter.spec.scale
            if factors is None:
                continue
            selected = x_RI.index_select(0, rows) if isinstance(rows, torch.Tensor) else x_RI[rows]
            inner = linear(selected, factors.a)
            for columns, ranks, b in factors.parts:
                if isinstance(rows, torch.Tensor):
                    y_RO[:, columns].index_add_(0, rows, inner[:, ranks] @ b, alpha=scale)
                else:
                    y_RO[rows, columns].addmm_(inner[:, ranks], b, alpha=scale)

    def factors(self, adapter: Adapter, dtype: torch.dtype) -> Factors | None:
        """The adapter's matrices for this product, cached if it is frozen. None if it has none."""
        if adapter in self._factors:
            return self._factors[adapter]
        parts: list[tuple[slice, slice, torch.Tensor]] = []
        first, rank = 0, 0
        for name, size in self.sizes.items():
            if name in adapter.a:
                b = adapter.b[name]
                parts.append((slice(first, first + size), slice(rank, rank + b.shape[1]), b.detach().to(dtype).t()))
                rank += b.shape[1]
            first += size
        matrices = [adapter.a[name].detach() for name in self.sizes if name in adapter.a]
        joined = torch.cat(matrices) if len(matrices) > 1 else matrices[0] if matrices else None
        factors = None if joined is None else Factors(joined.to(dtype), parts)
        if not any(adapter.a[name].requires_grad for name in self.sizes if name in adapter.a):
            self._factors[adapter] = factors
        return factors
