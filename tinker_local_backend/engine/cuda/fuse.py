"""Run modules of transformers with fewer kernels: RMSNorm, rotary positions and SwiGLU.

Each fused form is compared with the module's original code on random numbers, and used only if they agree up to rounding. Only
the modules of one model are changed, not transformers itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tinker_local_backend.engine.cuda import ops

PROBED_TOKENS = 5

BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
"""Largest relative difference (of norms) to the module's original result."""

ROTARY = "apply_rotary_pos_emb"
"""The function in transformers' model files that rotates queries and keys."""


def fuse_norms(model: nn.Module) -> list[nn.Module]:
    """Make RMS norms use torch's fused kernel. Returns the changed modules."""
    fused: list[nn.Module] = []
    for module in model.modules():
        weight = getattr(module, "weight", None)
        eps: Any = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        is_norm = type(module).__name__.endswith("RMSNorm") and isinstance(eps, float)
        if is_norm and isinstance(weight, torch.Tensor) and _replace(module, _norm(module, eps), weight.shape[0]):
            fused.append(module)
    return fused


def _norm(module: Any, eps: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda hidden_states: F.rms_norm(hidden_states, module.weight.shape, module.weight, eps)


def fuse_swiglu(model: nn.Module) -> list[nn.Module]:
    """Make MLPs compute silu(gate) * up in one kernel. Returns the changed modules."""
    fused: list[nn.Module] = []
    for module in model.modules():
        gate, up, down = (getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj"))
        if isinstance(gate, nn.Module) and isinstance(up, nn.Module) and isinstance(down, nn.Module):
            width = getattr(gate, "in_features", None)
            if isinstance(width, int) and _replace(module, _mlp(gate, up, down), width):
                fused.append(module)
    return fused


def _mlp(gate: nn.Module, up: nn.Module, down: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: down(ops.swiglu(gate(x), up(x)))


@torch.no_grad()
def _replace(module: nn.Module, forward: Callable[[torch.Tensor], torch.Tensor], width: int) -> bool:
    """Replace the module's forward if the results agree. Returns whether they do."""
    x = _random(module, 1, PROBED_TOKENS, width)
    same = _agree(forward(x), module(x))
    if same:
        module.forward = forward  # pyright: ignore[reportAttributeAccessIssue]
    return same


def _random(module: nn.Module, *shape: int) -> torch.Tensor:
    """Random numbers in the module's dtype on its device, reproducible."""
    like = next(module.parameters())
    return torch.randn(shape, generator=torch.Generator().manual_seed(shape[-1])).to(like.device, like.dtype)


def _agree(fused: torch.Tensor, original: torch.Tensor) -> bool:
    if fused.shape != original.shape or fused.dtype != original.dtype:
        return False
    error = float((fused.double() - original.double()).norm() / original.double().norm().clamp(min=1e-12))
    return error <= BOUNDS.get(fused.dtype, 0.0)


def fuse_rotary(model: nn.Module) -> list[nn.Module]:
    """Make attention modules rotate queries and keys in one kernel each. Returns the changed modules."""
    fused: list[nn.Module] = []
    for module in model.modules():
        forward = getattr(type(module), "forward", None)
        if not isinstance(forward, FunctionType) or ROTARY not in forward.__code__.co_names:
            continue
        original, dim = forward.__globals__.get(ROTARY), getattr(module, "head_dim", None)
        if callable(original) and isinstance(dim, int) and dim % 2 == 0 and _rotates_halves(original, module, dim):
            # The module's code with `rotate_both` as that global name, in this module only.
            patched = FunctionType(
                forward.__code__,
                {**forward.__globals__, ROTARY: rotate_both},
                forward.__name__,
                forward.__defaults__,
                forward.__closure__,
            )
            patched.__kwdefaults__ = forward.__kwdefaults__
            module.forward = MethodType(patched, module)  # pyright: ignore[reportAttributeAccessIssue]
            fused.append(module)
    return fused


def restore(modules: Sequence[nn.Module]) -> None:
    """Restore the original forward of these modules."""
    for module in modules:
        del module.forward


def rotate_both(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate the first R numbers of each head of q (1, H, T, D) and k (1, KV, T, D) by cos and sin (1, T, R)."""
    cos, sin = cos.squeeze(0), sin.squeeze(0)
    width = cos.shape[-1]

    def rotated(x: torch.Tensor) -> torch.Tensor:
        turned = ops.rotate(x[..., :width].squeeze(0).transpose(0, 1), cos, sin, False).transpose(0, 1).unsqueeze(0)
        return turned if width == x.shape[-1] else torch.cat((turned, x[..., width:]), dim=-1)

    return rotated(q), rotated(k)


@torch.no_grad()
def _rotates_halves(original: Callable[..., Any], module: nn.Module, dim: int) -> bool:
    """Whether the model file's function equals `rotate_both`, also if it rotates only part of each head.

    Others rotate interleaved pairs, or the last part.
    """
    q, k = _random(module, 1, 6, PROBED_TOKENS, dim).split([4, 2], dim=1)
    angles = _random(module, 2, 1, PROBED_TOKENS, dim // 2)
    for half in {dim // 2, max(1, dim // 4)}:
        cos, sin = (part[..., :half].repeat(1, 1, 2) for part in angles)
        try:
            originals = original(q, k, cos, sin)
        except (RuntimeError, TypeError, ValueError):
            if half == dim // 2:
                return False
            continue  # it supports only whole heads
        if not all(_agree(x, y) for x, y in zip(rotate_both(q, k, cos, sin), originals, strict=True)):
            return False
    return True
