"""The layers of Llama, Qwen2, Qwen3 and Mistral with fewer and larger operations than in transformers' modules.

Projections of the same input are fused (queries, keys and values; gate and up), and so are the adapters' deltas; queries and
keys are normalised and rotated together. Weights are not copied: those of the modules become views of the fused ones. Only
known classes of transformers run this way, and only if their hidden states equal the modules' (`checked_decoder`); all others
run through the modules.

A decode step multiplies few rows with all weights. oneDNN is up to twice as fast with weights in its packed layout; in float32,
if all rows use one snapshot, merging its B A into the weights saves LoRA's small products. Either needs a copy of the weights
(`PreparedWeights`), which takes about as long as two steps.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers.models.llama import modeling_llama as llama
from transformers.models.mistral import modeling_mistral as mistral
from transformers.models.qwen2 import modeling_qwen2 as qwen2
from transformers.models.qwen3 import modeling_qwen3 as qwen3

from tinker_local_backend.engine.model.attention import PackedPlan
from tinker_local_backend.engine.model.lora import Adapter, LoraLinear, Spans
from tinker_local_backend.engine.model.lora_spec import LoraSpec
from tinker_local_backend.engine.model.memory import out_of_memory
from tinker_local_backend.engine.model.paged_attention import DecodePlan, LayerAttention
from tinker_local_backend.engine.model.passes import AttentionPlan
from tinker_local_backend.engine.model.products import by_packed, linear, packed, worst_error

logger = logging.getLogger(__name__)

PREPARE_AFTER = 8
"""Decode steps with the same adapter after which weights are prepared for it, until the sampler is idle. A number of steps, not
a time: the last bits of a logprob depend on it."""

MAX_BYTES = 2 << 30
"""Bytes of the largest model that gets prepared weights."""

_KNOWN = {
    llama.LlamaModel: (llama.LlamaDecoderLayer, llama.LlamaAttention, llama.LlamaMLP, llama.LlamaRMSNorm),
    mistral.MistralModel: (
        mistral.MistralDecoderLayer,
        mistral.MistralAttention,
        mistral.MistralMLP,
        mistral.MistralRMSNorm,
    ),
    qwen2.Qwen2Model: (qwen2.Qwen2DecoderLayer, qwen2.Qwen2Attention, qwen2.Qwen2MLP, qwen2.Qwen2RMSNorm),
    qwen3.Qwen3Model: (qwen3.Qwen3DecoderLayer, qwen3.Qwen3Attention, qwen3.Qwen3MLP, qwen3.Qwen3RMSNorm),
}
"""Classes of a model's layers, attention, MLP and norms, by the class of the model."""


def is_known(body: nn.Module) -> bool:
    """Whether this class of model has joined layers."""
    return type(body) in _KNOWN


class JoinedLayer:
    """A decoder layer with fused projections."""

    def __init__(self, layer: Any, window: int | None):
        attention, mlp = layer.self_attn, layer.mlp
        self.input_norm, self.mlp_norm = layer.input_layernorm, layer.post_attention_layernorm
        self.activation = mlp.act_fn
        self.is_silu = mlp.config.hidden_act in ("silu", "swish")
        self.qkv = LoraLinear.joined([attention.q_proj, attention.k_proj, attention.v_proj])
        self.out, self.down = attention.o_proj, mlp.down_proj
        self.gate_up = LoraLinear.joined([mlp.gate_proj, mlp.up_proj])
        self.head_dim = int(attention.head_dim)
        self.heads, self.kv_heads = (
            part.out_features // self.head_dim for part in (attention.q_proj, attention.k_proj)
        )
        self.mlp_width = mlp.gate_proj.out_features
        self.attention = LayerAttention(int(attention.layer_idx), float(attention.scaling), None, window)
        self.eps = 0.0
        self.norm_weight: torch.Tensor | None = None
        """(heads + kv_heads, head_dim): norm weights of queries and keys; None without QK norms"""
        if hasattr(attention, "q_norm"):
            self.eps = float(attention.q_norm.variance_epsilon)
            norms = (attention.q_norm.weight, self.heads), (attention.k_norm.weight, self.kv_heads)
            self.norm_weight = torch.cat([weight.expand(heads, -1) for weight, heads in norms])

    def forward(
        self,
        x_TH: torch.Tensor,
        delta_TH: torch.Tensor | None,
        rotary: Rotary,
        plan: AttentionPlan,
        product: Product,
        operations: LayerOperations,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(residual stream x, output of the last layer, not yet added to x) -> the same after this layer."""
        x_TH, qkv = operations.norm_and_product(x_TH, delta_TH, self.input_norm, partial(product, self.qkv))
        attended = product(self.out, operations.attend(self, qkv, rotary, plan))
        x_TH, gate_up = operations.norm_and_product(x_TH, attended, self.mlp_norm, partial(product, self.gate_up))
        return x_TH, operations.gated_product(self, gate_up, partial(product, self.down))


Rotary = tuple[torch.Tensor, torch.Tensor]
"""Factors cos and sin (T, 1, head_dim): a head x becomes x * cos + (x rolled by half its width) * sin."""


class LayerOperations:
    """The operations of a layer besides its projections, in plain torch."""

    def recomputing(self) -> LayerOperations:
        """The same for layers under gradient checkpointing."""
        return self

    def residual(self, x_TH: torch.Tensor) -> torch.Tensor:
        """Embeddings in the dtype of the residual stream."""
        return x_TH

    def add_norm(
        self, x_TH: torch.Tensor, delta_TH: torch.Tensor | None, norm: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(x + delta, its norm); delta None is 0."""
        total = x_TH if delta_TH is None else x_TH + delta_TH
        return total, _rms_norm(total, norm.weight, norm.variance_epsilon)

    def norm_and_product(
        self,
        x_TH: torch.Tensor,
        delta_TH: torch.Tensor | None,
        norm: Any,
        product: Callable[[torch.Tensor], torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(x + delta, product of its norm)."""
        x_TH, normed = self.add_norm(x_TH, delta_TH, norm)
        return x_TH, product(normed)

    def gated_product(
        self, layer: JoinedLayer, gate_up_TO: torch.Tensor, product: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """The product of activation(gate) * up."""
        return product(self.gated(layer, gate_up_TO))

    def attend(self, layer: JoinedLayer, qkv_TO: torch.Tensor, rotary: Rotary, plan: AttentionPlan) -> torch.Tensor:
        """Attention from the fused queries, keys and values: (T, H * D)."""
        by_head = [part.transpose(0, 1)[None] for part in self.heads(layer, qkv_TO, rotary)]
        return plan.attend(layer.attention, *by_head).flatten(2)[0]

    def heads(
        self, layer: JoinedLayer, qkv_TO: torch.Tensor, rotary: Rotary
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries (T, H, D), keys and values (T, KV, D); queries and keys normalised and rotated."""
        # Split, not sliced: the backward pass of a slice fills a whole tensor with zeros.
        qkv = qkv_TO.unflatten(1, (-1, layer.head_dim))
        qk, value = qkv.split([layer.heads + layer.kv_heads, layer.kv_heads], dim=1)
        if layer.norm_weight is not None:
            qk = _rms_norm(qk, layer.norm_weight, layer.eps)
        cos, sin = rotary
        qk = torch.addcmul(qk * cos, qk.roll(layer.head_dim // 2, -1), sin)
        query, key = qk.split([layer.heads, layer.kv_heads], dim=1)
        return query, key, value

    def gated(self, layer: JoinedLayer, gate_up_TO: torch.Tensor) -> torch.Tensor:
        """activation(gate) * up."""
        gate, up = gate_up_TO.split(layer.mlp_width, dim=1)
        return layer.activation(gate) * up


class LlamaLikeDecoder:
    """Hidden states of T packed tokens, or of one new token for each of T sequences. Built by `of`."""

    def __init__(self, body: Any, windows: Sequence[int | None], head: nn.Module):
        self._embedding, self._rotary, self._final_norm = body.embed_tokens, body.rotary_emb, body.norm
        self._layers = [JoinedLayer(layer, window) for layer, window in zip(body.layers, windows, strict=True)]
        self._head = head if type(head) is LoraLinear and head.bias is None else None
        self.linears = [part for layer in self._layers for part in (layer.qkv, layer.out, layer.gate_up, layer.down)]
        """the linears of its layers"""
        self.prepared = PreparedWeights(self.linears if self._head is None else [*self.linears, self._head])

    @classmethod
    def of(cls, body: nn.Module, windows: Sequence[int | None], head: nn.Module) -> LlamaLikeDecoder | None:
        """Build the decoder; None unless the model consists of exactly the known classes.

        body: transformers' model without its `head`, with LoraLinears. windows: each layer's sliding window.
        """
        known = _KNOWN.get(type(body))  # pyright: ignore[reportArgumentType]
        model: Any = body
        if known is None or type(model.norm) is not known[3] or type(model.embed_tokens) is not nn.Embedding:
            return None
        for layer in model.layers:
            modules = (layer, layer.self_attn, layer.mlp, layer.input_layernorm)
            norms = [layer.post_attention_layernorm]
            norms += [getattr(layer.self_attn, name) for name in ("q_norm", "k_norm") if hasattr(layer.self_attn, name)]
            linears = [getattr(layer.self_attn, f"{name}_proj", None) for name in "qkvo"]
            linears += [getattr(layer.mlp, f"{name}_proj", None) for name in ("gate", "up", "down")]
            if tuple(map(type, modules)) != known or any(type(norm) is not known[3] for norm in norms):
                return None
            if any(type(linear) is not LoraLinear for linear in linears):
                return None
            for joined in (linears[:3], linears[4:6]):
                if len({getattr(linear, "bias", None) is None for linear in joined}) > 1:
                    return None
        with torch.inference_mode(False), torch.no_grad():  # training differentiates through the weights
            return cls(body, windows, head)

    def hidden_states(
        self,
        tokens_T: torch.Tensor,
        positions_T: torch.Tensor,
        plan: AttentionPlan,
        spans: Spans | None,
        operations: LayerOperations,
        recompute: bool = False,
    ) -> torch.Tensor:
        """Final hidden states (T, hidden), equal to those of the model's modules.

        spans: None if adapters are in slots.
        recompute: gradient checkpointing, while autograd records: each layer saves only its input.
        """
        x_TH, delta_TH = self._embedding(tokens_T), None
        rotary = rotation(self._rotary, x_TH, positions_T)
        x_TH = operations.residual(x_TH)
        if recompute:
            operations = operations.recomputing()
        products: Product = _through_slots if spans is None else Products(spans)
        if isinstance(plan, DecodePlan) and spans is not None:
            self.prepared.begin_step(spans)
            products = self.prepared.products(spans)
        for layer in self._layers:
            rest = rotary, plan, products, operations
            if recompute and torch.is_grad_enabled():
                total = x_TH if delta_TH is None else x_TH + delta_TH  # one tensor to save, not two
                arguments = (total, None, *rest)
                x_TH, delta_TH = checkpoint(layer.forward, *arguments, use_reentrant=False, preserve_rng_state=False)
            else:
                x_TH, delta_TH = layer.forward(x_TH, delta_TH, *rest)
        return operations.add_norm(x_TH, delta_TH, self._final_norm)[1]

    def head_product(self, hidden_NH: torch.Tensor, spans: Spans) -> tuple[torch.Tensor, Spans] | None:
        """(logits (N, vocabulary) of the prepared head, adapters still to apply); None if it is not prepared."""
        products = self.prepared.products(spans)
        logits = None if self._head is None else products.of_copy(self._head, hidden_NH)
        return None if logits is None else (logits.float(), products.rest)


CheckPass = tuple[torch.Tensor, torch.Tensor, DecodePlan | PackedPlan, torch.Tensor]
"""Tokens (T,), positions (T,) and plan of a pass, and its hidden states (T, hidden) as the modules compute them."""


def checked_decoder(
    name: str, body: nn.Module, windows: Sequence[int | None], head: nn.Module, passes: Sequence[CheckPass]
) -> LlamaLikeDecoder | None:
    """The joined decoder, if supported and equal to the modules in these passes."""
    decoder = LlamaLikeDecoder.of(body, windows, head)
    if decoder is None:
        return None
    errors = []
    for tokens_T, positions_T, plan, expected_TH in passes:
        hidden_TH = decoder.hidden_states(tokens_T, positions_T, plan, [], LayerOperations())
        errors.append(float((hidden_TH - expected_TH).norm() / expected_TH.norm().clamp(min=1e-12)))
    decoder.prepared.reset()  # counting the check as a decode step would prepare weights earlier after a restart
    error = worst_error(errors)
    if error > (1e-5 if passes[0][3].dtype == torch.float32 else 1e-1):
        logger.warning(
            "model %r: joined layers give other hidden states than its modules (relative error %.1e); it runs through "
            "the modules, which is slower",
            name,
            error,
        )
        return None
    return decoder


def rotation(rotary: nn.Module, x_TH: torch.Tensor, positions_T: torch.Tensor) -> Rotary:
    """The rotary factors of positions (T,)."""
    cos, sin = (part[0][:, None] for part in rotary(x_TH, positions_T[None]))
    half = cos.shape[-1] // 2
    return cos, torch.cat((-sin[..., :half], sin[..., half:]), dim=-1)


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMS norm of x in float32, times the weight (D,) or (heads, D)."""
    if x.dtype in (torch.bfloat16, torch.float16):
        return F.rms_norm(x.float(), x.shape[-1:], None, eps).to(x.dtype) * weight
    if torch.is_grad_enabled() and x.requires_grad:
        result: Any = _RmsNorm.apply(x, weight, eps)
        return result
    return _RmsNorm.of(x, weight, eps)[0]


class _RmsNorm(torch.autograd.Function):
    """One autograd node instead of ten, whose overhead exceeds the computation of a small layer."""

    @staticmethod
    def of(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
        """The normalised x, and the reciprocal of its RMS (..., 1)."""
        if weight.dim() == 1:
            return torch.ops.aten._fused_rms_norm(x, x.shape[-1:], weight, eps)
        normed, scale = torch.ops.aten._fused_rms_norm(x, x.shape[-1:], None, eps)
        return normed * weight, scale

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        y, scale = _RmsNorm.of(x, weight, eps)
        ctx.save_for_backward(x, weight, scale)
        return y

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *gradients: torch.Tensor
    ) -> tuple[torch.Tensor, None, None]:
        x, weight, scale = ctx.saved_tensors
        normed, grad_normed = x * scale, gradients[0] * weight
        along = (grad_normed * normed).sum(dim=-1, keepdim=True)
        return grad_normed.addcmul_(normed, along, value=-1 / x.shape[-1]).mul_(scale), None, None


Product = Callable[[LoraLinear, torch.Tensor], torch.Tensor]
"""(a linear, (rows, in)) -> (rows, out), with the adapters of the pass."""


def _through_slots(module: LoraLinear, x_RI: torch.Tensor) -> torch.Tensor:
    return module(x_RI)


@dataclass(frozen=True, eq=False)
class Products:
    """Applies the linears of a pass, with their weights or with prepared copies (packed, or merged with an adapter)."""

    spans: Spans
    """the adapters of the rows"""
    rest: Spans = field(default_factory=list)
    """adapters that are not merged into the copies"""
    copies: Mapping[LoraLinear, torch.Tensor] = field(default_factory=dict)

    def __call__(self, module: LoraLinear, x_RI: torch.Tensor) -> torch.Tensor:
        """(rows, in) -> (rows, out)"""
        y_RO = self.of_copy(module, x_RI)
        if y_RO is None:
            return module.product(x_RI, self.spans)
        module.add(x_RI, y_RO, self.rest)
        return y_RO

    def of_copy(self, module: LoraLinear, x_RI: torch.Tensor) -> torch.Tensor | None:
        """The product with the prepared copy, without `rest`. None if there is no copy, or no memory for the product."""
        weight = self.copies.get(module)
        if weight is None:
            return None
        return by_packed(x_RI, weight, module.bias) if weight.is_mkldnn else linear(x_RI, weight, module.bias)


_BASE = Adapter(LoraSpec(1), {}, {})
"""Marks weights prepared without an adapter, for rows that do not all use one mergeable snapshot."""


class PreparedWeights:
    """Prepared copies of the weights of these linears, for one snapshot that all rows use or for the base model.

    Snapshots are merged only in float32: 16 bits would round away most of B A, so there only the base model is prepared, as for
    rows of several snapshots.
    """

    def __init__(self, linears: Sequence[LoraLinear]):
        self._linears = linears
        self._merges = all(module.weight.dtype == torch.float32 for module in linears)
        size, on_cpu = sum(module.weight.nbytes for module in linears), linears[0].weight.device.type == "cpu"
        self._possible = on_cpu and size <= MAX_BYTES
        self.reset()

    def reset(self) -> None:
        """Free the copies and restart the count of steps."""
        self._prepared: weakref.ref[Adapter] | None = None
        self._next: weakref.ref[Adapter] | None = None
        self._steps = 0
        self._copies: dict[LoraLinear, torch.Tensor] = {}

    def begin_step(self, spans: Spans) -> None:
        """Call before a decode step. Prepares the weights after enough consecutive steps with the same adapter."""
        kind = self._kind(spans)
        if not self._possible:
            return
        if self._prepared is not None and self._prepared() is kind:
            self._next = None
            return
        if self._next is None or self._next() is not kind:
            self._next, self._steps = weakref.ref(kind), 0
        self._steps += 1
        if self._steps > PREPARE_AFTER:
            self._prepare(kind)

    def _prepare(self, kind: Adapter) -> None:
        """Make the copies. If memory runs out, decoding continues without copies from then on."""
        self.reset()
        try:
            for module in self._linears:
                copy = _copy(module, kind)
                if copy is not None:
                    self._copies[module] = copy
        except Exception as error:
            if not out_of_memory(error):
                raise
            logger.warning("out of memory for a copy of the weights; decoding continues without one, which is slower")
            self.reset()
            self._possible = False
            return
        self._prepared = weakref.ref(kind)

    def products(self, spans: Spans) -> Products:
        """The products of a decode step with these adapters."""
        prepared = None if self._prepared is None else self._prepared()
        if prepared is _BASE:
            return Products(spans, spans, self._copies)
        return Products(spans, [], self._copies) if prepared is self._kind(spans) else Products(spans)

    def _kind(self, spans: Spans) -> Adapter:
        if not self._merges or len(spans) != 1:
            return _BASE
        rows, adapter = spans[0]
        frozen = not any(matrix.requires_grad for matrix in adapter.a.values())
        return adapter if frozen and isinstance(rows, slice) and rows == slice(None) else _BASE


def _copy(module: LoraLinear, adapter: Adapter) -> torch.Tensor | None:
    """The weight merged with this adapter, packed for oneDNN if that is faster. None if it equals the weight itself."""
    factors = module.factors(adapter, module.weight.dtype)
    weight = module.weight.detach()
    if factors is not None:
        weight = weight.clone()
        for columns, ranks, b in factors.parts:
            weight[columns].addmm_(b.t(), factors.a[ranks], alpha=adapter.spec.scale)
    repacked = packed(weight)
    return repacked if repacked is not None or factors is None else weight
