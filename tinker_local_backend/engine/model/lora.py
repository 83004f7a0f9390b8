"""LoRA adapters that live outside the model: one base model, any number of adapters, each row of a batch with its own.

A `LoraLinear` replaces an `nn.Linear` and looks up, at each call, which rows belong to which adapter (`AdapterRouting`).
An `Adapter` is a plain table of A and B matrices in float32; training updates it in place, `snapshot()` freezes a copy.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, cast

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from tinker_local_backend.engine.model.lora_spec import ATTENTION_MODULES, MLP_MODULES, UNEMBED_MODULE, LoraSpec
from tinker_local_backend.engine.model.products import linear
from tinker_local_backend.errors import ModelLoadError


@dataclass(eq=False)
class Adapter:
    """Weights of one LoRA adapter: module path -> A of shape (rank, in) and B of shape (out, rank), float32."""

    spec: LoraSpec
    a: dict[str, torch.Tensor]
    b: dict[str, torch.Tensor]
    beside_experts: bool = False
    """the model also has routed experts, which no adapter changes"""

    def parameters(self) -> list[torch.Tensor]:
        """All matrices in a fixed order: A and B of each module, modules by name."""
        return [matrix for name in sorted(self.a) for matrix in (self.a[name], self.b[name])]

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The same, named as PEFT names them."""
        for name in sorted(self.a):
            yield f"{name}.lora_A.weight", self.a[name]
            yield f"{name}.lora_B.weight", self.b[name]

    def snapshot(self, dtype: torch.dtype) -> Adapter:
        """A frozen copy to sample from, in the dtypes in which training applies it: the model's, and float32 at the head."""

        def frozen(table: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            return {
                name: matrix.detach().to(torch.float32 if name.endswith(UNEMBED_MODULE) else dtype, copy=True)
                for name, matrix in table.items()
            }

        return replace(self, a=frozen(self.a), b=frozen(self.b))


def new_adapter(spec: LoraSpec, linears: dict[str, LoraLinear], seed: int, device: torch.device) -> Adapter:
    """A fresh adapter: A Kaiming-uniform (bound 1/sqrt(in), as torch initialises a linear), B zero, so it starts as identity.

    Drawn from its own generator on the CPU: the same seed gives the same adapter on any device, and no global state moves.
    """
    generator = torch.Generator().manual_seed(seed % (1 << 63))
    a: dict[str, torch.Tensor] = {}
    b: dict[str, torch.Tensor] = {}
    for name in sorted(linears):
        if name.rsplit(".", 1)[-1] not in spec.target_modules:
            continue
        out_features, in_features = linears[name].weight.shape
        bound = in_features**-0.5
        matrix = torch.rand(spec.rank, in_features, generator=generator) * (2 * bound) - bound
        a[name] = matrix.to(device).requires_grad_()
        b[name] = torch.zeros(out_features, spec.rank, device=device).requires_grad_()
    if not a:
        raise ModelLoadError(
            f"no linear of this model is named like one of {spec.target_modules}; LoRA cannot be applied"
        )
    return Adapter(spec, a, b)


def lora_widths(linears: dict[str, LoraLinear]) -> dict[str, int]:
    """Numbers that an adapter of rank 1 has: on attention (attn), MLPs (mlp) and the head (unembed)."""
    widths = {"attn": 0, "mlp": 0, "unembed": 0}
    for name, module in linears.items():
        leaf = name.rpartition(".")[2]
        part = "unembed" if leaf == UNEMBED_MODULE else "mlp" if leaf in MLP_MODULES else "attn"
        widths[part] += sum(module.weight.shape)
    return widths


Rows = slice | torch.Tensor
"""The rows of a packed batch that use one adapter: a slice when they are neighbours, else an index tensor."""

Spans = list[tuple[Rows, "Adapter"]]
"""Which rows use which adapter. Rows that are in none go through the base model alone."""


AddLora = Callable[[str, torch.Tensor, torch.Tensor], None]
"""(path of a linear, its input (rows, in), its output (rows, out)): adds what the adapters contribute to the output."""


@dataclass
class AdapterRouting:
    """Which rows of the current forward pass use which adapter. Owned by the engine's worker thread."""

    spans: Spans = field(default_factory=list)
    add: AddLora | None = None
    """in place of `spans`, where the adapters lie in slots (cuda/adapter_slots.py)"""

    @contextmanager
    def through(self, add: AddLora) -> Iterator[None]:
        """Within: `add` computes what adapters contribute."""
        before, self.add = self.add, add
        try:
            yield
        finally:
            self.add = before

    @contextmanager
    def use(self, spans: Spans) -> Iterator[None]:
        """Route the forward passes within."""
        before, self.spans = self.spans, spans
        try:
            yield
        finally:
            self.spans = before


def one_for_all(adapter: Adapter | None) -> Spans:
    """Every row through one adapter (None: the base model)."""
    return [] if adapter is None else [(slice(None), adapter)]


def group_rows(adapters: Sequence[Adapter | None], device: torch.device) -> Spans:
    """Row i through adapters[i]; rows without one are left out. Index tensors live on `device`."""
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


class _TrainedProduct(torch.autograd.Function):
    """x @ weight.T + bias, and on some ranges of the outputs scale * (x @ a.T) @ b.T, with gradients by x, a and b alone.

    Autograd's own graph of this writes three more tensors of the size of x or of the result, each of them once.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        scale: float,
        columns: Sequence[tuple[int, int]],
        *matrices: torch.Tensor,
    ) -> torch.Tensor:
        rows, count = x.flatten(0, -2), len(columns)
        a, b = [m.detach().to(x.dtype) for m in matrices[:count]], [m.to(x.dtype) for m in matrices[count:]]
        ctx.ranks = [len(part) for part in a]
        joined_a = torch.cat(a) if count > 1 else a[0]
        inner = linear(rows, joined_a)
        y = linear(rows, weight, bias)
        for (first, size), own, part in zip(columns, inner.split(ctx.ranks, dim=1), b, strict=True):
            y.narrow(1, first, size).addmm_(own, part.t(), alpha=scale)
        ctx.save_for_backward(x, weight, joined_a, inner, *matrices)
        ctx.scale, ctx.columns = scale, columns
        # Not as a view: a model could not change it in place, as OLMo does.
        return torch.ops.aten._unsafe_view(y, [*x.shape[:-1], y.shape[1]])

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *outputs: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        x, weight, joined_a, inner, *matrices = (tensor.detach() for tensor in ctx.saved_tensors)
        count, rows = len(ctx.columns), x.flatten(0, -2)
        b = matrices[count:]
        by_y = outputs[0].flatten(0, -2).contiguous()
        by_parts = [by_y.narrow(1, first, size) for first, size in ctx.columns]
        by_inner = [linear(part, own.to(by_y.dtype).t()) for part, own in zip(by_parts, b, strict=True)]
        joined_by_inner = (torch.cat(by_inner, dim=1) if count > 1 else by_inner[0]).mul_(ctx.scale)
        by_a = linear(joined_by_inner.t(), rows.t()).split(ctx.ranks)
        by_b = [
            linear(own.t(), part.t()).t().mul(ctx.scale)
            for own, part in zip(inner.split(ctx.ranks, dim=1), by_parts, strict=True)
        ]
        by_x = None
        if ctx.needs_input_grad[0]:  # not in the first layer
            by_x = linear(by_y, weight.t()).addmm_(joined_by_inner, joined_a).view(x.shape)
        by_matrices = [part.to(matrix.dtype) for part, matrix in zip([*by_a, *by_b], matrices, strict=True)]
        return by_x, None, None, None, None, *by_matrices


def trained_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    adapter: Adapter,
    parts: Sequence[tuple[str, int, int]],
) -> torch.Tensor:
    """The product with a frozen weight and an adapter that is trained, for autograd: x (..., in) -> (..., out).

    Args:
        parts: linears of which the adapter has matrices: name, first output and number of outputs.
    """
    columns = [(first, size) for _, first, size in parts]
    matrices = [table[name] for table in (adapter.a, adapter.b) for name, _, _ in parts]
    return cast(torch.Tensor, _TrainedProduct.apply(x, weight, bias, adapter.spec.scale, columns, *matrices))


@dataclass(frozen=True, eq=False)
class Factors:
    """An adapter's matrices for one product."""

    a: torch.Tensor
    """(ranks, in): the A matrices one below the other"""
    parts: list[tuple[slice, slice, torch.Tensor]]
    """columns of the output, ranks, and B transposed (rank, out)"""


class LoraLinear(nn.Module):
    """An `nn.Linear` whose rows may each go through a different adapter; or several with the same input as one product."""

    def __init__(self, base: nn.Linear, name: str, routing: AdapterRouting):
        super().__init__()
        self.weight, self.bias = base.weight, base.bias
        self.in_features, self.out_features = base.in_features, base.out_features
        self.name = name
        self.routing = routing
        self.sizes = {name: base.out_features}
        """outputs of each linear in the product, by its path in the model"""
        self._factors: weakref.WeakKeyDictionary[Adapter, Factors | None] = weakref.WeakKeyDictionary()

    @classmethod
    def joined(cls, parts: Sequence[LoraLinear]) -> LoraLinear:
        """Linears with the same input as one, (rows, in) -> (rows, out of the first, of the second, ...).

        Their weights become views of the joined one.
        """
        sizes = [part.out_features for part in parts]
        with torch.device("meta"):
            base = nn.Linear(parts[0].in_features, sum(sizes), bias=False)
        base.weight = nn.Parameter(torch.cat([part.weight for part in parts]), requires_grad=False)
        if parts[0].bias is not None:
            base.bias = nn.Parameter(torch.cat([part.bias for part in parts]), requires_grad=False)
        for part, rows in zip(parts, base.weight.split(sizes), strict=True):
            part.weight = nn.Parameter(rows, requires_grad=False)
        joined = cls(base, "+".join(part.name for part in parts), parts[0].routing)
        joined.sizes = {part.name: part.out_features for part in parts}
        return joined

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As the `nn.Linear`, through the adapters of the current pass: (1, rows, in) or (rows, in), output the same."""
        y = self.product(x, self.routing.spans)
        if self.routing.add is not None:
            self.routing.add(self.name, x.flatten(0, -2), y.flatten(0, -2))
        return y

    def product(self, x: torch.Tensor, spans: Spans) -> torch.Tensor:
        """x @ weight.T + bias, with the adapters of the rows: (..., rows, in) -> (..., rows, out).

        Where autograd records, one adapter has all rows.
        """
        if torch.is_grad_enabled() and spans:
            ((_, adapter),) = spans  # several adapters, or some of the rows, only ever meet in sampling
            firsts = accumulate(self.sizes.values(), initial=0)
            columns = zip(self.sizes, firsts, self.sizes.values(), strict=False)
            if trained := [part for part in columns if part[0] in adapter.a]:
                return trained_product(x, self.weight, self.bias, adapter, trained)
        y = linear(x, self.weight, self.bias)
        if spans:
            self.add(x.flatten(0, -2), y.flatten(0, -2), spans)
        return y

    def add(self, x_RI: torch.Tensor, y_RO: torch.Tensor, spans: Spans) -> None:
        """Add what the adapters contribute to the output, computed in the dtype of x; not recorded by autograd."""
        for rows, adapter in spans:
            factors, scale = self.factors(adapter, x_RI.dtype), adapter.spec.scale
            if factors is None:
                continue
            own = x_RI.index_select(0, rows) if isinstance(rows, torch.Tensor) else x_RI[rows]
            inner = linear(own, factors.a)
            for columns, ranks, b in factors.parts:
                if isinstance(rows, torch.Tensor):
                    y_RO[:, columns].index_add_(0, rows, inner[:, ranks] @ b, alpha=scale)
                else:
                    y_RO[rows, columns].addmm_(inner[:, ranks], b, alpha=scale)

    def factors(self, adapter: Adapter, dtype: torch.dtype) -> Factors | None:
        """Its matrices here, kept for a snapshot; one that is being trained changes. None: it has none here."""
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


def lora_targets(model: PreTrainedModel) -> Iterator[tuple[str, nn.Linear]]:
    """Every linear that LoRA may target, by its path in the model; subclasses of nn.Linear too.

    Only the stack that writes text and its head: what a multimodal model has for images is never trained here.
    """
    targets = {*ATTENTION_MODULES, *MLP_MODULES}
    decoder, head = set(text_stack(model).modules()), model.get_output_embeddings()
    for path, module in model.named_modules():
        leaf = path.rpartition(".")[2]
        wanted = leaf == UNEMBED_MODULE if module is head else module in decoder and leaf in targets
        if wanted and isinstance(module, nn.Linear):
            yield path, module


def text_stack(model: PreTrainedModel) -> nn.Module:
    """The module that holds the decoder layers of text."""
    return model.get_decoder() or model.base_model


def install_lora(model: PreTrainedModel, routing: AdapterRouting) -> dict[str, LoraLinear]:
    """Replace the targets of LoRA, in place. Returns them by their path in the model."""
    found: dict[str, LoraLinear] = {}
    for path, module in list(lora_targets(model)):
        parent_path, _, leaf = path.rpartition(".")
        found[path] = LoraLinear(module, path, routing)
        setattr(model.get_submodule(parent_path), leaf, found[path])
    return found
