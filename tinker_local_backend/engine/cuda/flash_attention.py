"""Attention of large passes with the package flash-attn-4, if it is installed.

Its kernels take the arguments of torch's `varlen_attn` and are faster on an H100: 1.8 times for one sequence of 16,384 tokens of
Qwen3-4B, forward and backward, 1.5 times for sixteen of 1,024 (docs/gpu.md). A call costs the host 0.12 to 0.18 ms, torch's
0.08, so small passes, which are bound by the host, use torch's kernel.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import torch

PACKAGE = "flash_attn.cute"
CAPABILITIES = (9, 10)
"""Major compute capabilities for which the package has forward and backward varlen kernels."""
MIN_SCORES = 1 << 24
"""Minimum query-key pairs of a pass, per head, for which the kernel is used: as in 16 sequences of 1,024 tokens."""


def missing(device: torch.device) -> str | None:
    """Why the package cannot be used on this device; None if it can."""
    if not _is_installed():
        return "flash-attn-4 is not installed"
    if device.type != "cuda":
        return "it needs a GPU"
    major = torch.cuda.get_device_capability(device)[0]
    return None if major in CAPABILITIES else f"it has no kernels for compute capability {major}"


def _is_installed() -> bool:
    """Whether flash-attn-4 is installed. Older flash-attn packages have no module `cute`."""
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
        raise ValueError(f"window_size={window_size}: attention is causal, so the second number must be 0")
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
