"""The LoRA targets of a model: the linears of its text decoder, its head, and its routed experts."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import nn
from transformers import PreTrainedModel

from tinker_local_backend.engine.model.expert_matrices import ExpertMatrix, matrices_of
from tinker_local_backend.engine.model.experts import use_adapters
from tinker_local_backend.engine.model.lora import Adapter, AdapterRouting, Linear, LoraLinear, PeftNames
from tinker_local_backend.engine.model.lora_spec import ExpertLayout, LoraSpec, Part
from tinker_local_backend.errors import ModelLoadError, RequestError

logger = logging.getLogger(__name__)

ROUTERS = ("gate", "wg", "router", "shared_expert_gate", "classifier")
"""Names of linears that route tokens to experts, which stay frozen, as on the hosted service."""

_MAMBA_TYPES = ("falcon_h1", "mamba", "mamba2", "falcon_mamba", "nemotron_h")
"""Model types in which PEFT refuses adapters on `out_proj`: kernels read its weight without calling the linear."""

_NOT_TEXT = "embed_tokens_extend"
"""Phi-4's image and audio encoders, which are in its decoder."""

_EXPERT_NAMES = ("gate_proj", "up_proj", "gate_up_proj", "down_proj")
"""Names that PEFT matches with the experts' tensors, in models with experts."""


class Target(Protocol):
    """A linear or a tensor of experts, which an adapter has A and B for."""

    @property
    def part(self) -> Part: ...

    def shapes(self, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of A (..., rank, in) and B (..., out, rank)."""
        ...


class LoraTargets:
    """The targets of a model with the linears from `install_lora`.

    Args:
        name: of the model, for error messages.
        experts: its modules with routed experts.
    """

    def __init__(
        self,
        name: str,
        module: PreTrainedModel,
        linears: Mapping[str, LoraLinear],
        experts: Sequence[nn.Module],
        routing: AdapterRouting,
    ):
        self._name, self._linears = name, linears
        self._paths = {child: path for path, child in module.named_modules()}
        self._has_experts = bool(experts)
        self._experts = {self._paths[one]: one for one in experts if use_adapters(one, self._paths[one], routing)}
        self._warned_of_experts = False

    @property
    def has_mlp_linears(self) -> bool:
        """Whether some linear is neither in attention nor the head."""
        return any(linear.part == "mlp" for linear in self._linears.values())

    def experts(self, layout: ExpertLayout) -> list[ExpertMatrix]:
        """The matrices of all routed experts in a layout."""
        return [matrix for path, one in self._experts.items() for matrix in matrices_of(path, one, layout)]

    def fitted(self, spec: LoraSpec) -> LoraSpec:
        """The spec, with `experts="frozen"` if this model has no trainable routed experts."""
        return spec if spec.train_mlp and self._experts else replace(spec, experts="frozen")

    def widest(self, rank: int) -> LoraSpec:
        """The spec of an adapter on every target."""
        train_mlp = self.has_mlp_linears or bool(self._experts)
        return self.fitted(LoraSpec(rank, train_mlp=train_mlp, experts="shared_outer"))

    def widths(self, layout: ExpertLayout) -> dict[str, int]:
        """Parameters of a rank-1 adapter on attention (attn), MLPs and experts in this layout (mlp), and the head (unembed)."""
        widths = {"attn": 0, "mlp": 0, "unembed": 0}
        targets: list[Target] = [*self._linears.values(), *self.experts(layout)]
        for target in targets:
            widths[target.part] += sum(torch.Size(shape).numel() for shape in target.shapes(1))
        return widths

    def new_adapter(self, spec: LoraSpec, seed: int, device: torch.device) -> Adapter:
        """A fresh adapter: A Kaiming-uniform (bound 1/sqrt(in), as in torch's linear), B zero, so that it changes nothing yet.

        Uses a separate generator on the CPU: a seed gives the same adapter on any device, and global state does not change.
        Raises RequestError if `train_mlp` would train nothing, ModelLoadError if the spec has no target in this model.
        """
        spec = self.fitted(spec)
        if spec.train_mlp and self._has_experts and spec.experts == "frozen":
            self._warn_of_frozen()
        experts = self.experts(spec.experts)
        targets: dict[str, Target] = {**self._linears, **{matrix.name: matrix for matrix in experts}}
        generator = torch.Generator().manual_seed(seed % (1 << 63))
        a: dict[str, torch.Tensor] = {}
        b: dict[str, torch.Tensor] = {}
        for name in sorted(targets):
            if targets[name].part not in spec.parts:
                continue
            of_a, of_b = targets[name].shapes(spec.rank)
            bound = of_a[-1] ** -0.5
            matrix = torch.rand(of_a, generator=generator) * (2 * bound) - bound
            a[name] = matrix.to(device).requires_grad_()
            b[name] = torch.zeros(of_b, device=device).requires_grad_()
        if not a:
            raise ModelLoadError(f"this model has no linear in {', '.join(spec.parts)}; LoRA cannot be applied")
        unembed = next((name for name in a if targets[name].part == "unembed"), None)
        return Adapter(spec, a, b, self.peft_names(a, experts), unembed, tuple(experts))

    def _warn_of_frozen(self) -> None:
        """Warn that routed experts stay frozen. Raises RequestError if the MLPs consist of nothing else."""
        if not self.has_mlp_linears:
            raise RequestError(
                f"train_mlp=True: the MLPs of model {self._name!r} are routed experts, which stay frozen here; pass "
                "train_mlp=False to train attention and the head only"
                + (", or train them (TINKER_LOCAL_EXPERT_LORA=shared_outer)" if self._experts else "")
            )
        if not self._warned_of_experts:
            message = "model %r: train_mlp=True trains shared experts and dense layers; routed experts stay frozen"
            logger.warning(message, self._name)
            self._warned_of_experts = True

    def peft_names(self, adapted: Collection[str], experts: Sequence[ExpertMatrix]) -> PeftNames:
        """PEFT's names of an adapter's targets."""
        linears = {name: self._linears[name] for name in adapted if name in self._linears}
        by_weight = {
            name
            for name, linear in linears.items()
            if self._has_experts and (linear.part == "mlp" or name.rpartition(".")[2] in _EXPERT_NAMES)
        }
        modules = linears.keys() - by_weight
        ends = Counter(end for path in self._paths.values() if path not in modules for end in _ends(path))
        tensors = {f"{matrix.module}.{matrix.tensor}" for matrix in experts}
        return PeftNames(
            tuple(sorted({next((end for end in _ends(name) if not ends[end]), name) for name in modules})),
            tuple(sorted([*(f"{name}.weight" for name in by_weight), *tensors])),
            any(linear.is_transposed for linear in linears.values()),
        )


def lora_targets(model: PreTrainedModel, experts: Sequence[nn.Module]) -> Iterator[tuple[str, Linear]]:
    """Every linear of the text decoder and its head, including subclasses of nn.Linear, by its path in the model.

    Excludes the image encoders of multimodal models, the routers of `experts`, and linears that PEFT refuses to adapt. PEFT's
    `target_modules="all-linear"` adapts the same ones, but includes routers and excludes the head.
    """
    paths = {module: path for path, module in model.named_modules()}
    refused = "out_proj" if model.config.model_type in _MAMBA_TYPES else None
    decoder, head = set(text_stack(model).modules()), model.get_output_embeddings()
    blocks = tuple(paths[module].rpartition(".")[0] + "." for module in experts)
    for module, path in paths.items():
        name = path.rpartition(".")[2]
        is_frozen = name == refused or (name in ROUTERS and path.startswith(blocks)) or _NOT_TEXT in path.split(".")
        if isinstance(module, Linear) and (module is head or (module in decoder and not is_frozen)):
            yield path, module


def text_stack(model: PreTrainedModel) -> nn.Module:
    """The module with the text decoder's layers."""
    decoder = model.get_decoder()
    return decoder if isinstance(decoder, PreTrainedModel) else model.base_model


def install_lora(
    model: PreTrainedModel, routing: AdapterRouting, experts: Sequence[nn.Module]
) -> dict[str, LoraLinear]:
    """Replace the linears that can have adapters. Returns the new modules by their path in the model."""
    installed: dict[str, LoraLinear] = {}
    head = model.get_output_embeddings()
    for path, module in list(lora_targets(model, experts)):
        parent_path, _, leaf = path.rpartition(".")
        installed[path] = LoraLinear(module, path, routing, "unembed" if module is head else "mlp")
        setattr(model.get_submodule(parent_path), leaf, installed[path])
    return installed


def _ends(path: str) -> Iterator[str]:
    """The suffixes of a path: `c`, `b.c`, `a.b.c` of `a.b.c`."""
    parts = path.split(".")
    return (".".join(parts[-n:]) for n in range(1, len(parts) + 1))
