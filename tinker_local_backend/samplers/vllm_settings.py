"""The TINKER_LOCAL_VLLM_* variables and their defaults."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from tinker_local_backend import environment
from tinker_local_backend.errors import RequestError

DEFAULT_SLOTS = 8
DEFAULT_SHARE = {"cuda": 0.4, "cpu": 0.15}
"""vLLM's default share of the GPU's memory, or of the machine's on a CPU. The engine trains in the rest."""


@dataclass(frozen=True)
class VllmSettings:
    """Settings of a vLLM process, or of a server at `url`, which decides all but `slots` and `api_key`."""

    slots: int
    """adapters that are loaded at a time"""
    url: str | None
    api_key: str | None = field(repr=False)
    """for the server at `url`"""
    python: str
    memory_share: float
    max_model_len: int | None
    tensor_parallel_size: int
    enforce_eager: bool
    sleep: bool
    """whether the process frees its memory while the engine trains"""
    restart_every: int
    """adapters after which the worker is replaced; 0: never"""

    @classmethod
    def from_environment(cls, device: torch.device) -> VllmSettings:
        """Raises RequestError if vLLM is not available, or if it is to sleep on a CPU."""
        url = environment.read("TINKER_LOCAL_VLLM_URL")
        sleep = bool(environment.read("TINKER_LOCAL_VLLM_SLEEP"))
        if sleep and device.type != "cuda":
            raise RequestError(
                f"TINKER_LOCAL_VLLM_SLEEP=1 on {device.type}: vLLM can free only GPU memory; unset it here"
            )
        return cls(
            slots=environment.read("TINKER_LOCAL_VLLM_MAX_LORAS") or DEFAULT_SLOTS,
            url=url,
            api_key=environment.read("TINKER_LOCAL_VLLM_API_KEY"),
            python="" if url else environment.vllm_python(),
            memory_share=environment.read("TINKER_LOCAL_VLLM_GPU_MEMORY_UTILIZATION") or DEFAULT_SHARE[device.type],
            max_model_len=environment.read("TINKER_LOCAL_VLLM_MAX_MODEL_LEN"),
            tensor_parallel_size=environment.read("TINKER_LOCAL_VLLM_TENSOR_PARALLEL_SIZE") or 1,
            enforce_eager=bool(environment.read("TINKER_LOCAL_VLLM_ENFORCE_EAGER")),
            sleep=sleep,
            restart_every=environment.read("TINKER_LOCAL_VLLM_RESTART_EVERY") or 0,
        )
