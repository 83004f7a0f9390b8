"""What a model takes of memory: its weights, a token of the KV cache, a token of a training pass, and an adapter.

The same arithmetic serves a loaded model, one on the meta device, `python -m tinker_local_backend.plan`, and the table of
docs/models.md (benchmarks/quantized.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tinker_local_backend.engine.model.decoder import is_known
from tinker_local_backend.engine.model.expert_matrices import matrices_of
from tinker_local_backend.engine.model.experts import activation_width, kept_in_experts, routed_experts
from tinker_local_backend.engine.model.quantized import QuantizedLinear

BYTES_OF_TRAINED = 16
"""a number of an adapter: itself, its gradient and two moments, in float32"""
BYTES_OF_SERVED = 2
"""the same in a snapshot, in 16 bits"""

_NF4_BLOCK, _NF4_OUTER_BLOCK = 64, 256


def made_bytes(quantization: str, shape: tuple[int, int]) -> int:
    """Bytes of a weight (out, in) that TINKER_LOCAL_QUANTIZATION brings into fewer bits.

    nf4: half a byte for a number, a byte for the scale of 64, four for the scale of 256 scales, and the tables of both. int8 and
    fp8: a byte for a number and four for the scale of a row.
    """
    out_features, in_features = shape
    numbers = out_features * in_features
    if quantization in ("int8", "fp8"):
        return numbers + 4 * out_features
    scales = -(-numbers // _NF4_BLOCK)
    return -(-numbers // 2) + scales + 4 * (-(-scales // _NF4_OUTER_BLOCK)) + 4 * (16 + 256) + 4


def weight_bytes(model: nn.Module, quantization: str | None = None) -> int:
    """Bytes of a model's weights and buffers, on any device. Tensors that are shared count once.

    quantization: what TINKER_LOCAL_QUANTIZATION will make of its plain linears, all but the head.
    """
    return sum(_weights(model, quantization)[0])


def parameter_count(model: nn.Module) -> int:
    """Numbers of a model's weights and buffers, in whatever format they are kept."""
    return sum(_weights(model, None)[1])


def _weights(model: Any, quantization: str | None) -> tuple[list[int], list[int]]:
    """Bytes and numbers of each tensor."""
    head, seen = model.get_output_embeddings(), set[int]()
    sizes: list[int] = []
    counts: list[int] = []
    for module in model.modules():
        if isinstance(module, QuantizedLinear):
            sizes.append(module.nbytes)
            counts.append(module.out_features * module.in_features + (0 if module.bias is None else len(module.bias)))
            continue
        made = quantization if isinstance(module, nn.Linear) and module is not head else None
        for name, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            if id(tensor) not in seen:
                seen.add(id(tensor))
                shape = tuple(tensor.shape)
                sizes.append(tensor.nbytes if made is None or name != "weight" else made_bytes(made, shape))
                counts.append(tensor.numel())
    return sizes, counts


@dataclass(frozen=True)
class TokenBytes:
    """Bytes that a training pass has in memory for each of its tokens."""

    kept: int
    """what the backward pass keeps in all layers"""
    recomputed: int
    """the same with recomputed layers: their inputs, and all of the one that runs again"""
    beside: int
    """what comes and goes: gradients within a layer, the last hidden states and their gradient"""

    @property
    def plain(self) -> int:
        return self.kept + self.beside

    @property
    def with_recomputation(self) -> int:
        return self.recomputed + self.beside


KEEPING_LESS = "norms", "swiglu", "layers"
"""Parts of the CUDA path (cuda/execution.py) with which a pass keeps less, in the order of the arguments below."""


def token_bytes(
    layers: int,
    residual: int,
    attended: int,
    mlp: int,
    experts: int,
    dtype: torch.dtype,
    mixed: int = 0,
    fused_norms: bool = False,
    fused_mlp: bool = False,
    joined: bool = False,
) -> TokenBytes:
    """What a pass through decoder layers keeps of a token, for gradients of adapters and not of weights.

    Counted in the layers of Llama and Qwen3, and within a fifth of what autograd saves there (tests/engine/test_activations.py):
    inputs and outputs of both norms; queries and keys before and after their rotation, values, and what was attended to; gate,
    up, the activation and the product. Norms that are not fused keep float32 copies in 16 bits, for which 4.5 tensors of
    attention are the mean of the modules and of the joined decoder.

    Args:
        residual, attended, mlp: widths of a token's vector in the residual, in queries and keys together, and in the MLP.
        experts: numbers that are kept in routed experts.
        mixed: width of the linears of a layer with a state, which keeps about eight tensors of it.
        fused_norms, fused_mlp: whether RMS norms are one operation each, and activation and product together.
        joined: whether layers are those of cuda/fused_layer.py, which keep both sums of residuals in float32, the joined product
            of queries, keys and values, what was attended to, and that of gate and up.
    """
    if joined:
        inputs = residual * max(4, dtype.itemsize)
        of_layer = 2 * inputs + (2 * attended + 2 * mlp) * dtype.itemsize
        return TokenBytes(
            kept=layers * of_layer,
            recomputed=layers * inputs + of_layer + (2 * residual + mlp) * dtype.itemsize,
            beside=(6 * residual + 3 * mlp) * dtype.itemsize,
        )
    copies = dtype.itemsize < 4 and not fused_norms
    of_norms, of_attention = (6, 4.5) if copies else (4, 3)
    of_mixing = max(int(of_attention * attended), 8 * mixed)
    layer = (of_norms * residual + of_mixing + (3 if fused_mlp else 4) * mlp + experts) * dtype.itemsize
    return TokenBytes(
        kept=layers * layer,
        recomputed=layers * residual * dtype.itemsize + layer,
        beside=(6 * residual + 2 * mlp) * dtype.itemsize,
    )


def token_bytes_of(model: Any) -> TokenBytes:
    """`token_bytes` of a BaseModel."""
    heads, kv_heads, head_dim = model.attention_shape
    config, parts = model.config, model.execution.parts()
    of_mixers = {id(module) for mixer in model.mixers[:1] for module in mixer.modules()}
    mixed = sum(linear.out_features for linear in model.linears.values() if id(linear) in of_mixers)
    of_mlp = max((linear.out_features for linear in model.linears.values() if linear.part == "mlp"), default=0)
    sizes = of_mlp if model.experts else getattr(config, "intermediate_size", None) or of_mlp
    mlp = max(sizes) if isinstance(sizes, list) else sizes  # one for all layers, or one per layer
    in_experts = 0
    if model.experts:
        experts: Any = model.experts[0]
        chosen = getattr(config, "num_experts_per_tok", None)
        in_experts = activation_width(experts, chosen if isinstance(chosen, int) else experts.num_experts)
    shape = config.num_hidden_layers, config.hidden_size, (heads + kv_heads) * head_dim, mlp, in_experts
    return token_bytes(*shape, model.dtype, mixed, *(parts.get(part) == "on" for part in KEEPING_LESS))


def kv_bytes(numbers: int, dtype: torch.dtype) -> int:
    """Bytes of a token in the KV cache; `numbers`: of its keys and values in all layers. Without any, about that of its place
    in the prefix cache."""
    return max(32, numbers * dtype.itemsize)


@dataclass(frozen=True)
class Footprint:
    """Bytes of a model on a GPU. memory_plan.py divides a card by them."""

    weights: int
    largest: int
    """a linear's weight, dequantised; 0 for plain weights"""
    kv_token: int
    pass_token: int
    recomputed_token: int
    """as `pass_token`, of a pass that recomputes its layers: their inputs, and all of one layer"""
    adapter: int
    """numbers of its matrices"""
    vocabulary: int
    pictures: int = 0
    """embeddings of pictures that are kept"""


def footprint(model: Any, quantization: str | None, rank: int, fused: bool = True) -> Footprint:
    """That of a model with plain weights, on the meta device say, whose layers all attend with keys and values of one width.

    Args:
        quantization: value of TINKER_LOCAL_QUANTIZATION.
        rank: of an adapter on every linear, the head, and routed experts in the layout `shared_outer`.
        fused: as on a GPU whose kernels pass their checks.
    """
    config, head = model.config.get_text_config(), model.get_output_embeddings()
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    matrices = (m for one in routed_experts(model) for m in matrices_of("", one, "shared_outer"))
    of_experts = sum(math.prod(shape) for matrix in matrices for shape in matrix.shapes(1))
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    kv_heads = config.num_key_value_heads
    chosen, expert = (getattr(config, name, None) or 0 for name in ("num_experts_per_tok", "moe_intermediate_size"))
    layers, experts = config.num_hidden_layers, kept_in_experts(chosen, expert, config.hidden_size)
    attended = (config.num_attention_heads + kv_heads) * width
    mlp = config.intermediate_size if not experts else getattr(config, "shared_expert_intermediate_size", None) or 0
    # A GPU fuses norms and activations, and the check at start finds them right.
    joined = fused and quantization is None and is_known(model.base_model)
    sizes = token_bytes(layers, config.hidden_size, attended, mlp, experts, model.dtype, 0, fused, fused, joined)
    return Footprint(
        weights=weight_bytes(model, quantization),
        largest=max(m.weight.numel() for m in linears if m is not head) * model.dtype.itemsize if quantization else 0,
        kv_token=kv_bytes(layers * kv_heads * 2 * width, model.dtype),
        pass_token=sizes.plain,
        recomputed_token=sizes.with_recomputation,
        adapter=rank * (sum(module.in_features + module.out_features for module in linears) + of_experts),
        vocabulary=config.vocab_size,
    )
