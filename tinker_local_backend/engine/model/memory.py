"""How much memory there is, and how running out of it is recognised."""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress

import torch

SHARE_OF_FREE_CUDA_MEMORY = 0.5
MAX_TOKENS_CPU, MAX_TOKENS_CUDA = 2048, 16384
"""Beyond this a larger pass is no faster; on a CPU it is slower, because what one operation writes has left the caches before
the next one reads it."""

KEPT_BYTES = 256 << 20
"""Freed memory that the process keeps on a CPU: a pass makes and frees the same tensors again and again, and by default each
of them comes from the kernel anew, page by page (a sixth of the time of a small pass, six percent of that of a large one)."""

LARGEST_KEPT = 32 << 20
"""Bytes of the largest block that is kept, glibc's own limit."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""of malloc.h"""


def keep_freed_memory() -> None:
    """Let this process keep some of the memory that it frees.

    That holds for all of its code, so whoever set malloc up himself keeps his settings: with a variable MALLOC_* or
    GLIBC_TUNABLES in the environment nothing changes, nor with a C library other than glibc.
    """
    if any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return
    with suppress(OSError, AttributeError, TypeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)
        mallopt(_M_MMAP_THRESHOLD, LARGEST_KEPT)


def most_tokens(device: torch.device) -> int:
    """Tokens of one pass beyond which it is no faster."""
    return MAX_TOKENS_CUDA if device.type == "cuda" else MAX_TOKENS_CPU


def free_cuda_memory(device: torch.device) -> int:
    """Bytes that can still be allocated: those that the driver has, and those that torch keeps from earlier use."""
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + kept


def room_for_adapters(device: torch.device) -> int:
    """Bytes that adapters, their moments and gradients may take beside a base model: half of what is free on a GPU; elsewhere a
    quarter of the machine's memory."""
    if device.type == "cuda":
        return int(free_cuda_memory(device) * SHARE_OF_FREE_CUDA_MEMORY)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4


def out_of_memory(error: BaseException) -> bool:
    """Whether this is the allocator's refusal, on a GPU or on the CPU (where torch raises a plain RuntimeError)."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and ("DefaultCPUAllocator" in text or "not enough memory" in text)
