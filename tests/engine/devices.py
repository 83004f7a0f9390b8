"""Where the engine's tests run: the device and the dtype of the base weights, and which tests hold on the CPU alone.

    TINKER_TEST_DEVICE=cuda TINKER_TEST_DTYPE=bfloat16 python -m pytest tests/engine
    TINKER_TEST_EXECUTION=captured python -m pytest tests/engine          # the CUDA path's stand-ins, on a CPU

The defaults are cpu and float32. There the engine promises the most: the same bits from the same calls, and the same tokens
whatever else is in the batch. Elsewhere the tests run with the tolerances of `helpers.py`. Those with the mark `cpu_promise`
do not run on another device at all: they promise the bits of a whole program, measure the memory of the process, or state a
constant that the engine has for the CPU.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache

import torch

DEVICE_VARIABLE, DTYPE_VARIABLE = "TINKER_TEST_DEVICE", "TINKER_TEST_DTYPE"
EXECUTION_VARIABLE = "TINKER_TEST_EXECUTION"
CPU_PROMISE = "cpu_promise"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class PlaceError(Exception):
    """The environment asks for a device or dtype on which the tests cannot run."""


@dataclass(frozen=True)
class Place:
    """A device, and the dtype of the base model's weights on it."""

    device: torch.device
    dtype: torch.dtype
    captured: bool = False
    """the CUDA path with its stand-ins, on a CPU"""

    @property
    def keeps_bits(self) -> bool:
        """Whether the same calls in the same order give the same bits."""
        return self.device.type == "cpu" and not self.captured

    @property
    def is_reference(self) -> bool:
        """Whether this is where every bound of the tests holds as it is written: the CPU in float32."""
        return self.keeps_bits and self.dtype == torch.float32

    def runs(self, marks: Collection[str]) -> bool:
        """Whether a test with these marks is for this place."""
        return self.keeps_bits or CPU_PROMISE not in marks

    def __str__(self) -> str:
        how = ", the CUDA path with its stand-ins" if self.captured else ""
        return f"{self.device} in {str(self.dtype).removeprefix('torch.')}{how}"


def place_from(environment: Mapping[str, str]) -> Place:
    """The place that TINKER_TEST_DEVICE and TINKER_TEST_DTYPE name.

    Raises:
        PlaceError: no such device or dtype, torch cannot compute there, or float32 would be computed in TF32.
    """
    name = environment.get(DEVICE_VARIABLE) or "cpu"
    dtype = environment.get(DTYPE_VARIABLE) or "float32"
    if dtype not in DTYPES:
        raise PlaceError(f"{DTYPE_VARIABLE} must be {' or '.join(DTYPES)}, got {dtype!r}")
    try:
        device = torch.device(name)
        float(torch.ones(2, device=device).sum())
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())  # as tensors and models name theirs
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise PlaceError(
            f"{DEVICE_VARIABLE}={name!r}: torch {torch.__version__} cannot compute there ({str(error).splitlines()[0]}). "
            f"Install a build of torch for this device, name one that it sees, such as cpu, cuda or cuda:1, or unset "
            f"{DEVICE_VARIABLE} to run on the CPU"
        ) from error
    if DTYPES[dtype] == torch.float32 and torch.get_float32_matmul_precision() != "highest":
        raise PlaceError(
            "float32 matrix products are computed in TF32 or bfloat16 here (torch.get_float32_matmul_precision() is "
            f"{torch.get_float32_matmul_precision()!r}), which no bound of the tests allows for; unset "
            "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"
        )
    execution = environment.get(EXECUTION_VARIABLE) or "reference"
    if execution not in ("reference", "captured"):
        raise PlaceError(f"{EXECUTION_VARIABLE} must be reference or captured, got {execution!r}")
    if execution == "captured" and device.type != "cpu":
        raise PlaceError(f"{EXECUTION_VARIABLE}=captured runs stand-ins on a CPU; a GPU has the path itself. Unset it")
    return Place(device, DTYPES[dtype], execution == "captured")


@cache
def here() -> Place:
    """Where this session's tests run."""
    return place_from(os.environ)
