"""The operations between the projections of a joined decoder layer, in one kernel each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from tinker_local_backend.engine.cuda import ops
from tinker_local_backend.engine.cuda.step import PagedPlan
from tinker_local_backend.engine.model.decoder import JoinedLayer, LayerOperations, Rotary
from tinker_local_backend.engine.model.passes import AttentionPlan


class FusedOperations(LayerOperations):
    """LayerOperations with the kernels of ops.py.

    Only the inputs of these kernels are saved for the backward pass; outputs that a product or attention needs are recomputed:
    a third less memory for a few percent of the time.

    Args:
        residuals: dtype of the residual stream of a 16-bit model. In 16 bits, rounding it after every addition would be the
            largest difference between sampled and trained logprobs, because the error is relative to the whole sum.
        saves_outputs: save the outputs too.
    """

    def __init__(self, residuals: torch.dtype | None = torch.float32, saves_outputs: bool = False):
        self._residuals, self._saves_outputs = residuals, saves_outputs

    def recomputing(self) -> FusedOperations:
        return FusedOperations(self._residuals, saves_outputs=True)

    def residual(self, x_TH: torch.Tensor) -> torch.Tensor:
        return x_TH.to(self._residuals) if self._residuals is not None and x_TH.itemsize == 2 else x_TH

    def add_norm(
        self, x_TH: torch.Tensor, delta_TH: torch.Tensor | None, norm: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if delta_TH is None:
            return x_TH, ops.norm(x_TH, norm.weight, norm.variance_epsilon)
        return ops.add_norm(x_TH, delta_TH, norm.weight, norm.variance_epsilon)

    def norm_and_product(
        self,
        x_TH: torch.Tensor,
        delta_TH: torch.Tensor | None,
        norm: Any,
        product: Callable[[torch.Tensor], torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x_TH, normed = self.add_norm(x_TH, delta_TH, norm)
        total = x_TH.detach()
        with self._recomputed([normed], lambda: [ops.norm(total, norm.weight, norm.variance_epsilon)]):
            return x_TH, product(normed)

    def attend(self, layer: JoinedLayer, qkv_TO: torch.Tensor, rotary: Rotary, plan: AttentionPlan) -> torch.Tensor:
        cos, sin = (part.squeeze(1) for part in rotary)
        of_heads = (layer.norm_weight, cos, sin, layer.kv_heads, layer.eps)
        if isinstance(plan, PagedPlan):
            keys, values = plan.cache.layer(layer.attention.index)
            query = ops.store_heads(qkv_TO, *of_heads, keys, values, plan.tables, plan.positions)
            return plan.attend_stored(layer.attention, query).flatten(1)
        heads, qkv = ops.split_heads(qkv_TO, *of_heads), qkv_TO.detach()
        with self._recomputed(heads, lambda: ops.split_heads(qkv, *of_heads)):
            return plan.attend(layer.attention, *(part.transpose(0, 1)[None] for part in heads)).flatten(2)[0]

    def gated_product(
        self, layer: JoinedLayer, gate_up_TO: torch.Tensor, product: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        if not layer.is_silu:
            return super().gated_product(layer, gate_up_TO, product)
        gated, gate_up = ops.joined_swiglu(gate_up_TO), gate_up_TO.detach()
        with self._recomputed([gated], lambda: [ops.joined_swiglu(gate_up)]):
            return product(gated)

    def _recomputed(
        self, outputs: Sequence[torch.Tensor], compute: Callable[[], Sequence[torch.Tensor]]
    ) -> AbstractContextManager[object]:
        """Within: autograd does not save these outputs, or views of their shape, but calls `compute` in the backward pass."""
        if self._saves_outputs or not torch.is_grad_enabled():
            return nullcontext()
        indices = {tensor.data_ptr(): i for i, tensor in enumerate(outputs)}
        shapes, recomputed = [tensor.shape for tensor in outputs], _Recomputed(compute)

        def pack(tensor: torch.Tensor) -> torch.Tensor | int:
            index = indices.get(tensor.data_ptr())
            # Detached: an operation may save its own result, whose graph would keep itself alive when a pass fails.
            return tensor.detach() if index is None or tensor.shape != shapes[index] else index

        return torch.autograd.graph.saved_tensors_hooks(pack, recomputed.unpack)


class _Recomputed:
    """Recomputes the outputs of an operation together, and returns each once."""

    def __init__(self, compute: Callable[[], Sequence[torch.Tensor]]):
        self._compute = compute
        self._outputs: dict[int, torch.Tensor] = {}

    def unpack(self, packed: torch.Tensor | int) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        if packed not in self._outputs:
            with torch.no_grad():
                self._outputs = dict(enumerate(self._compute()))
        return self._outputs.pop(packed)
