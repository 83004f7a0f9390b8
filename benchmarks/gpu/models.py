"""Random models of real shapes, made on the device from a config, with next-token distributions like those of a trained one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.models import SHAPES, Shape, qwen3_config, word_tokenizer
from tinker_local_backend.engine.base_model import BaseModel
from tinker_local_backend.engine.lora import Adapter, LoraSpec

ENTROPY_NATS = 2.5
"""of the next token: about what trained models have at temperature 1"""


def shape_of(name: str, layers: int | None = None) -> Shape:
    """A shape of the benchmarks, cut to `layers` layers if that is given."""
    shape = SHAPES[name]
    return shape if layers is None else replace(shape, layers=min(layers, shape.layers))


def random_module(shape: Shape, device: torch.device, dtype: torch.dtype, seed: int = 0) -> PreTrainedModel:
    """transformers' own module with random weights, made on the device.

    A fresh model is nearly uniform over its vocabulary, which hides every error of rounding. So the last norm is scaled up:
    logits of a Gaussian with variance 2 (ln V - h) have an entropy of about h nats.
    """
    config = qwen3_config(shape)
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), torch.device(device):
        torch.manual_seed(seed)
        module = AutoModelForCausalLM.from_config(config, dtype=dtype)
    spread = math.sqrt(2 * max(0.5, math.log(shape.vocab) - ENTROPY_NATS))
    with torch.no_grad():
        module.base_model.norm.weight.mul_(spread / (config.initializer_range * math.sqrt(shape.hidden)))
    return module.eval()


def random_model(
    name: str, device: torch.device, dtype: torch.dtype, layers: int | None = None, seed: int = 0
) -> BaseModel:
    """The engine's model over `random_module`."""
    shape = shape_of(name, layers)
    module = random_module(shape, device, dtype, seed)
    return BaseModel.from_module(f"random/{name}", module, word_tokenizer(shape.vocab))


def fill_adapter(adapter: Adapter, seed: int, size: float = 0.02) -> None:
    """B matrices that change every logit; the head's are smaller, because its logits are large."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, matrix in sorted(adapter.b.items()):
            scale = size / 4 if name.endswith("lm_head") else size
            matrix.copy_(torch.randn(matrix.shape, generator=generator) * scale)


def frozen_adapters(model: BaseModel, rank: int, count: int) -> Sequence[Adapter]:
    """Snapshots of so many different adapters."""
    adapters = [model.new_adapter(LoraSpec(rank, train_unembed=False), seed) for seed in range(count)]
    for seed, adapter in enumerate(adapters):
        fill_adapter(adapter, seed)
    return [adapter.snapshot(model.dtype) for adapter in adapters]
