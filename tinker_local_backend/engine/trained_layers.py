"""The training pass of Llama, Qwen2, Qwen3 and Mistral, and its gradient, without autograd.

On a CPU, autograd's own graph of these layers is hundreds of small operations, of which each costs more to record and to run
backwards than to compute, and it keeps twice as much. What is Llama-like, and which products are one, llama_like.py says;
everything else trains through transformers' modules, and so does a model whose gradients came out otherwise than theirs when
it was loaded (`checked_layers`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from transformers.activations import ACT2FN

from tinker_local_backend.engine import trained_attention, trained_norms
from tinker_local_backend.engine.attention import PackedPlan
from tinker_local_backend.engine.llama_like import LlamaLikeDecoder, rotation
from tinker_local_backend.engine.lora import Adapter
from tinker_local_backend.engine.lora_spec import LoraSpec
from tinker_local_backend.engine.products import worst_error
from tinker_local_backend.engine.trained_linears import GradientsByName, trained_linear
from tinker_local_backend.engine.trained_norms import HeadNorm

if TYPE_CHECKING:
    from tinker_local_backend.engine.base_model import BaseModel

logger = logging.getLogger(__name__)

Backward = Callable[[torch.Tensor], list[torch.Tensor | None]]
"""dL/d hidden (T, hidden) -> dL by each of the adapter's matrices in their order, None where there is none. Called once."""

LARGEST_ERROR = 1e-3
"""Relative difference from what the modules give, of hidden states or of a gradient, beyond which they train."""

LEAST_SHARE = 1e-3
"""A gradient that is small beside the largest is compared as if it were this part of that one larger."""

KEPT_ROTATIONS = 1 << 20
"""Numbers of a pass's rotary factors, up to which they are kept for a next pass with the same positions."""

_silu_backward = torch.ops.aten.silu_backward.grad_input


class TrainedLayers:
    """Hidden states of packed sequences under an adapter that is trained, with their gradient by its matrices."""

    def __init__(self, decoder: LlamaLikeDecoder):
        self.embedding, self._rotary, self.layers, self.final_norm = decoder.parts
        self._head_norms = [
            None if layer.norm_weight is None else HeadNorm(layer.norm_weight, layer.eps) for layer in self.layers
        ]
        self._rotation: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
        """positions, and the factors for them"""

    @torch.no_grad()
    def hidden_states(
        self, tokens_T: torch.Tensor, positions_T: torch.Tensor, plan: PackedPlan, adapter: Adapter
    ) -> torch.Tensor:
        """Final hidden states (T, hidden), of which no gradient is wanted."""
        return self._begun(tokens_T, positions_T, plan, adapter, None)[1]

    @torch.no_grad()
    def training_pass(
        self,
        tokens_T: torch.Tensor,
        positions_T: torch.Tensor,
        plan: PackedPlan,
        adapter: Adapter,
        recompute: bool = False,
    ) -> tuple[torch.Tensor, Backward]:
        """As BaseModel.training_pass. With `recompute` only the input of each layer is kept for the backward pass."""
        kept: list[torch.Tensor | None] = []
        whole, hidden_TH = self._begun(tokens_T, positions_T, plan, adapter, kept, recompute)

        @torch.no_grad()
        def backward(by_hidden_TH: torch.Tensor) -> list[torch.Tensor | None]:
            gradients = whole.backward(by_hidden_TH, kept) if whole.trains else {}
            kept.clear()
            return [part for name in sorted(adapter.a) for part in gradients.get(name, (None, None))]

        return hidden_TH, backward

    def _begun(
        self,
        tokens_T: torch.Tensor,
        positions_T: torch.Tensor,
        plan: PackedPlan,
        adapter: Adapter,
        kept: list[torch.Tensor | None] | None,
        recompute: bool = False,
    ) -> tuple[_Pass, torch.Tensor]:
        x_TH = self.embedding(tokens_T)
        factors = self._rotation_of(x_TH, positions_T)
        layers = [
            _Layer(layer, head_norm, adapter, factors, plan)
            for layer, head_norm in zip(self.layers, self._head_norms, strict=True)
        ]
        whole = _Pass(layers, self.final_norm, recompute)
        return whole, whole.forward(x_TH, kept if whole.trains else None)

    def _rotation_of(self, x_TH: torch.Tensor, positions_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine, and sine with the sign of the half that is rotated in: (T, query heads + key heads, D)."""
        if self._rotation is not None and torch.equal(self._rotation[0], positions_T):
            return self._rotation[1:]
        heads = self.layers[0].heads + self.layers[0].kv_heads
        # A factor that lies in memory as often as it is used is twice as fast.
        cos, sin = (factor.expand(-1, heads, -1).contiguous() for factor in rotation(self._rotary, x_TH, positions_T))
        # The frequencies of other types depend on the lengths of this pass, or of earlier ones.
        is_fixed = self._rotary.rope_type not in ("dynamic", "longrope")
        self._rotation = (positions_T, cos, sin) if is_fixed and cos.numel() <= KEPT_ROTATIONS else None
        return cos, sin


class _Pass:
    """All layers and the last norm, for given tokens and a given adapter."""

    def __init__(self, layers: Sequence[_Layer], final_norm: Any, recompute: bool):
        self._layers, self._norm, self._recompute = layers, final_norm, recompute
        self._counts: list[int] = []
        """tensors kept for each layer"""
        self.trains = any(layer.names for layer in layers)

    def forward(self, x_TH: torch.Tensor, kept: list[torch.Tensor | None] | None) -> torch.Tensor:
        """kept: takes what the gradient needs."""
        for layer in self._layers:
            y_TH, of_layer = layer.forward(x_TH)
            if kept is not None:
                own = [x_TH] if self._recompute else of_layer
                self._counts.append(len(own))
                kept += own
            x_TH = y_TH
        scale = trained_norms.reciprocal_rms(x_TH, self._norm.variance_epsilon)
        normed = x_TH * scale
        if kept is not None:
            kept += normed, scale
        return normed * self._norm.weight

    def backward(self, by_hidden_TH: torch.Tensor, kept: Sequence[torch.Tensor | None]) -> GradientsByName:
        *of_layers, normed, scale = kept
        assert normed is not None and scale is not None
        by_TH = trained_norms.gradient(by_hidden_TH * self._norm.weight, normed, scale)
        gradients: GradientsByName = {}
        end = len(of_layers)
        for i in reversed(range(len(self._layers))):
            own = of_layers[end - self._counts[i] : end]
            end -= self._counts[i]
            if self._recompute:
                (x_TH,) = own
                assert x_TH is not None
                own = self._layers[i].forward(x_TH)[1]
            by_TH = self._layers[i].backward(by_TH, own, gradients, wants_x=i > 0)
        return gradients


class _Kept(NamedTuple):
    """What a layer's gradient needs, beside what its attention keeps."""

    normed: torch.Tensor
    """the input times its scale, without the norm's weight"""
    scale: torch.Tensor
    qkv: torch.Tensor
    """(T, query heads + 2 * key heads, D), as the products gave it"""
    qk_scale: torch.Tensor | None
    """(T, query heads + key heads, 1)"""
    rotated: torch.Tensor
    """(T, query heads + key heads, D)"""
    attended: torch.Tensor
    middle_normed: torch.Tensor
    """of the residual between attention and MLP"""
    middle_scale: torch.Tensor
    gate_up: torch.Tensor
    opened: torch.Tensor
    """silu(gate)"""
    inner_qkv: torch.Tensor | None
    inner_out: torch.Tensor | None
    inner_gate_up: torch.Tensor | None
    inner_down: torch.Tensor | None


class _Layer:
    """A decoder layer in one pass."""

    def __init__(
        self,
        layer: Any,
        head_norm: HeadNorm | None,
        adapter: Adapter,
        factors: tuple[torch.Tensor, torch.Tensor],
        plan: PackedPlan,
    ):
        self._layer, self._head_norm, self._plan = layer, head_norm, plan
        self._cos, self._sin = factors
        self._rotated_heads: int = layer.heads + layer.kv_heads
        joined = layer.qkv, layer.out, layer.gate_up, layer.down
        norms = layer.input_norm.weight, None, layer.mlp_norm.weight, None
        self._linears = [
            trained_linear(part, adapter, len(self._cos), norm) for part, norm in zip(joined, norms, strict=True)
        ]
        self.names = [name for part in self._linears for name in part.names]

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
        """x (T, hidden) -> the output, of the same shape, and what `backward` needs."""
        layer, (qkv_linear, out_linear, gate_up_linear, down_linear) = self._layer, self._linears
        tokens, size = len(x), layer.gate_up.sizes[0]
        scale = trained_norms.reciprocal_rms(x, layer.input_norm.variance_epsilon)
        normed = x * scale
        qkv, inner_qkv = qkv_linear.forward(normed)
        qkv = qkv.view(tokens, -1, layer.head_dim)
        qk, qk_scale = qkv[:, : self._rotated_heads], None
        if self._head_norm is not None:
            qk, qk_scale = self._head_norm.forward(qk)
        rotated = torch.addcmul(qk * self._cos, qk.roll(layer.head_dim // 2, -1), self._sin)
        attended, of_attention = trained_attention.attend(layer.attention, self._seen(rotated, qkv), self._plan)
        middle, inner_out = out_linear.forward(attended.view(tokens, -1))
        middle.add_(x)
        middle_scale = trained_norms.reciprocal_rms(middle, layer.mlp_norm.variance_epsilon)
        middle_normed = middle * middle_scale
        gate_up, inner_gate_up = gate_up_linear.forward(middle_normed)
        opened = F.silu(gate_up[:, :size])
        y, inner_down = down_linear.forward(opened * gate_up[:, size:])
        kept = _Kept(
            normed, scale, qkv, qk_scale, rotated, attended, middle_normed, middle_scale, gate_up, opened,
            inner_qkv, inner_out, inner_gate_up, inner_down,
        )  # fmt: skip
        return y.add_(middle), [*kept, *of_attention]

    def _seen(self, rotated: torch.Tensor, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values of the attention, or their gradients, where they lie in these two."""
        heads = self._layer.heads
        return rotated[:, :heads], rotated[:, heads:], qkv[:, self._rotated_heads :]

    def backward(
        self, by_y: torch.Tensor, tensors: Sequence[torch.Tensor | None], gradients: GradientsByName, wants_x: bool
    ) -> torch.Tensor:
        """dL/dx; without `wants_x`, of a layer before which nothing is trained, something else."""
        kept = _Kept(*tensors[: len(_Kept._fields)])  # pyright: ignore[reportArgumentType]
        qkv_linear, out_linear, _, _ = self._linears
        by_middle = self._mlp_gradient(by_y, kept, gradients)
        by_attended = out_linear.backward(by_middle, kept.attended.view(len(by_y), -1), kept.inner_out, gradients)
        by_qkv = self._attention_gradient(by_attended, kept, tensors[len(_Kept._fields) :])
        by_normed = qkv_linear.backward(by_qkv, kept.normed, kept.inner_qkv, gradients, wants_x)
        return trained_norms.gradient(by_normed, kept.normed, kept.scale, by_middle) if wants_x else by_middle

    def _mlp_gradient(self, by_y: torch.Tensor, kept: _Kept, gradients: GradientsByName) -> torch.Tensor:
        """dL/d middle."""
        layer, (_, _, gate_up_linear, down_linear) = self._layer, self._linears
        size = layer.gate_up.sizes[0]
        gate, up = kept.gate_up[:, :size], kept.gate_up[:, size:]
        product = kept.opened * up
        by_product = down_linear.backward(by_y, product, kept.inner_down, gradients)
        # Gradients take the places of what they are of: memory that the caches hold.
        by_opened = torch.mul(by_product, up, out=product)
        torch.mul(by_product, kept.opened, out=up)
        _silu_backward(by_opened, gate, grad_input=gate)
        by_normed = gate_up_linear.backward(kept.gate_up, kept.middle_normed, kept.inner_gate_up, gradients)
        return trained_norms.gradient(by_normed, kept.middle_normed, kept.middle_scale, by_y)

    def _attention_gradient(
        self, by_attended: torch.Tensor, kept: _Kept, of_attention: Sequence[torch.Tensor | None]
    ) -> torch.Tensor:
        """dL/d of what the products of queries, keys and values gave, (T, out)."""
        layer = self._layer
        by_rotated, by_qkv = torch.empty_like(kept.rotated), torch.empty_like(kept.qkv)
        trained_attention.gradient(
            layer.attention,
            by_attended.view_as(kept.attended),
            self._seen(kept.rotated, kept.qkv),
            kept.attended,
            of_attention,  # pyright: ignore[reportArgumentType]
            self._plan,
            into=self._seen(by_rotated, by_qkv),
        )
        # A rotation by half the width is its own inverse.
        turned = (by_rotated * self._sin).roll(layer.head_dim // 2, -1)
        qk, by_qk = (tensor[:, : self._rotated_heads] for tensor in (kept.qkv, by_qkv))
        if self._head_norm is None or kept.qk_scale is None:
            torch.addcmul(turned, by_rotated, self._cos, out=by_qk)
        else:
            by_normed = turned.addcmul_(by_rotated, self._cos)
            # A rotation keeps the product of a vector and its gradient.
            self._head_norm.gradient(by_normed, by_rotated.mul_(kept.rotated), qk, kept.qk_scale, out=by_qk)
        return by_qkv.flatten(1)


def checked_layers(
    model: BaseModel, decoder: LlamaLikeDecoder | None, sequences: Sequence[torch.Tensor]
) -> TrainedLayers | None:
    """For a model that has just been loaded, if these sequences have the hidden states and gradients that its modules give."""
    silu = nn.SiLU, type(ACT2FN["silu"])
    if decoder is None or model.dtype != torch.float32:
        return None
    if any(layer.attention.softcap is not None or type(layer.activation) not in silu for layer in decoder.parts[2]):
        return None
    tokens_T, plan = torch.cat(list(sequences)), PackedPlan.whole([len(tokens) for tokens in sequences])
    positions_T = torch.cat([torch.arange(len(tokens)) for tokens in sequences])
    generator = torch.Generator().manual_seed(0)
    with torch.inference_mode(False), torch.enable_grad():
        adapter = model.new_adapter(LoraSpec(2, train_unembed=False), seed=0)
        for matrix in adapter.b.values():
            matrix.data.normal_(std=matrix.shape[0] ** -0.5, generator=generator)
        layers = TrainedLayers(decoder)
        ways = model.training_pass, layers.training_pass
        expected, found = (_with_gradients(*way(tokens_T, positions_T, plan, adapter)) for way in ways)
    largest = max(float(part.norm()) for part in expected)
    errors = [
        float((one - other).norm() / (other.norm() + largest * LEAST_SHARE))
        for one, other in zip(found, expected, strict=True)
    ]
    worst = worst_error(errors)
    if worst > LARGEST_ERROR:
        logger.warning(
            "model %r: the joined training pass gives other hidden states or gradients than its modules (relative error "
            "%.1e); it trains through the modules, which is slower",
            model.name,
            worst,
        )
        return None
    return layers


def _with_gradients(hidden_TH: torch.Tensor, backward: Backward) -> list[torch.Tensor]:
    """The hidden states, and the gradients of some function of them."""
    generator = torch.Generator().manual_seed(1)
    gradients = backward(torch.randn(hidden_TH.shape, generator=generator))
    return [hidden_TH.detach(), *(gradient for gradient in gradients if gradient is not None)]
