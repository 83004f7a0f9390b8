"""Read an adapter written by a hosted service or by PEFT into the engine's tables; the model's weights are not needed.

Routed experts may be in any form of adapter_forms.py. Hosted names of linears are those of transformers with few exceptions.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from tinker_local_backend.engine.model.expert_matrices import ExpertMatrix, Tables, from_peft, matrices_of, peft_path
from tinker_local_backend.engine.model.experts import routed_experts
from tinker_local_backend.engine.model.loading import empty_module, model_config
from tinker_local_backend.engine.model.lora import Adapter, AdapterRouting
from tinker_local_backend.engine.model.lora_spec import ExpertLayout, LoraSpec
from tinker_local_backend.engine.model.lora_targets import LoraTargets, install_lora
from tinker_local_backend.engine.model.stacked_experts import from_stacked, is_single, is_stacked, stacked_of
from tinker_local_backend.errors import CheckpointError
from tinker_local_backend.storage.adapter_forms import PEFT_PREFIX
from tinker_local_backend.storage.checkpoints import write_adapter
from tinker_local_backend.storage.info import ADAPTER_FILE, CONFIG_FILE, read_object

_RENAMED = ((".attn.", ".self_attn."), ("model.", "model.language_model."), ("model.", "backbone."))
"""(part of a hosted name, transformers' name in some models)"""

_TENSORS_IN_VLLM = ("gpt_oss", "qwen3_5_moe", "qwen3_vl_moe")
"""Model types with `is_3d_moe_weight` in vLLM 0.32, which reads PEFT's form for them, and one expert at a time for others."""

_HEADS = ("unembed_tokens", "lm_head")

_HOSTED = re.compile(r"base_model\.model\.model\.(unembed_tokens|lm_head|layers\.\d+\.attn)\.")
_OF_EXPERTS = re.compile(r"\.experts\.(base_layer|lora_[AB]|w[123]|\d+)\.")
_FACTOR = re.compile(r"(?P<path>.*)\.lora_(?P<factor>[AB])(\.default)?\.weight")


class _AdapterTargets:
    """The linears and experts of a model that an adapter can target, by path."""

    def __init__(self, base_model: str):
        module = empty_module(base_model)
        experts, head = routed_experts(module), module.get_output_embeddings()
        paths = {child: path for path, child in module.named_modules()}
        self.head = paths[head]
        self.experts = {paths[one]: one for one in experts if hasattr(one, "is_concatenated")}
        routing = AdapterRouting()
        self.linears = install_lora(module, routing, experts)
        for path, linear in self.linears.items():
            # Attention is recognised only in a forward pass. These suffice for `peft_names`, which separates expert tensors.
            linear.part = "mlp" if path.endswith("_proj") and ".mlp." in path else "attn"
        self.lora_targets = LoraTargets(base_model, module, self.linears, experts, routing)

    def find(self, path: str) -> str | None:
        """transformers' path for a path in a file."""
        if path.rpartition(".")[2] in _HEADS:
            return self.head
        known = self.linears.keys() | self.experts.keys()
        return next((name for name in _names(path) if name in known), None)


def in_form(folder: Path, target: Path, base_model: str, for_vllm: bool = False) -> Path:
    """The folder itself if its adapter needs no conversion, else `target`, to which `convert_adapter` writes it."""
    if is_foreign(folder) or (for_vllm and has_experts(folder)):
        convert_adapter(folder, target, base_model, for_vllm)
        return target
    return folder


def has_experts(folder: Path) -> bool:
    """Whether an adapter has tensors of routed experts. Raises CheckpointError."""
    return any(_OF_EXPERTS.search(name) for name in _tensor_names(folder))


def is_foreign(folder: Path) -> bool:
    """Whether an adapter's tensor names differ from PEFT's, so that it needs `convert_adapter`. Raises CheckpointError."""
    return any(is_stacked(name) or is_single(name) or _HOSTED.match(name) for name in _tensor_names(folder))


def convert_adapter(folder: Path, target: Path, base_model: str, for_vllm: bool = False) -> None:
    """Rewrite an adapter with its experts in PEFT's form, or in the form that vLLM loads without extra options.

    Raises the errors of `read_adapter`, and CheckpointWriteError.
    """
    keeps_tensors = model_config(base_model).model_type in _TENSORS_IN_VLLM
    write_adapter(
        target, read_adapter(folder, base_model), base_model, "one_by_one" if for_vllm and not keeps_tensors else "peft"
    )


def read_adapter(folder: Path, base_model: str) -> Adapter:
    """The adapter of a folder with adapter_config.json and adapter_model.safetensors, in float32 or as saved.

    If the file has separate gate and up matrices of experts that share no factor, its tables do too; such an adapter has none of
    the engine's layouts, but can be written in every form.

    Raises:
        CheckpointError: it is missing or damaged, is not a plain LoRA adapter of one rank, or does not fit the model.
        ModelLoadError: the model does not exist.
    """
    config, tensors = read_config(folder), _read_tensors(folder)
    rank, alpha = _rank_and_alpha(folder, config)
    targets = _AdapterTargets(base_model)
    a: dict[str, torch.Tensor] = {}
    b: dict[str, torch.Tensor] = {}
    expert_tensors: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        parts = _FACTOR.fullmatch(name.removeprefix(PEFT_PREFIX))
        if parts is None:
            raise CheckpointError(f"the adapter in {folder} has {name}, which is not a LoRA matrix")
        path, factor = parts["path"], parts["factor"]
        if (module := _experts_name(path, targets)) is not None:
            expert_tensors[f"{module}.lora_{factor}.weight"] = tensor
            continue
        linear = targets.find(path)
        if linear is None or linear not in targets.linears:
            raise CheckpointError(
                f"the adapter in {folder} has {path}, which is neither a linear nor experts of {base_model!r}; give the model "
                "that it was trained on, if its linears are the same there"
            )
        expected = targets.linears[linear].shapes(rank)["AB".index(factor)]
        if tuple(tensor.shape) != expected:
            raise CheckpointError(
                f"the adapter in {folder}: {path} has lora_{factor} of shape {tuple(tensor.shape)}, expected {expected}"
            )
        (a if factor == "A" else b)[linear] = tensor
    if a.keys() != b.keys():
        raise CheckpointError(f"the adapter in {folder} lacks a factor of {min(a.keys() ^ b.keys())}")
    layout, matrices, tables = _experts(folder, targets, rank, expert_tensors)
    a |= tables[0]
    b |= tables[1]
    names = targets.lora_targets.peft_names(a, matrices)
    spec = LoraSpec(rank, alpha=alpha, experts=layout)
    return Adapter(spec, a, b, names, targets.head if targets.head in a else None, tuple(matrices))


def read_config(folder: Path) -> dict[str, Any]:
    """adapter_config.json of an adapter's folder. Raises CheckpointError if it is damaged or an adapter file is missing."""
    _check_there(folder)
    try:
        return read_object(folder / CONFIG_FILE)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"the adapter in {folder} is damaged: {error}") from error


def _read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """The non-empty tensors: the hosted service writes empty ones for matrices that a model lacks."""
    try:
        tensors = load_file(folder / ADAPTER_FILE)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"the adapter in {folder} is damaged: {error}") from error
    return {name: tensor for name, tensor in tensors.items() if tensor.numel()}


def _tensor_names(folder: Path) -> list[str]:
    _check_there(folder)
    try:
        with safe_open(folder / ADAPTER_FILE, "pt") as file:
            return list(file.keys())
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"the adapter in {folder} is damaged: {error}") from error


def _check_there(folder: Path) -> None:
    for file in (CONFIG_FILE, ADAPTER_FILE):
        if not (folder / file).is_file():
            raise CheckpointError(f"{folder} has no PEFT adapter: {file} is missing")


def _rank_and_alpha(folder: Path, config: Mapping[str, Any]) -> tuple[int, float]:
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or not isinstance(alpha, int | float):
        raise CheckpointError(f"the adapter in {folder}: {CONFIG_FILE} lacks r or lora_alpha")
    for option in ("use_dora", "use_rslora", "lora_bias"):
        if config.get(option):
            raise CheckpointError(f"the adapter in {folder} has {option}=true, which this engine does not support")
    return rank, float(alpha)


def _names(path: str) -> Iterator[str]:
    yield path
    for theirs, ours in _RENAMED:
        yield path.replace(theirs, ours, 1)


def _experts_name(path: str, targets: _AdapterTargets) -> str | None:
    """The name of a matrix of experts with transformers' path of the experts; None if it is not of experts."""
    before, separator, after = path.rpartition(".experts")
    if not separator or (after and not after.startswith(".")):
        return None
    module = targets.find(f"{before}.experts")
    return None if module is None or module not in targets.experts else module + after


def _experts(
    folder: Path, targets: _AdapterTargets, rank: int, tensors: dict[str, torch.Tensor]
) -> tuple[ExpertLayout, list[ExpertMatrix], Tables]:
    """The layout of the experts in a file, their matrices and tables."""
    if not tensors:
        return "frozen", [], ({}, {})
    adapted = {
        path: one for path, one in targets.experts.items() if any(name.startswith(f"{path}.") for name in tensors)
    }
    shared, joined = (
        [matrix for path, one in adapted.items() for matrix in matrices_of(path, one, layout)]
        for layout in ("shared_outer", "per_expert")
    )
    separate = [replace(matrix, shared=None) for matrix in shared]
    stacked = stacked_of(tensors, shared)
    layouts: tuple[ExpertLayout, ...] = ("shared_outer", "per_expert", "per_expert")
    errors: list[str] = []
    for layout, matrices in zip(layouts, (shared, joined, separate), strict=True):
        try:
            if stacked is None:
                unmatched = {
                    f"{peft_path(m)}.lora_{factor}.weight" for m in matrices for factor in "AB"
                } ^ tensors.keys()
                if unmatched:
                    raise ValueError(f"{min(unmatched)} is missing, or does not exist in the model")
                return layout, matrices, from_peft(matrices, rank, tensors)
            return layout, matrices, from_stacked(matrices, rank, stacked)
        except ValueError as error:
            errors.append(str(error))
    raise CheckpointError(f"the adapter in {folder} does not fit the base model: {errors[0]}")
