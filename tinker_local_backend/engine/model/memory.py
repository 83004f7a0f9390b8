"""Available memory, and how to recognise that it ran out."""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress

import torch

SHARE_FOR_ADAPTERS = 0.5
"""of what is free on a GPU beside a base model"""

SHARE_FOR_CACHE, LEAST_CACHE = 0.25, 13 << 29
"""of what is free on a GPU beside a base model, for keys and values. A training pass needs more to fill the GPU: 16,384 tokens of
a 4B model take 40 GiB, and a hundred sequences of 1,024 keep 15. On a small card at least so many bytes, up to half of them."""

SHARE_FOR_ACTIVATIONS = 0.85
"""of what is free on a GPU when a training call begins; the rest is what the allocator cannot use"""

MAX_TOKENS_CPU, MAX_TOKENS_CUDA = 2048, 16384
"""Larger passes are no faster; on a CPU they are slower, because the output of an operation leaves the caches before the next
operation reads it."""

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
    """Make a GPU the current one of this thread: kernels of Triton start on that one, whatever device their tensors are on."""
    if device.type == "cuda" and device.index is not None:  # pyright: ignore[reportUnnecessaryComparison]
        torch.cuda.set_device(device)


def max_pass_tokens(device: torch.device) -> int:
    """Tokens above which a larger pass is no faster."""
    return MAX_TOKENS_CUDA if device.type == "cuda" else MAX_TOKENS_CPU


def free_cuda_memory(device: torch.device) -> int:
    """Bytes that can still be allocated: free ones of the driver, and cached ones of torch."""
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + kept


def cache_bytes(free: int) -> int:
    """What keys and values get by default of the bytes that are free beside a base model."""
    return int(max(free * SHARE_FOR_CACHE, min(free / 2, LEAST_CACHE)))


def room_for_adapters(device: torch.device) -> int:
    """Bytes for adapters, their moments and gradients next to a base model: half of the free memory of a GPU; elsewhere a
    quarter of the machine's memory."""
    if device.type == "cuda":
        return int(free_cuda_memory(device) * SHARE_FOR_ADAPTERS)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4


def out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, on a GPU or on the CPU (where torch raises a plain RuntimeError)."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and ("DefaultCPUAllocator" in text or "not enough memory" in text)
