"""Which of torchrun's processes this one is, and whether each holds the base model or a part of it."""

from __future__ import annotations

import os

from tinker_local_backend import environment
from tinker_local_backend.errors import RequestError


def world_size() -> int:
    """Processes that torchrun has started for this program; 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "TORCHELASTIC_RUN_ID" in os.environ else 1


def rank() -> int:
    """This process's rank; 0 without torchrun."""
    return int(os.environ["RANK"]) if world_size() > 1 else 0


def refuse(what: str) -> None:
    """Raise RequestError under torchrun, for a program that must be one process."""
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
    """Whether the base weights are sharded over the processes. Raises RequestError if another setting rules that out."""
    if environment.read("TINKER_LOCAL_BASE_WEIGHTS") != "sharded":
        return False
    if world_size() == 1:
        raise RequestError(
            "TINKER_LOCAL_BASE_WEIGHTS=sharded shards the base model over the processes of torchrun, but there is only one: "
            "start it with torchrun --nproc-per-node N, or unset the variable"
        )
    if environment.read("TINKER_LOCAL_CUDA") == "strict":
        raise RequestError(
            "TINKER_LOCAL_CUDA=strict with TINKER_LOCAL_BASE_WEIGHTS=sharded: the CUDA path keeps its own copy of the weights, "
            "so sharded models run in plain torch; unset one of the two"
        )
    return True
