"""RMS norms of the joined training pass, and their gradients from what they gave and the scale of each row alone.

The weight of a norm is left to the linear behind it (trained_linears.py).
"""

from __future__ import annotations

from functools import lru_cache

import torch


def reciprocal_rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    """1 / the root of the mean square of the last dimension, which stays with size 1."""
    return x.square().mean(dim=-1, keepdim=True).add_(eps).rsqrt_()


def gradient(
    by_normed: torch.Tensor, normed: torch.Tensor, scale: torch.Tensor, beside: torch.Tensor | None = None
) -> torch.Tensor:
    """dL/dx of normed = x * reciprocal_rms(x), plus `beside`, what came to x on another way. Overwrites `by_normed`."""
    along = (by_normed * normed).mean(dim=-1, keepdim=True)
    by_x = by_normed.addcmul_(normed, along, value=-1)
    return by_x.mul_(scale) if beside is None else torch.addcmul(beside, by_x, scale)


class HeadNorm:
    """The norm of each of several heads, with its weight.

    Sums over a head, and a number of each head for all of its dimensions, are products with matrices that are zero but for
    one block per head. Operations on the last of three dimensions have a loop for each head of each token, and on heads of
    32 they take several times as long.

    Args:
        weight: (heads, D).
    """

    def __init__(self, weight: torch.Tensor, eps: float):
        heads, size = weight.shape
        self._weight, self._eps = weight.flatten(), eps
        self._mean, self._spread = _blocks(heads, size, weight.dtype)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x (T, heads * D) -> the same normalised, and the scale of each head (T, heads)."""
        scale = (x.square() @ self._mean).add_(self._eps).rsqrt_()
        return (scale @ (self._spread * self._weight)).mul_(x), scale

    def gradient(
        self, by_y: torch.Tensor, dot: torch.Tensor, x: torch.Tensor, scale: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Puts dL/dx into `out`. dot (T, heads * D): what sums over a head to that of by_y * y."""
        torch.mul(by_y, scale @ (self._spread * self._weight), out=out)
        along = (dot @ self._mean).mul_(scale.square())
        out.addcmul_(x, along @ self._spread, value=-1)


@lru_cache(maxsize=4)
def _blocks(heads: int, size: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """What takes the mean of each head, (heads * D, heads), and what repeats a number of each, (heads, heads * D)."""
    spread = torch.eye(heads, dtype=dtype).repeat_interleave(size, dim=1)
    return spread.t() / size, spread
