"""RMS norms of the joined training pass, and their gradients from what they gave and the scale of each row alone.

The weight of a norm is left to the linear behind it (trained_linears.py).
"""

from __future__ import annotations

import torch


def reciprocal_rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    """1 / the root of the mean square of the last dimension, which stays with size 1."""
    return x.square().mean(dim=-1, keepdim=True).add_(eps).rsqrt_()


def gradient(
    by_normed: torch.Tensor, normed: torch.Tensor, scale: torch.Tensor, beside: torch.Tensor | None = None
) -> torch.Tensor:
    """dL/dx of normed = x * reciprocal_rms(x), plus `beside`, what came to x on another way. Overwrites `by_normed`."""
    along = (by_normed * normed).sum(dim=-1, keepdim=True)
    by_x = by_normed.addcmul_(normed, along, value=-1 / normed.shape[-1])
    return by_x.mul_(scale) if beside is None else torch.addcmul(beside, by_x, scale)


class HeadNorm:
    """The norm of each of several heads, with its weight (heads, D)."""

    def __init__(self, weight: torch.Tensor, eps: float):
        self._weight, self._eps = weight, eps

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x (T, heads, D) -> the same normalised, and the scale of each head (T, heads, 1)."""
        scale = reciprocal_rms(x, self._eps)
        return (x * scale).mul_(self._weight), scale

    def gradient(
        self, by_y: torch.Tensor, dot: torch.Tensor, x: torch.Tensor, scale: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Puts dL/dx into `out`. dot (T, heads, D): what sums over a head to that of by_y * y. Overwrites `by_y`."""
        along = dot.sum(dim=-1, keepdim=True).mul_(scale.square())
        torch.mul(by_y.mul_(self._weight), scale, out=out)
        out.addcmul_(x, along, value=-1 / x.shape[-1])
