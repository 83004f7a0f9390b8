"""Checkpoint formats of adapters on routed experts other than PEFT's (expert_matrices.py): stacked, and one expert at a time.

Stacked, a factor of all experts of a layer is one tensor (experts or 1, rank, in) or (experts or 1, out, rank), named
`<experts>.w1.lora_A.weight`: w1 is gate, w2 down and w3 up. For experts without a gate, w1 is up, and w3 is written as a copy,
because vLLM requires all three. Hosted checkpoints have this format, and vLLM reads it with `enable_moe_shared_loras`. One at a
time, the names are `<experts>.<number>.gate_proj`, as in adapters of models whose experts are linears.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import torch

from tinker_local_backend.engine.model.expert_matrices import ExpertMatrix, Tables

LEAVES = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
"""Stacked name -> PEFT's name, for experts with a gate."""

_SINGLE = re.compile(r"(?P<module>.*\.experts)\.(?P<number>\d+)\.(?P<leaf>\w+)\.lora_(?P<factor>[AB])\.weight")
_STACKED = re.compile(r"(?P<module>.*\.experts)\.(?P<which>w[123])\.lora_(?P<factor>[AB])\.weight")


def is_stacked(name: str) -> bool:
    """Whether a tensor of this name belongs to stacked experts."""
    return _STACKED.fullmatch(name) is not None


def is_single(name: str) -> bool:
    """Whether a tensor of this name belongs to one expert."""
    return _SINGLE.fullmatch(name) is not None


def to_stacked(matrices: Sequence[ExpertMatrix], tables: Tables) -> dict[str, torch.Tensor]:
    """The stacked tensors of all layers, by name. Factors shared by experts are not repeated; A shared by gate and up is."""
    tensors: dict[str, torch.Tensor] = {}
    for matrix in matrices:
        a, b = tables[0][matrix.name], tables[1][matrix.name]
        if matrix.leaf == "gate_up_proj":
            parts = dict(zip(("w1", "w3"), _halves(matrix), strict=True))
        else:
            parts = dict.fromkeys(_names(matrix), slice(None))
        for i, (which, columns) in enumerate(parts.items()):
            # safetensors does not save shared memory.
            tensors[f"{matrix.module}.{which}.lora_A.weight"] = a.clone() if i else a
            tensors[f"{matrix.module}.{which}.lora_B.weight"] = b[:, columns].clone() if len(parts) > 1 else b
    return tensors


def from_stacked(matrices: Sequence[ExpertMatrix], rank: int, tensors: Mapping[str, torch.Tensor]) -> Tables:
    """The inverse of `to_stacked`. Raises ValueError if names or shapes do not match."""
    tables: tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]] = {}, {}
    known: set[str] = set()

    def part(matrix: ExpertMatrix, which: str, factor: str, shape: tuple[int, ...]) -> torch.Tensor:
        name = f"{matrix.module}.{which}.lora_{factor}.weight"
        known.add(name)
        if name not in tensors:
            raise ValueError(f"{name} is missing")
        return _fitted(name, tensors[name], shape)

    for matrix in matrices:
        of_a, of_b = matrix.shapes(rank)
        if matrix.leaf != "gate_up_proj":
            which, *copies = _names(matrix)
            known.update(f"{matrix.module}.{copy}.lora_{factor}.weight" for copy in copies for factor in "AB")
            tables[0][matrix.name] = part(matrix, which, "A", of_a)
            tables[1][matrix.name] = part(matrix, which, "B", of_b)
            continue
        gate, up = (part(matrix, which, "A", of_a) for which in ("w1", "w3"))
        if not torch.equal(gate, up):
            raise ValueError(f"gate and up of {matrix.module} have different A, this layout has one for both")
        joined = gate.new_empty(of_b)
        half = (of_b[0], of_b[1] // 2, of_b[2])
        for which, columns in zip(("w1", "w3"), _halves(matrix), strict=True):
            joined[:, columns] = part(matrix, which, "B", half)
        tables[0][matrix.name], tables[1][matrix.name] = gate, joined
    if beyond := sorted(tensors.keys() - known):
        raise ValueError(f"{beyond[0]} has no place in the model")
    return tables


def stacked_of(
    tensors: Mapping[str, torch.Tensor], matrices: Sequence[ExpertMatrix]
) -> Mapping[str, torch.Tensor] | None:
    """The stacked tensors, from the stacked format or from one expert at a time; None for any other format.

    Raises ValueError if some experts are missing.
    """
    if any(is_stacked(name) for name in tensors):
        return tensors
    parts = {name: _SINGLE.fullmatch(name) for name in tensors}
    if not all(parts.values()):
        return None
    numbers = {matrix.module: matrix.experts for matrix in matrices}
    gated = {matrix.module for matrix in matrices if matrix.tensor == "gate_up_proj"}
    which = {(leaf, True): which for which, leaf in LEAVES.items()} | {
        ("up_proj", False): "w1",
        ("down_proj", False): "w2",
    }
    by_name: dict[str, dict[int, torch.Tensor]] = {}
    for name, match in parts.items():
        assert match is not None
        module, number, leaf, factor = match.groups()
        stack = which.get((leaf, module in gated))
        if stack is None:
            raise ValueError(f"{name} has no place in the model")
        by_name.setdefault(f"{module}.{stack}.lora_{factor}.weight", {})[int(number)] = tensors[name]
    for name, by_number in by_name.items():
        module = name.rpartition(".experts.")[0] + ".experts"
        if missing := set(range(numbers[module])) ^ by_number.keys():
            raise ValueError(f"{name} of expert {min(missing)} is missing, or the model has no such expert")
    return {name: torch.stack([by_number[i] for i in sorted(by_number)]) for name, by_number in by_name.items()}


def one_by_one(matrices: Sequence[ExpertMatrix], tables: Tables) -> dict[str, torch.Tensor]:
    """A (rank, in) and B (out, rank) of each expert, by name."""
    gated = {matrix.module for matrix in matrices if matrix.tensor == "gate_up_proj"}
    numbers = {matrix.module: matrix.experts for matrix in matrices}
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in to_stacked(matrices, tables).items():
        parts = _STACKED.fullmatch(name)
        assert parts is not None
        module, which, factor = parts.groups()
        leaf = LEAVES[which] if module in gated or which == "w2" else "up_proj"
        for i, part in enumerate(tensor.expand(numbers[module], -1, -1)):
            tensors[f"{module}.{i}.{leaf}.lora_{factor}.weight"] = part.clone()
    return tensors


def _names(matrix: ExpertMatrix) -> tuple[str, ...]:
    """The stacked names of a matrix."""
    if matrix.tensor == "up_proj":
        return "w1", "w3"
    return tuple(which for which, leaf in LEAVES.items() if leaf == matrix.leaf)


def _halves(matrix: ExpertMatrix) -> tuple[slice, slice]:
    """The gate outputs and the up outputs of the matrix of both."""
    half = matrix.out_features // 2
    if matrix.interleaved:
        return slice(0, None, 2), slice(1, None, 2)
    return slice(0, half), slice(half, None)


def _fitted(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """The tensor expanded to `shape`; if the experts share one factor there, equal ones are reduced to one."""
    if tensor.dim() != 3 or tensor.shape[1:] != shape[1:]:
        raise ValueError(f"{name} has the shape {tuple(tensor.shape)}, expected {shape}")
    if shape[0] == 1 and len(tensor) > 1:
        if not torch.equal(tensor, tensor[:1].expand_as(tensor)):
            raise ValueError(f"{name} has different factors per expert where this layout shares one")
        return tensor[:1]
    if len(tensor) not in (1, shape[0]):
        raise ValueError(f"{name} has {len(tensor)} experts, the model has {shape[0]}")
    return tensor.expand(shape)
