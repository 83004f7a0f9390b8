"""What a joined decoder layer computes between its products, in one kernel each."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from tinker_local_backend.engine.cuda import ops
from tinker_local_backend.engine.cuda.step import PagedPlan
from tinker_local_backend.engine.model.decoder import JoinedLayer, LayerOperations, Rotary
from tinker_local_backend.engine.model.passes import AttentionPlan


class FusedOperations(LayerOperations):
    """LayerOperations with the kernels of ops.py.

    Args:
        residuals: dtype of the residuals of a model in 16 bits. Rounding their sum to 16 bits after every addition is what sets
            sampled and trained logprobs apart most: it is relative to all that the layers before have added, not to what one
            adds.
    """

    def __init__(self, residuals: torch.dtype | None = torch.float32):
        self._residuals = residuals

    def residual(self, x_TH: torch.Tensor) -> torch.Tensor:
        return x_TH.to(self._residuals) if self._residuals is not None and x_TH.itemsize == 2 else x_TH

    def add_norm(
        self, x_TH: torch.Tensor, delta_TH: torch.Tensor | None, norm: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if delta_TH is None:
            embedded = x_TH.to(norm.weight.dtype)  # exact: nothing has been added
            return x_TH, F.rms_norm(embedded, norm.weight.shape, norm.weight, norm.variance_epsilon)
        return ops.add_norm(x_TH, delta_TH, norm.weight, norm.variance_epsilon)

    def attend(self, layer: JoinedLayer, qkv_TO: torch.Tensor, rotary: Rotary, plan: AttentionPlan) -> torch.Tensor:
        if not isinstance(plan, PagedPlan):
            return super().attend(layer, qkv_TO, rotary, plan)
        cos, sin = (part.squeeze(1) for part in rotary)
        keys, values = plan.cache.layer(layer.attention.index)
        of_heads = (layer.norm_weight, cos, sin, layer.kv_heads, layer.eps)
        query = ops.store_heads(qkv_TO, *of_heads, keys, values, plan.tables, plan.positions)
        return plan.attend_stored(layer.attention, query).flatten(1)

    def heads(
        self, layer: JoinedLayer, qkv_TO: torch.Tensor, rotary: Rotary
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        cos, sin = (part.squeeze(1) for part in rotary)
        return ops.split_heads(qkv_TO, layer.norm_weight, cos, sin, layer.kv_heads, layer.eps)

    def gated(self, layer: JoinedLayer, gate_up_TO: torch.Tensor) -> torch.Tensor:
        return ops.joined_swiglu(gate_up_TO) if layer.is_silu else super().gated(layer, gate_up_TO)
