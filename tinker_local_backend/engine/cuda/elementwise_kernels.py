"""Triton kernels for the elementwise operations of a layer: SwiGLU and rotary positions, forward and backward."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit
def _swiglu_kernel(gate, up, out, width, in_row, out_row, BLOCK: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    g = tl.load(gate + row * in_row + at, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + row * in_row + at, mask=inside, other=0.0)
    # Round after the activation, as the two separate operations do.
    tl.store(out + row * out_row + at, (g * tl.sigmoid(g)).to(u.dtype) * u, mask=inside)


@triton.jit
def _swiglu_backward_kernel(grad, gate, up, grad_gate, grad_up, width, grad_row, in_row, BLOCK: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    d = tl.load(grad + row * grad_row + at, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gate + row * in_row + at, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + row * in_row + at, mask=inside, other=0.0).to(tl.float32)
    s = tl.sigmoid(g)
    tl.store(grad_up + row * in_row + at, (d * g * s).to(grad_up.dtype.element_ty), mask=inside)
    of_gate = d * u * s * (1 + g * (1 - s))
    tl.store(grad_gate + row * in_row + at, of_gate.to(grad_gate.dtype.element_ty), mask=inside)


def _rows(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1, tensor.shape[-1])


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """See plain.swiglu."""
    gates, ups = _rows(gate), _rows(up)
    rows, width = gates.shape
    out = torch.empty(up.shape, dtype=up.dtype, device=up.device)
    _swiglu_kernel[(rows, triton.cdiv(width, BLOCK))](gates, ups, out, width, width, width, BLOCK=BLOCK)
    return out


def swiglu_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """See plain.swiglu_backward."""
    grads, gates, ups = _rows(grad), _rows(gate), _rows(up)
    rows, width = gates.shape
    grad_gate, grad_up = (torch.empty(gate.shape, dtype=gate.dtype, device=gate.device) for _ in range(2))
    _swiglu_backward_kernel[(rows, triton.cdiv(width, BLOCK))](
        grads, gates, ups, grad_gate, grad_up, width, width, width, BLOCK=BLOCK
    )
    return grad_gate, grad_up


def joined_swiglu(gate_up: Tensor) -> Tensor:
    """See plain.joined_swiglu."""
    gate_up = gate_up.contiguous()
    rows, width = len(gate_up), gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, width)
    _swiglu_kernel[(rows, triton.cdiv(width, BLOCK))](
        gate_up, gate_up[:, width:], out, width, 2 * width, width, BLOCK=BLOCK
    )
    return out


def joined_swiglu_backward(grad: Tensor, gate_up: Tensor) -> Tensor:
    """See plain.joined_swiglu_backward."""
    gate_up = gate_up.contiguous()
    rows, width = len(gate_up), gate_up.shape[1] // 2
    out = torch.empty_like(gate_up)
    _swiglu_backward_kernel[(rows, triton.cdiv(width, BLOCK))](
        grad, gate_up, gate_up[:, width:], out, out[:, width:], width, width, 2 * width, BLOCK=BLOCK
    )
    return out


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
    if BACKWARD:  # the transposed rotation
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
