"""The matrices of an adapter on routed experts: their names and shapes, and how PEFT stores them.

transformers keeps the experts of a layer in three-dimensional tensors, one for gate and up together (or up alone) and one for
down. PEFT adapts such a tensor with `target_parameters`: one two-dimensional A and B for all experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

import torch

from tinker_local_backend.engine.model.lora_spec import ExpertLayout

Tables = tuple[Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]]
"""A and B by name."""


@dataclass(frozen=True)
class ExpertMatrix:
    """One low-rank update of a layer's experts: of a whole tensor, or of its gate or up columns."""

    module: str
    """path of the experts in the model"""
    tensor: Literal["gate_up_proj", "up_proj", "down_proj"]
    leaf: str
    """`gate_proj`, `up_proj`, `gate_up_proj` or `down_proj`"""
    experts: int
    in_features: int
    out_features: int
    columns: slice
    """of the tensor's outputs"""
    shared: Literal["a", "b"] | None = None
    """the factor that all experts share"""
    interleaved: bool = False
    """the outputs of `gate_up_proj` alternate between gate and up"""

    part: Literal["mlp"] = "mlp"

    @property
    def name(self) -> str:
        return f"{self.module}.{self.leaf}"

    def shapes(self, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of A (experts or 1, rank, in) and B (experts or 1, out, rank)."""
        of_a, of_b = (1 if self.shared == factor else self.experts for factor in ("a", "b"))
        return (of_a, rank, self.in_features), (of_b, self.out_features, rank)


def matrices_of(path: str, experts: Any, layout: ExpertLayout) -> list[ExpertMatrix]:
    """The matrices of an experts module (of transformers' experts interface) at this path, in this layout."""
    if layout == "frozen":
        return []
    first = "gate_up_proj" if experts.has_gate else "up_proj"
    matrices: list[ExpertMatrix] = []
    for tensor in (first, "down_proj"):
        number, *sizes = getattr(experts, tensor).shape
        width, outputs = sizes if experts.is_transposed else reversed(sizes)
        if layout == "per_expert" or tensor != "gate_up_proj":
            shared = None if layout == "per_expert" else "b" if tensor == "down_proj" else "a"
            interleaved = tensor == "gate_up_proj" and not experts.is_concatenated
            matrices.append(
                ExpertMatrix(path, tensor, tensor, number, width, outputs, slice(0, outputs), shared, interleaved)
            )
            continue
        half = outputs // 2
        joined = (slice(0, half), slice(half, outputs)), (slice(0, outputs, 2), slice(1, outputs, 2))
        for leaf, columns in zip(("gate_proj", "up_proj"), joined[not experts.is_concatenated], strict=True):
            matrices.append(ExpertMatrix(path, tensor, leaf, number, width, half, columns, "a"))
    return matrices


def by_tensor(matrices: Sequence[ExpertMatrix]) -> list[list[ExpertMatrix]]:
    """Group the matrices by tensor."""
    return [list(group) for _, group in groupby(matrices, key=lambda matrix: (matrix.module, matrix.tensor))]


def peft_path(matrix: ExpertMatrix) -> str:
    """The path of an update in PEFT, whose wrapper of `down_proj` contains the wrapper of the other tensor."""
    return matrix.module if matrix.tensor == "down_proj" else f"{matrix.module}.base_layer"


def to_peft(matrices: Sequence[ExpertMatrix], tables: Tables) -> dict[str, torch.Tensor]:
    """PEFT's A (experts * ranks, in) and B (out, ranks * experts) of every tensor, by name.

    Shared factors are repeated for each expert. Gate and up, which are one tensor, become one matrix of twice the rank with a
    block-diagonal B. Differentiable.
    """
    tensors: dict[str, torch.Tensor] = {}
    for group in by_tensor(matrices):
        rank, number = tables[0][group[0].name].shape[1], group[0].experts
        outputs = sum(matrix.out_features for matrix in group)
        a = torch.cat([tables[0][matrix.name].expand(number, -1, -1) for matrix in group], dim=1)
        b = a.new_zeros(number, outputs, rank * len(group))
        for i, matrix in enumerate(group):
            b[:, matrix.columns, i * rank : (i + 1) * rank] = tables[1][matrix.name]
        path = peft_path(group[0])
        tensors[f"{path}.lora_A.weight"] = a.flatten(0, 1)
        tensors[f"{path}.lora_B.weight"] = b.permute(1, 2, 0).flatten(1)
    return tensors


def from_peft(matrices: Sequence[ExpertMatrix], rank: int, tensors: Mapping[str, torch.Tensor]) -> Tables:
    """The inverse of `to_peft`. Raises ValueError if the tensors have another layout."""
    tables: tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]] = {}, {}
    for group in by_tensor(matrices):
        path, number, ranks = peft_path(group[0]), group[0].experts, rank * len(group)
        a, b = (tensors[f"{path}.lora_{factor}.weight"] for factor in "AB")
        outputs = sum(matrix.out_features for matrix in group)
        expected = (number * ranks, group[0].in_features), (outputs, ranks * number)
        if (a.shape, b.shape) != expected:
            shapes = f"{tuple(a.shape)} and {tuple(b.shape)}, expected {expected[0]} and {expected[1]}"
            raise ValueError(f"the experts' matrices of {path} have the shapes {shapes}")
        a, b = a.unflatten(0, (number, ranks)), b.unflatten(1, (ranks, number)).permute(2, 0, 1).clone()
        for i, matrix in enumerate(group):
            at = slice(i * rank, (i + 1) * rank)
            parts = {"a": a[:, at], "b": b[:, matrix.columns, at].clone()}
            if matrix.shared is not None:
                shared = parts[matrix.shared]
                if not torch.equal(shared, shared[:1].expand_as(shared)):
                    raise ValueError(f"the experts of {path} have separate factors where this layout shares one")
                parts[matrix.shared] = shared[:1]
            tables[0][matrix.name], tables[1][matrix.name] = parts["a"], parts["b"]
            b[:, matrix.columns, at] = 0
        if b.any():
            raise ValueError(f"the experts of {path} have one matrix for gate and up, this layout has one for each")
    return tables


@dataclass(frozen=True, eq=False)
class ExpertSlots:
    """Adapters on routed experts in slots at fixed addresses (cuda/adapter_slots.py), and the slot of each row of a pass."""

    slots_R: torch.Tensor
    """int64; the last slot is zero, for rows without an adapter"""
    scales: torch.Tensor
    """(slots,) float32"""
    matrices: Mapping[str, Sequence[ExpertMatrix]]
    """by path of the experts"""
    a: Mapping[str, torch.Tensor]
    """(experts or 1, slots, rank, in) by name"""
    b: Mapping[str, torch.Tensor]
    """(experts or 1, slots, out, rank) by name"""
