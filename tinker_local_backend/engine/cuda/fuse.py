"""Modules of transformers computed with fewer kernels: RMSNorm, rotary positions and SwiGLU.

What a module's own code computes is the standard: a fused form is compared with it on random numbers first, module by module,
and one that differs by more than rounding is not used. transformers itself is not changed, only the modules of one model.
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
"""Largest relative difference (of norms) from the module's own result."""

ROTARY = "apply_rotary_pos_emb"
"""The function of transformers' model files that attention modules rotate queries and keys with."""


def fuse_norms(model: nn.Module) -> list[nn.Module]:
    """RMS norms through torch's fused kernel. Returns the modules that compute so now."""
    fused: list[nn.Module] = []
    for module in model.modules():
        weight = getattr(module, "weight", None)
        eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        if not (
            type(module).__name__.endswith("RMSNorm") and isinstance(weight, torch.Tensor) and isinstance(eps, float)
        ):
            continue
        if _replace(module, _norm(module, eps), weight.shape[0]):
            fused.append(module)
    return fused


def _norm(module: Any, eps: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda hidden_states: F.rms_norm(hidden_states, module.weight.shape, module.weight, eps)


def fuse_swiglu(model: nn.Module) -> list[nn.Module]:
    """silu(gate) * up in one kernel. Returns the modules that compute so now."""
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
    """Let the module compute by `forward` if that gives what it gives itself."""
    some = next(module.parameters())
    generator = torch.Generator().manual_seed(width)
    x = torch.randn(1, PROBED_TOKENS, width, generator=generator).to(some.device, some.dtype)
    same = _agree(forward(x), module(x))
    if same:
        module.forward = forward  # pyright: ignore[reportAttributeAccessIssue]
    return same


def _agree(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return False
    error = float((found.double() - wanted.double()).norm() / wanted.double().norm().clamp(min=1e-12))
    return error <= BOUNDS.get(found.dtype, 0.0)


def fuse_rotary(model: nn.Module) -> list[nn.Module]:
    """Rotation of queries and keys in a kernel each. Returns the attention modules that do so now."""
    fused: list[nn.Module] = []
    for module in model.modules():
        forward = getattr(type(module), "forward", None)
        if not isinstance(forward, FunctionType) or ROTARY not in forward.__code__.co_names:
            continue
        original, dim = forward.__globals__.get(ROTARY), getattr(module, "head_dim", None)
        if callable(original) and isinstance(dim, int) and dim % 2 == 0 and _rotates_so(original, module, dim):
            # The module's own code with another function under that name; nobody else sees it.
            own = FunctionType(
                forward.__code__,
                {**forward.__globals__, ROTARY: rotate_both},
                forward.__name__,
                forward.__defaults__,
                forward.__closure__,
            )
            own.__kwdefaults__ = forward.__kwdefaults__
            module.forward = MethodType(own, module)  # pyright: ignore[reportAttributeAccessIssue]
            fused.append(module)
    return fused


def restore(modules: Sequence[nn.Module]) -> None:
    """Let these modules compute by their own code again."""
    for module in modules:
        del module.forward


def rotate_both(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """q (1, H, T, D), k (1, KV, T, D), cos and sin (1, T, D): both rotated, of the same shapes."""
    cos, sin = cos.squeeze(0), sin.squeeze(0)

    def rotated(x: torch.Tensor) -> torch.Tensor:
        return ops.rotate(x.squeeze(0).transpose(0, 1), cos, sin, False).transpose(0, 1).unsqueeze(0)

    return rotated(q), rotated(k)


@torch.no_grad()
def _rotates_so(original: Callable[..., Any], module: nn.Module, dim: int) -> bool:
    """Whether the model file's own function does what `rotate_both` does; others turn a part of each head, or neighbours."""
    some = next(module.parameters())
    generator = torch.Generator().manual_seed(dim)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(some.device, some.dtype)

    q, k = random(1, 4, PROBED_TOKENS, dim), random(1, 2, PROBED_TOKENS, dim)
    cos, sin = (half.repeat(1, 1, 2) for half in random(2, 1, PROBED_TOKENS, dim // 2))
    try:
        wanted = original(q, k, cos, sin)
    except (RuntimeError, TypeError, ValueError):
        return False
    return all(_agree(found, want) for found, want in zip(rotate_both(q, k, cos, sin), wanted, strict=True))
