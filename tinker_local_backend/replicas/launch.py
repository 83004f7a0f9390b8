"""Which of torchrun's processes this one is, and whether each holds the base model or a part of it."""

from __future__ import annotations

import os

from tinker_local_backend import environment
from tinker_local_backend.errors import RequestError


def world_size() -> int:
    """Processes that torchrun has started for this program; 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "TORCHELASTIC_RUN_ID" in os.environ else 1


def rank() -> int:
    """Of this process; 0 without torchrun."""
    return int(os.environ["RANK"]) if world_size() > 1 else 0


def refuse(what: str) -> None:
    """Raise RequestError for a program that cannot be several processes."""
    if world_size() > 1:
        raise RequestError(f"{what} runs as one process, not under torchrun: start it with python -m")


def check_sampler() -> None:
    """Raise RequestError for a sampler that replicas cannot share."""
    if environment.read("TINKER_LOCAL_SAMPLER") == "vllm":
        raise RequestError(
            "TINKER_LOCAL_SAMPLER=vllm under torchrun: every replica samples with its own model, so vLLM would be started "
            f"{world_size()} times; unset it, or start one process and let vLLM use the other GPUs "
            "(TINKER_LOCAL_VLLM_TENSOR_PARALLEL_SIZE)"
        )


def sharded() -> bool:
    """Whether the processes divide the base weights. Raises RequestError where that makes no sense."""
    if environment.read("TINKER_LOCAL_BASE_WEIGHTS") != "sharded":
        return False
    if world_size() == 1:
        raise RequestError(
            "TINKER_LOCAL_BASE_WEIGHTS=sharded divides the base model over the processes of torchrun, and this is one alone: "
            "start it with torchrun --nproc-per-node N, or unset the variable"
        )
    if environment.read("TINKER_LOCAL_CUDA") == "strict":
        raise RequestError(
            "TINKER_LOCAL_CUDA=strict beside TINKER_LOCAL_BASE_WEIGHTS=sharded: the CUDA path keeps weights of its own, so "
            "sharded models run in plain torch; unset one of the two"
        )
    return True
