"""The parts of the CUDA path, which replace the reference on a GPU. Each can be turned off separately."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn

from tinker_local_backend.engine.cuda import flash_attention, fuse
from tinker_local_backend.engine.cuda.fused_layer import FusedOperations
from tinker_local_backend.engine.cuda.graphs import CudaGraphs, Graphs
from tinker_local_backend.engine.cuda.varlen import VarlenPlan
from tinker_local_backend.engine.model.attention import PackedPlan
from tinker_local_backend.engine.model.base_model import BaseModel
from tinker_local_backend.engine.model.grouped_experts import GROUPED_NAME
from tinker_local_backend.engine.model.passes import AttentionPlan

ON = "on"

DECODING, ATTENTION, FLASH, LAYERS = "decoding", "attention", "flash", "layers"
"""Captured decode steps over pages and slots; one attention call for all sequences of a pass; flash-attn-4 for that call in large
passes; fused projections in layers of known classes, with fused kernels between them."""

FUSED: Mapping[str, Callable[[nn.Module], list[nn.Module]]] = {
    "norms": fuse.fuse_norms,
    "rotary": fuse.fuse_rotary,
    "swiglu": fuse.fuse_swiglu,
}
"""Part -> the function that replaces the forward of a model's modules, and returns those modules."""

PARTS = (DECODING, ATTENTION, FLASH, LAYERS, *FUSED)


def unsupported(model: BaseModel) -> dict[str, str]:
    """The parts that do not support this model, and why."""
    off: dict[str, str] = {}
    if model.decoder is None:
        off[LAYERS] = "quantized weights" if model.quantized else "no joined form of these layers"
    if model.quantized:
        # Their comparison with the original code (fuse.py) needs plain weights.
        off |= dict.fromkeys(("rotary", "swiglu"), "quantized weights")
    if not any(model.attention_shape):
        off |= dict.fromkeys((DECODING, ATTENTION), "no attention layers")
    elif (
        not model.has_uniform_attention
    ):  # the kernels need one number of heads for all layers, and values as wide as keys
        off |= dict.fromkeys((DECODING, ATTENTION), "heads or their widths differ")
    elif model.mixers:  # captured steps support keys in pages, but no states in slots
        off[DECODING] = "recurrent layers"
    why = off.get(ATTENTION) or flash_attention.missing(model.device)
    if why is None and model.dtype not in (torch.bfloat16, torch.float16):
        why = "it needs 16 bits"
    return off if why is None else {**off, FLASH: why}


class CudaExecution:
    """The CUDA path of a model. `off`: additional parts to turn off, and why."""

    def __init__(self, model: BaseModel, graphs: Graphs | None = None, off: Mapping[str, str] | None = None):
        self.graphs = graphs or CudaGraphs(model.device)
        self._device = model.device
        why = {**unsupported(model), **(off or {})}
        self._parts = {part: f"off: {why[part]}" if part in why else ON for part in PARTS}
        self._model = model
        self._fused: dict[str, list[nn.Module]] = {}
        model.join(FusedOperations() if self.runs(LAYERS) else None)
        if model.experts:
            model.module.set_experts_implementation(GROUPED_NAME)  # does not synchronise, so it can be captured
        for part, fuse_part in FUSED.items():
            if self.runs(part):
                self._fused[part] = fuse_part(model.module)
                if not self._fused[part]:
                    self.turn_off(part, "no matching module in this model")

    def runs(self, part: str) -> bool:
        return self._parts[part] == ON

    def turn_off(self, part: str, why: str) -> None:
        """Use the reference for a part, in passes and in generators created from now on."""
        self._parts[part] = f"off: {why}"
        if part == LAYERS:
            self._model.join(None)
        fuse.restore(self._fused.pop(part, []))

    def release(self) -> bool:
        return self.graphs.release()

    def parts(self) -> Mapping[str, str]:
        return dict(self._parts)

    def packed(self, plan: PackedPlan) -> AttentionPlan:
        return VarlenPlan.of(plan, self._device, self.runs(FLASH)) if self.runs(ATTENTION) else plan
