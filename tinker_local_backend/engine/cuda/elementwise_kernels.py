"""Triton kernels for the elementwise operations of a layer: SwiGLU and rotary positions, forward and backward."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit
def _swiglu_kernel(gate, up, out, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    g = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=inside, other=0.0)
    # Round after the activation, as the two separate operations do.
    tl.store(out + at, (g * tl.sigmoid(g)).to(u.dtype) * u, mask=inside)


@triton.jit
def _swiglu_backward_kernel(grad, gate, up, grad_gate, grad_up, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    d = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    s = tl.sigmoid(g)
    tl.store(grad_up + at, (d * g * s).to(grad_up.dtype.element_ty), mask=inside)
    tl.store(grad_gate + at, (d * u * s * (1 + g * (1 - s))).to(grad_gate.dtype.element_ty), mask=inside)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """See plain.swiglu."""
    gate, up = gate.contiguous(), up.contiguous()
    out = torch.empty_like(up)
    _swiglu_kernel[(triton.cdiv(up.numel(), BLOCK),)](gate, up, out, up.numel(), BLOCK=BLOCK)
    return out


def swiglu_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """See plain.swiglu_backward."""
    grad, gate, up = grad.contiguous(), gate.contiguous(), up.contiguous()
    grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
    _swiglu_backward_kernel[(triton.cdiv(up.numel(), BLOCK),)](
        grad, gate, up, grad_gate, grad_up, up.numel(), BLOCK=BLOCK
    )
    return grad_gate, grad_up


@triton.jit
def _rotate_kernel(
    x,
    cos,
    sin,
    out,
    x_token,
    x_head,
    out_token,
    out_head,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BACKWARD: tl.constexpr,
):
    """Rotate one head of one token: (a, b) -> (a cos - b sin, b cos + a sin) for its two halves."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = tl.arange(0, BLOCK_HALF)
    inside = i < HALF
    row = token * 2 * HALF
    c1 = tl.load(cos + row + i, mask=inside, other=0.0).to(tl.float32)
    c2 = tl.load(cos + row + HALF + i, mask=inside, other=0.0).to(tl.float32)
    s1 = tl.load(sin + row + i, mask=inside, other=0.0).to(tl.float32)
    s2 = tl.load(sin + row + HALF + i, mask=inside, other=0.0).to(tl.float32)
    of_x = x + token * x_token + head * x_head
    a = tl.load(of_x + i, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(of_x + HALF + i, mask=inside, other=0.0).to(tl.float32)
    if BACKWARD:  # the transposed map
        first, second = a * c1 + b * s2, b * c2 - a * s1
    else:
        first, second = a * c1 - b * s1, b * c2 + a * s2
    of_out = out + token * out_token + head * out_head
    tl.store(of_out + i, first.to(out.dtype.element_ty), mask=inside)
    tl.store(of_out + HALF + i, second.to(out.dtype.element_ty), mask=inside)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, backward: bool) -> Tensor:
    """See plain.rotate."""
    tokens, heads, dim = x.shape
    x = x if x.stride(-1) == 1 else x.contiguous()
    cos, sin = cos.contiguous(), sin.contiguous()
    out = torch.empty(tokens, heads, dim, dtype=x.dtype, device=x.device)
    _rotate_kernel[(tokens, heads)](
        x,
        cos,
        sin,
        out,
        *x.stride()[:2],
        *out.stride()[:2],
        HALF=dim // 2,
        BLOCK_HALF=triton.next_power_of_2(dim // 2),
        BACKWARD=backward,
    )
    return out
