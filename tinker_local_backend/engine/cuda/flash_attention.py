"""Attention of long passes by the package flash-attn-4, where it is installed.

Its kernels take the arguments of torch's `varlen_attn` and are faster on an H100: 1.8 times for one sequence of 16,384 tokens of
Qwen3-4B, forward and backward, 1.6 times for sequences of 2,048 (docs/gpu.md). A call costs the host twice as long as torch's,
so short passes, which wait for the host, keep torch's kernel.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import torch

PACKAGE = "flash_attn.cute"
CAPABILITIES = (9, 10)
"""First numbers of the compute capabilities for which the package has forward and backward kernels of this form."""
MIN_KEYS = 2048
"""Keys of a pass's longest sequence from which the kernel is used: below, training of 4B on an H100 became slower."""


def missing(device: torch.device) -> str | None:
    """Why the package cannot be used on this device; None: it can."""
    if not _found():
        return "flash-attn-4 is not installed"
    if device.type != "cuda":
        return "it needs a GPU"
    major = torch.cuda.get_device_capability(device)[0]
    return None if major in CAPABILITIES else f"it has no kernels for compute capability {major}"


def _found() -> bool:
    """An older flash-attn has no part `cute`, and importing that of another one would fail."""
    try:
        return importlib.util.find_spec(PACKAGE) is not None
    except ModuleNotFoundError:
        return False


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    queries: torch.Tensor,
    keys: torch.Tensor,
    max_queries: int,
    max_keys: int,
    *,
    scale: float,
    window_size: tuple[int, int],
) -> torch.Tensor:
    """As `varlen_attn`: query (T, H, D), key and value (K, KV, D), cumulative lengths (N + 1,) int32 -> (T, H, D).

    `window_size`: earlier tokens that a token sees, -1 for all, and later ones, which must be 0.
    """
    before, after = window_size
    if after != 0:
        raise ValueError(f"window_size={window_size}: a token sees no later ones here")
    kernel: Any = importlib.import_module(f"{PACKAGE}.interface").flash_attn_varlen_func
    out, _ = kernel(
        query,
        key,
        value,
        cu_seqlens_q=queries,
        cu_seqlens_k=keys,
        max_seqlen_q=max_queries,
        max_seqlen_k=max_keys,
        softmax_scale=scale,
        causal=True,
        window_size=(None if before < 0 else before, None),
    )
    return out
