"""What a model takes of memory: its weights, a token of the KV cache, a token of a training pass, and an adapter.

The same arithmetic serves a loaded model, one on the meta device, and the table of docs/models.md (benchmarks/quantized.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tinker_local_backend.engine.model.expert_matrices import matrices_of
from tinker_local_backend.engine.model.experts import activation_width, routed_experts
from tinker_local_backend.engine.model.memory import SHARE_FOR_ACTIVATIONS, cache_bytes
from tinker_local_backend.engine.model.quantized import QuantizedLinear

BYTES_OF_TRAINED = 16
"""a number of an adapter: itself, its gradient and two moments, in float32"""
BYTES_OF_SERVED = 2
"""the same in a snapshot, in 16 bits"""

RESERVED_CUDA = 3 << 30
"""of a card: the driver and CUDA's context, a pass's buffer of logits (1 GiB), and what the allocator cannot use"""

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


def activation_bytes(layers: int, residual: int, attended: int, mlp: int, experts: int, dtype: torch.dtype) -> int:
    """Estimated bytes that the backward pass keeps for one token in all layers.

    Measured on Llama-like layers as the growth of a process: about eight tensors of the residual's width, as many of
    the queries' and keys', and five of the MLP's. An estimate is enough: it bounds the tokens packed into one pass,
    and running out of memory is handled elsewhere.

    Args:
        residual, attended, mlp: widths of a token's vector in the residual, in queries and keys together, and in the MLP.
        experts: numbers that are kept in routed experts.
    """
    return layers * (8 * residual + 8 * attended + 5 * mlp + experts) * dtype.itemsize


def activation_bytes_of(model: Any) -> int:
    """`activation_bytes` of a BaseModel."""
    heads, kv_heads, head_dim = model.attention_shape
    config = model.config
    of_mixers = {id(module) for mixer in model.mixers[:1] for module in mixer.modules()}
    mixed = sum(linear.out_features for linear in model.linears.values() if id(linear) in of_mixers)
    attended = max((heads + kv_heads) * head_dim, mixed)
    of_mlp = [linear.out_features for linear in model.linears.values() if linear.part == "mlp"]
    sizes = getattr(config, "intermediate_size", None) or max(of_mlp, default=0)
    mlp = max(sizes) if isinstance(sizes, list) else sizes  # one for all layers, or one per layer
    in_experts = 0
    if model.experts:
        experts: Any = model.experts[0]
        chosen = getattr(config, "num_experts_per_tok", None)
        in_experts = activation_width(experts, chosen if isinstance(chosen, int) else experts.num_experts)
    return activation_bytes(config.num_hidden_layers, config.hidden_size, attended, mlp, in_experts, model.dtype)


def kv_bytes(numbers: int, dtype: torch.dtype) -> int:
    """Bytes of a token in the KV cache; `numbers`: of its keys and values in all layers. Without any, about that of its place
    in the prefix cache."""
    return max(32, numbers * dtype.itemsize)


@dataclass(frozen=True)
class Footprint:
    """Bytes of a model on a GPU."""

    weights: int
    largest: int
    """a linear's weight, dequantised; 0 for plain weights"""
    kv_token: int
    pass_token: int
    recomputed_token: int
    """as `pass_token`, of a pass that recomputes its layers: their inputs, and all of one layer"""
    adapter: int
    """numbers of its matrices"""

    def free(self, card: int) -> int:
        """What of a card's bytes is left once the model and an adapter in training are there; negative: they do not fit."""
        taken = self.weights + self.largest + self.adapter * (BYTES_OF_TRAINED + BYTES_OF_SERVED)
        return card - RESERVED_CUDA - taken

    def kv_tokens(self, card: int) -> int:
        """Tokens of the KV cache by default."""
        return max(0, cache_bytes(self.free(card)) // self.kv_token)

    def pass_tokens(self, card: int) -> int:
        """Tokens of a training pass without recomputation, beside this cache."""
        return max(0, int(self._beside_cache(card) * SHARE_FOR_ACTIVATIONS) // self.pass_token)

    def longest_tokens(self, card: int) -> int:
        """The longest sequence that can be trained on beside this cache, with recomputation."""
        return max(0, self._beside_cache(card) // self.recomputed_token)

    def _beside_cache(self, card: int) -> int:
        return self.free(card) - self.kv_tokens(card) * self.kv_token


def footprint(model: Any, quantization: str | None, rank: int) -> Footprint:
    """That of a model with plain weights, on the meta device say, whose layers all attend with keys and values of one width.

    Args:
        quantization: value of TINKER_LOCAL_QUANTIZATION.
        rank: of an adapter on every linear, the head, and routed experts in the layout `shared_outer`.
    """
    config, head = model.config.get_text_config(), model.get_output_embeddings()
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    matrices = (m for one in routed_experts(model) for m in matrices_of("", one, "shared_outer"))
    of_experts = sum(math.prod(shape) for matrix in matrices for shape in matrix.shapes(1))
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    kv_heads = config.num_key_value_heads
    chosen, expert = (getattr(config, name, None) or 0 for name in ("num_experts_per_tok", "moe_intermediate_size"))
    layers, experts = config.num_hidden_layers, chosen * (5 * expert + 4 * config.hidden_size)
    attended = (config.num_attention_heads + kv_heads) * width
    per_token = activation_bytes(layers, config.hidden_size, attended, config.intermediate_size, experts, model.dtype)
    return Footprint(
        weights=weight_bytes(model, quantization),
        largest=max(m.weight.numel() for m in linears if m is not head) * model.dtype.itemsize if quantization else 0,
        kv_token=kv_bytes(layers * kv_heads * 2 * width, model.dtype),
        pass_token=per_token,
        recomputed_token=per_token // layers + layers * config.hidden_size * model.dtype.itemsize,
        adapter=rank * (sum(module.in_features + module.out_features for module in linears) + of_experts),
    )
