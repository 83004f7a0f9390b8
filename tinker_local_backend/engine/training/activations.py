"""How many tokens one training pass may have: the memory for its activations, and what a token takes of it."""

from __future__ import annotations

import gc
import logging
import weakref

import torch

from tinker_local_backend import environment
from tinker_local_backend.engine.model.attention import PackedPlan
from tinker_local_backend.engine.model.base_model import BaseModel
from tinker_local_backend.engine.model.head import chunk_elements
from tinker_local_backend.engine.model.lora import Adapter
from tinker_local_backend.engine.model.lora_spec import LoraSpec
from tinker_local_backend.engine.model.memory import (
    SHARE_FOR_ACTIVATIONS,
    free_cuda_memory,
    max_pass_tokens,
    out_of_memory,
)

logger = logging.getLogger(__name__)

DEFAULT_ACTIVATION_BYTES_CPU = 1 << 30

_MEASURED: weakref.WeakKeyDictionary[BaseModel, int] = weakref.WeakKeyDictionary()

MEASURED_TOKENS = 256, 1024
"""of the two passes whose difference is what a token takes"""


class ActivationBudget:
    """Bound on the tokens of one pass, from the memory for activations.

    TINKER_LOCAL_ACTIVATION_MB sets that memory. The default is 1 GiB on a CPU (a constant, so that runs are reproducible), and
    on a GPU what is free when a call begins, less the buffers of logits.
    """

    def __init__(self, model: BaseModel):
        self._device = model.device
        self.evens_out = self._device.type == "cuda"
        """whether passes of one call should be of a size: on a GPU a small one takes as long as one of some thousands, since
        the host takes as long to launch its kernels"""
        megabytes = environment.read("TINKER_LOCAL_ACTIVATION_MB")
        available = DEFAULT_ACTIVATION_BYTES_CPU if megabytes is None else megabytes << 20
        if megabytes is None and self._device.type == "cuda":
            available = int((free_cuda_memory(self._device) - logits_bytes(self._device)) * SHARE_FOR_ACTIVATIONS)
        self.fitting = max(0, available) // bytes_per_token(model)
        self.tokens = max(1, min(max_pass_tokens(self._device), self.fitting))

    def must_recompute(self, tokens: int) -> bool:
        """Whether a pass of this many tokens (a single long sequence) needs recomputation to fit."""
        return tokens > self.fitting

    def release(self) -> None:
        """Free the memory of a failed pass."""
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()


def logits_bytes(device: torch.device) -> int:
    """Of what scoring takes for logits: two buffers in float32, their gradient in 16 bits, and the allocator's rounding."""
    return 12 * chunk_elements(device)


def bytes_per_token(model: BaseModel) -> int:
    """What a token of a pass takes of memory: on a CPU the estimate of `activation_bytes_per_token`; on a GPU measured, once for
    each model, with the kernels that its passes use."""
    if model.device.type != "cuda":
        return model.activation_bytes_per_token()
    if model not in _MEASURED:
        _MEASURED[model] = _measured(model)
    return _MEASURED[model]


def _measured(model: BaseModel) -> int:
    try:
        adapter = model.new_adapter(LoraSpec(8), seed=0)
        few, many = MEASURED_TOKENS
        _peak(model, adapter, few)  # compiles kernels, and allocates what libraries keep
        return max(1, (_peak(model, adapter, many) - _peak(model, adapter, few)) // (many - few))
    except Exception as error:
        estimate = model.activation_bytes_per_token()
        why = "out of memory" if out_of_memory(error) else f"{type(error).__name__}: {error}"
        logger.warning(
            "what a training pass takes could not be measured (%s); estimated: %d bytes a token", why, estimate
        )
        return estimate


def _peak(model: BaseModel, adapter: Adapter, tokens: int) -> int:
    """Most bytes that a forward and backward pass takes at a time."""
    ids = torch.zeros(tokens, dtype=torch.int64, device=model.device)
    positions = torch.arange(tokens, device=model.device)
    torch.cuda.reset_peak_memory_stats(model.device)
    before = torch.cuda.memory_allocated(model.device)
    with torch.inference_mode(False), model.routed(adapter):
        hidden_TH, backward = model.training_pass(ids, positions, PackedPlan.whole([tokens]), adapter)
        backward(torch.ones_like(hidden_TH))
    return torch.cuda.max_memory_allocated(model.device) - before
