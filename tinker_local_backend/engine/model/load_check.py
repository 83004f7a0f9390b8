"""The check of a model at load: what its logits are compared with, and how far they reach."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

from tinker_local_backend.engine.model.sharding import Shards, Step, Whole

LARGEST_ERROR = {torch.float64: 1e-3, torch.float32: 1e-3, torch.bfloat16: 1e-1, torch.float16: 1e-1}
"""Relative errors of logits that are still rounding."""


def check_sequences(module: PreTrainedModel, device: torch.device) -> list[torch.Tensor]:
    """The tokens of the sequences that are compared."""
    head: Any = module.get_output_embeddings()
    return [torch.arange(n, device=device) % head.weight.shape[0] for n in (5, 3)]


@torch.inference_mode()
def reference_logits(module: PreTrainedModel, device: torch.device, shards: Shards | Whole) -> list[torch.Tensor]:
    """Logits (T, vocabulary) in float32 of each check sequence, as transformers computes them with its own functions."""
    model: Any = module
    model.set_attn_implementation("eager")
    model.set_experts_implementation("eager")
    logits = []
    for tokens in check_sequences(module, device):
        with shards.computing(Step.FORWARD):
            logits.append(model(input_ids=tokens[None], use_cache=False).logits[0].float())
    return logits


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """|found - wanted| / |wanted|"""
    return float((found - wanted).norm() / wanted.norm().clamp(min=1e-12))


def context_length(config: Any, windows: Mapping[int, int | None]) -> int:
    """The model's positions, or less where a layer's sliding window does not reach the attention function or where longer
    sequences change the positions of shorter ones.

    Args:
        config: of the text model.
        windows: the sliding window that each layer gave to the attention function.
    """
    limits = [config.max_position_embeddings]
    window = getattr(config, "sliding_window", None)
    if window and getattr(config, "use_sliding_window", True):
        kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
        honoured = all(windows.get(i) == window for i, kind in enumerate(kinds) if kind == "sliding_attention")
        if not honoured:
            limits.append(window)
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":  # beyond this length it changes the frequencies of the whole pass
        limits.append(rope["original_max_position_embeddings"])
    return min(limits)
