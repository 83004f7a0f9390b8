"""Products with the frozen weights of the base model, on a CPU by the faster of torch's libraries.

In float32 torch multiplies with MKL, which on AMD processors with AVX-512 reaches less than half of oneDNN's speed (110 against
270 GFLOP/s on one core, forward and backward alike). Without AVX-512 (measured on a Zen 3) oneDNN takes 0.9 to 1.5 times as
long as MKL, and up to 2.3 times if both operands are transposed; only its packed weights are faster there. The choice depends
on the processor and the sizes of a product, never on a timing, so that runs are reproducible.
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

MIN_PRODUCT = 3 << 19
"""Minimum multiplications of a product for which oneDNN is faster; its overhead is about 12 us."""

MIN_ROWS = 3
"""With fewer rows, memory bandwidth limits both."""

MIN_PACKED = 1 << 17
"""Minimum elements of a weight for which packing is faster, for any number of rows: by 2.0 for 4, 1.5 for 16, 1.2 for 64, 1.05
for 512 (measured on an AMD EPYC with AVX-512, in float32; a little less in bfloat16). Without AVX-512 it is faster by about 1.3
for 2 to 8 rows and 1.1 for 16; there one row of a weight below 2^20 elements, and more than 64 rows, take up to 1.9 and 1.2 times
as long as with MKL."""

PACKED_ROWS = 64
"""Number of rows for which the layout of packed weights is optimised; it works for any number."""

_UNSUPPORTED = "could not create a primitive", "needs the cpu support"
"""Messages of oneDNN and of torch if there is no memory for the code of a shape, or the processor does not support the dtype
(bfloat16 without AVX-512)."""

MAX_ERROR = 1e-5
"""Relative error to torch's product above which oneDNN is not used."""


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`F.linear` with a frozen weight: x (..., in), weight (out, in), bias (out,) -> (..., out).

    Differentiable with respect to x alone.
    """
    if not for_onednn(x, weight):
        return F.linear(x, weight, bias)
    if torch.is_grad_enabled() and x.requires_grad:
        result: Any = _Linear.apply(x, weight, bias)
        return result
    return _by_either(x, weight, bias)


def for_onednn(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether `linear` computes this product with oneDNN, which has no fast code for a weight that is not contiguous (a slice of
    a transposed matrix: 220 ms, 0.4 ms with MKL).
    """
    elements = x.numel()
    if elements * len(weight) < MIN_PRODUCT or elements < MIN_ROWS * weight.shape[1]:  # first, as most are small
        return False
    supported = x.dtype == weight.dtype == torch.float32 and weight.device.type == "cpu" and not weight.requires_grad
    return supported and (weight.is_contiguous() or weight.t().is_contiguous()) and onednn_is_faster()


def by_onednn(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`linear` with oneDNN for any sizes; not recorded by autograd."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def _by_either(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`linear` with oneDNN, or with MKL if oneDNN fails."""
    try:
        return by_onednn(x, weight, bias)
    except RuntimeError as error:
        if not any(text in str(error) for text in _UNSUPPORTED):
            raise
        return F.linear(x, weight, bias)


def packed(weight: torch.Tensor) -> torch.Tensor | None:
    """A copy of the weight (out, in) in oneDNN's layout, for `by_packed`. None if it is no faster or oneDNN fails."""
    if weight.numel() < MIN_PACKED or weight.device.type != "cpu" or not onednn_is_usable():
        return None
    try:
        return torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_ROWS)
    except RuntimeError as error:
        if not any(text in str(error) for text in _UNSUPPORTED):
            raise
        return None


def by_packed(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor | None:
    """`linear` for x (rows, in) and a `packed` weight; not recorded by autograd. None if oneDNN fails."""
    try:
        return by_onednn(x, weight, bias)
    except RuntimeError as error:
        if not any(text in str(error) for text in _UNSUPPORTED):
            raise
        return None


def float32_product(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """x (N, in) @ weight (out, in).T in float32, written to `out` (N, out) if given; not recorded by autograd.

    On CUDA the sums of a bfloat16 product are not rounded to bfloat16; on a CPU torch has no such product.
    """
    if x.device.type == "cuda" and x.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(x, weight.t(), out_dtype=torch.float32, out=out)
    if out is None:
        return linear(x, weight).float()
    return torch.mm(x, weight.t(), out=out) if x.dtype == torch.float32 else out.copy_(x @ weight.t())


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.weight = weight  # frozen: it does not change before the backward pass
        return _by_either(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _by_either(gradients[0].contiguous(), ctx.weight.t()), None, None


def onednn_is_faster() -> bool:
    """Whether oneDNN is faster on this processor in float32, also without packed weights."""
    return onednn_is_usable() and _has_avx512()


@cache
def onednn_is_usable() -> bool:
    """Whether oneDNN is faster on this processor in float32 with packed weights, and its products are correct."""
    if not (torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()) or _vendor() != "AuthenticAMD":
        return False
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(shape, generator=generator) for shape in ((32, 256), (384, 256), (384,)))
    try:
        results = by_onednn(x, weight, bias), by_onednn(x @ weight.t(), weight.t())
    except (AttributeError, RuntimeError, NotImplementedError) as error:
        logger.warning("torch %s has no product by oneDNN (%s): MKL computes the products", torch.__version__, error)
        return False
    expected = F.linear(x, weight, bias), (x @ weight.t()) @ weight
    error = worst_error(float((a - b).norm() / b.norm()) for a, b in zip(results, expected, strict=True))
    if error > MAX_ERROR:
        logger.warning("products by oneDNN have a relative error of %.1e: MKL computes the products", error)
        return False
    return True


def worst_error(errors: Iterable[float]) -> float:
    """The largest error. NaN counts as infinite: `max` would depend on the order."""
    return max(math.inf if math.isnan(error) else error for error in errors)


def _vendor() -> str:
    """The processor's vendor id from Linux; "" if unknown."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("vendor_id")), "")


@cache
def _has_avx512() -> bool:
    """Whether torch's kernels use AVX-512."""
    return torch.backends.cpu.get_cpu_capability() == "AVX512"
