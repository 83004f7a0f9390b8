"""How much one training pass may keep in memory."""

from __future__ import annotations

import gc

import torch

from tinker_local_backend import environment
from tinker_local_backend.engine.model.base_model import BaseModel
from tinker_local_backend.engine.model.memory import SHARE_OF_FREE_CUDA_MEMORY, free_cuda_memory, most_tokens

DEFAULT_ACTIVATION_BYTES_CPU = 1 << 30


class ActivationBudget:
    """Bound on the tokens of one pass, from the memory for activations.

    TINKER_LOCAL_ACTIVATION_MB sets that memory; the default is 1 GiB on a CPU (a constant, so that runs are reproducible)
    and half of what is free on a GPU.
    """

    def __init__(self, model: BaseModel):
        self._device = model.device
        megabytes = environment.read("TINKER_LOCAL_ACTIVATION_MB")
        available = DEFAULT_ACTIVATION_BYTES_CPU if megabytes is None else megabytes << 20
        if megabytes is None and self._device.type == "cuda":
            available = int(free_cuda_memory(self._device) * SHARE_OF_FREE_CUDA_MEMORY)
        self._fitting = available // model.activation_bytes_per_token()
        self.tokens = max(1, min(most_tokens(self._device), self._fitting))

    def must_recompute(self, tokens: int) -> bool:
        """Whether a pass of this many tokens (a single long sequence) keeps too much unless layers are recomputed."""
        return tokens > self._fitting

    def release(self) -> None:
        """After a failed pass: give back what it held."""
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
