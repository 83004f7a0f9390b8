"""Products with the frozen weights of the base model, by the faster of the libraries that torch has for them on a CPU.

In float32 torch multiplies with MKL, which on processors that Intel did not make reaches less than half of what oneDNN does
(measured on an AMD EPYC with AVX-512: 110 against 270 GFLOP/s on one core, forward and backward alike). Which of the two it
is depends on the processor and on the sizes of a product alone, never on a time taken, so that a run can be repeated.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

logger = logging.getLogger(__name__)

LEAST_PRODUCT = 3 << 19
"""Multiplications of a product from which on oneDNN is faster; it takes some 12 us to begin with."""

LEAST_ROWS = 3
"""With fewer rows both wait for the weights to arrive from memory."""

LEAST_PACKED = 1 << 17
"""Numbers of a weight from which on a packed one is faster for any number of rows: by 2.0 for 4, 1.5 for 16, 1.2 for 64, 1.05
for 512 (measured on an AMD EPYC with AVX-512, in float32; a little less in bfloat16)."""

PACKED_ROWS = 64
"""The order of packed weights is chosen for so many, and does for any."""

_NO_PRIMITIVE = "could not create a primitive"
"""says oneDNN when it finds no memory for the code that it makes for each shape, or has none for a dtype on this processor"""

LARGEST_ERROR = 1e-5
"""Relative difference from torch's own product, beyond which oneDNN is not used."""


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`F.linear` with a weight that is not trained: x (..., in), weight (out, in), bias (out,) -> (..., out).

    Differentiable by x alone.
    """
    if not for_onednn(x, weight):
        return F.linear(x, weight, bias)
    if torch.is_grad_enabled() and x.requires_grad:
        result: Any = _Linear.apply(x, weight, bias)
        return result
    return _by_either(x, weight, bias)


def for_onednn(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether `linear` leaves this product to oneDNN."""
    rows = math.prod(x.shape[:-1])
    large = x.dtype == torch.float32 and rows >= LEAST_ROWS and rows * weight.numel() >= LEAST_PRODUCT
    known = weight.dtype == torch.float32 and weight.device.type == "cpu" and not weight.requires_grad
    return large and known and onednn_is_faster()


def by_onednn(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """The same, by oneDNN, whatever the sizes; not recorded by autograd."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def _by_either(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """By oneDNN; by MKL where oneDNN cannot."""
    try:
        return by_onednn(x, weight, bias)
    except RuntimeError as error:
        if _NO_PRIMITIVE not in str(error):
            raise
        return F.linear(x, weight, bias)


def packed(weight: torch.Tensor) -> torch.Tensor | None:
    """A copy of the weight (out, in) in the order in which oneDNN reads it, for `by_packed`.

    None where it is no faster, or where oneDNN cannot make one.
    """
    if weight.numel() < LEAST_PACKED or weight.device.type != "cpu" or not onednn_is_faster():
        return None
    try:
        return torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_ROWS)
    except RuntimeError as error:
        if _NO_PRIMITIVE not in str(error):
            raise
        return None


def by_packed(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor | None:
    """As `linear`, x (rows, in), with a `packed` weight; not recorded by autograd. None: oneDNN cannot."""
    try:
        return by_onednn(x, weight, bias)
    except RuntimeError as error:
        if _NO_PRIMITIVE not in str(error):
            raise
        return None


def float32_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x (N, in) @ weight (out, in).T in float32; not recorded by autograd.

    On CUDA the sums of a bfloat16 product are not rounded on their way; on a CPU torch has no such product.
    """
    if x.device.type == "cuda" and x.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    return linear(x, weight).float()


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.weight = weight  # frozen: nothing changes it before the backward pass
        return _by_either(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _by_either(gradients[0].contiguous(), ctx.weight.t()), None, None


@cache
def onednn_is_faster() -> bool:
    """On this processor, in float32; and its results are right."""
    if not (torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()) or _vendor() != "AuthenticAMD":
        return False
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(shape, generator=generator) for shape in ((32, 256), (384, 256), (384,)))
    try:
        found = by_onednn(x, weight, bias), by_onednn(x @ weight.t(), weight.t())
    except (AttributeError, RuntimeError, NotImplementedError) as error:
        logger.warning("torch %s has no product by oneDNN (%s): products are those of MKL", torch.__version__, error)
        return False
    wanted = F.linear(x, weight, bias), (x @ weight.t()) @ weight
    error = worst_error(float((a - b).norm() / b.norm()) for a, b in zip(found, wanted, strict=True))
    if error > LARGEST_ERROR:
        logger.warning("products by oneDNN have a relative error of %.1e: products are those of MKL", error)
        return False
    return True


def worst_error(errors: Iterable[float]) -> float:
    """The largest. NaN counts as infinite: `max` would keep whichever comes first."""
    return max(math.inf if math.isnan(error) else error for error in errors)


def _vendor() -> str:
    """Who made the processor, as Linux names them; "" where it does not say."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("vendor_id")), "")
