"""Available memory, and how to recognise that it ran out."""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress

import torch

SHARE_FOR_ADAPTERS = 0.5
"""of the free memory of a GPU, which a server lends"""

MAX_TOKENS_CPU, MAX_TOKENS_CUDA = 2048, 16384
"""Larger passes are no faster; on a CPU they are slower, because the output of an operation leaves the caches before the next
operation reads it."""

ENOUGH_TOKENS_CPU, ENOUGH_TOKENS_CUDA = 64, 2048
"""Tokens of a pass that keep the device busy. Where fewer fit, layers are recomputed, a third more work, to pack more."""

KEPT_BYTES = 256 << 20
"""Freed memory that the process keeps on a CPU. Passes allocate and free the same tensors again and again, and by default the
kernel maps each of them anew, page by page (a sixth of the time of a small pass, six percent of a large one)."""

MAX_KEPT = 32 << 20
"""Bytes of the largest kept block: glibc's limit."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""from malloc.h"""


def keep_freed_memory() -> None:
    """Make this process keep some of the memory that it frees.

    This affects the whole process, so a user's malloc settings take precedence: with MALLOC_* or GLIBC_TUNABLES in the
    environment nothing changes. Neither does it with a C library other than glibc.
    """
    if any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return
    with suppress(OSError, AttributeError, TypeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)
        mallopt(_M_MMAP_THRESHOLD, MAX_KEPT)


def use_device(device: torch.device) -> None:
    """Make a GPU the current one of this thread: kernels of Triton start on that one, whatever device their tensors are on.

    Convolutions of float32 models (towers of pictures, layers with a state) are then computed in float32, as products are:
    torch's default rounds their inputs to TF32, which moved logprobs of Qwen3-VL by 3e-4.
    """
    if device.type == "cuda":
        torch.backends.cudnn.allow_tf32 = False
        if device.index is not None:  # pyright: ignore[reportUnnecessaryComparison]
            torch.cuda.set_device(device)


def max_pass_tokens(device: torch.device) -> int:
    """Tokens above which a larger pass is no faster."""
    return MAX_TOKENS_CUDA if device.type == "cuda" else MAX_TOKENS_CPU


def enough_pass_tokens(device: torch.device) -> int:
    """Tokens from which a pass is large enough not to recompute layers for a larger one."""
    return ENOUGH_TOKENS_CUDA if device.type == "cuda" else ENOUGH_TOKENS_CPU


def cuda_memory(device: torch.device) -> int:
    """Bytes of a GPU."""
    return torch.cuda.mem_get_info(device)[1]


def free_cuda_memory(device: torch.device) -> int:
    """Bytes that can still be allocated: free ones of the driver, and cached ones of torch."""
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + kept


def release_cached_memory(device: torch.device) -> None:
    """Give the memory of a GPU that torch keeps for itself to other processes."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def room_for_adapters(device: torch.device) -> int:
    """Bytes for adapters, their moments and gradients next to a base model: half of the free memory of a GPU; elsewhere a
    quarter of the machine's memory."""
    if device.type == "cuda":
        return int(free_cuda_memory(device) * SHARE_FOR_ADAPTERS)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4


_NO_MEMORY = "DefaultCPUAllocator", "not enough memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED"
"""Of errors without a class of their own: torch's allocator on a CPU, and libraries that allocate beside it on a GPU."""


def out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, on a GPU or on the CPU (where torch raises a plain RuntimeError)."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_MEMORY)
