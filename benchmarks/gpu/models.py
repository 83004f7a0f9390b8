"""Random models of real shapes, made on the device from a config, with next-token distributions like those of a trained one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.models import SHAPES, Shape, model_config, word_tokenizer
from benchmarks.workload import random_tokens
from tinker_local_backend.engine.model.base_model import BaseModel
from tinker_local_backend.engine.model.lora import Adapter
from tinker_local_backend.engine.model.lora_spec import LoraSpec
from tinker_local_backend.engine.models import adopt_module

ENTROPY_NATS = 2.5
"""mean entropy of the next token, similar to that of trained models at temperature 1"""

PROBED_TOKENS = 64


def shape_of(name: str, layers: int | None = None, positions: int = 0) -> Shape:
    """A shape of the benchmarks, with at most `layers` layers, and a context of at least `positions`."""
    shape = SHAPES[name]
    shape = replace(shape, max_positions=max(positions, shape.max_positions))
    return shape if layers is None else replace(shape, layers=min(layers, shape.layers))


def random_module(shape: Shape, device: torch.device, dtype: torch.dtype, seed: int = 0) -> PreTrainedModel:
    """transformers' module with random weights, created on the device.

    A freshly initialised model is nearly uniform over its vocabulary, which hides rounding errors. So the last norm, and with it
    the logits, is scaled up until the next token has ENTROPY_NATS on average.
    """
    config = model_config(shape)
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), torch.device(device):
        torch.manual_seed(seed)
        module = AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        tokens = torch.tensor([random_tokens(shape.vocab, PROBED_TOKENS, seed)], device=device)
        logits_TV = module.eval()(tokens, use_cache=False).logits[0].float()
        module.base_model.norm.weight.mul_(sharpness(logits_TV))
    return module


def sharpness(logits_TV: torch.Tensor) -> float:
    """The factor on the logits at which the mean entropy is ENTROPY_NATS, by bisection of its logarithm."""
    low, high = -10.0, 10.0
    for _ in range(30):
        middle = (low + high) / 2
        logprobs_TV = (logits_TV * math.exp(middle)).log_softmax(-1)
        entropy = float(-(logprobs_TV.exp() * logprobs_TV).sum(-1).mean())
        low, high = (middle, high) if entropy > ENTROPY_NATS else (low, middle)
    return math.exp(low)


def random_model(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    layers: int | None = None,
    seed: int = 0,
    positions: int = 0,
) -> BaseModel:
    """The engine's model over `random_module`."""
    shape = shape_of(name, layers, positions)
    module = random_module(shape, device, dtype, seed)
    return adopt_module(f"random/{name}", module, word_tokenizer(shape.vocab))


def fill_adapter(adapter: Adapter, seed: int, size: float = 0.02) -> None:
    """Fill the B matrices so that every logit changes; the head's are smaller, because its logits are large."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, matrix in sorted(adapter.b.items()):
            scale = size / 4 if name.endswith("lm_head") else size
            matrix.copy_(torch.randn(matrix.shape, generator=generator) * scale)


def frozen_adapters(model: BaseModel, rank: int, count: int) -> Sequence[Adapter]:
    """Snapshots of `count` different adapters."""
    adapters = [model.new_adapter(LoraSpec(rank), seed) for seed in range(count)]
    for seed, adapter in enumerate(adapters):
        fill_adapter(adapter, seed)
    return [adapter.snapshot(model.dtype) for adapter in adapters]
