"""The operations of the CUDA path, registered with torch: on CUDA a Triton kernel, on a CPU plain torch (plain.py), which is the
reference in tests and runs captured steps without a GPU.

Each has a fake implementation, so that shapes and devices can be checked without running either.
"""

# Not `from __future__ import annotations`: torch reads the annotations.

import torch
from torch import Tensor

from tinker_local_backend.engine.cuda import plain

NAMESPACE = "tinker_local"


@torch.library.custom_op(f"{NAMESPACE}::paged_attention", mutates_args=(), device_types="cuda")
def paged_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    lengths: Tensor,
    scale: float,
    window: int,
    softcap: float,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of one token per row to the pages of its table.

    Args:
        query: (R, H, D), the last dimension contiguous.
        keys, values: (pages, KV, PAGE, D) with H a multiple of KV, the last dimension contiguous.
        tables: (R, P) int32; token t of a row is in page `tables[row, t // PAGE]`.
        lengths: (R,) int32, tokens that the row sees, the new one included; 0: an idle row, whose result is 0.
        window: tokens that a row sees at most, counted from its last; 0: all.
        softcap: scores become softcap * tanh(scores / softcap); 0: no cap.
        sinks: (H,), a score per query head that joins the softmax but has no value; None: no sinks.

    Returns:
        (R, H, D) contiguous, in the dtype of `query`; sums are float32.
    """
    from tinker_local_backend.engine.cuda import paged_attention_kernels as kernels

    return kernels.paged_attention(query, keys, values, tables, lengths, scale, window, softcap, sinks)


@torch.library.custom_op(f"{NAMESPACE}::store_keys", mutates_args=("keys", "values"), device_types="cuda")
def store_keys(key: Tensor, value: Tensor, keys: Tensor, values: Tensor, tables: Tensor, positions: Tensor) -> None:
    """Store the key and value (R, KV, D) of each row at its position (R,) int32; a negative position marks an idle row.

    keys, values, tables: as in `paged_attention`.
    """
    from tinker_local_backend.engine.cuda import paged_attention_kernels as kernels

    kernels.store_keys(key, value, keys, values, tables, positions)


@torch.library.custom_op(f"{NAMESPACE}::lora_add", mutates_args=("y",), device_types="cuda")
def lora_add(y: Tensor, x: Tensor, a: Tensor, b: Tensor, order: Tensor, blocks: Tensor, scales: Tensor) -> None:
    """y[r] += scales[slot] * b[slot] @ (a[slot] @ x[r]) for the rows of each block.

    Args:
        y: (R, out), x: (R, in), rows contiguous.
        a: (slots, rank, in), b: (slots, out, rank), contiguous; rank a power of two, at least 16.
        order: (R,) int32, rows by block.
        blocks: (blocks, 3) int32: slot, first index into `order`, count (at most 16; 0: the block is idle). A row is in at most
            one block; a row in none is unchanged.
        scales: (slots,) float32.
    """
    from tinker_local_backend.engine.cuda import lora_kernels

    lora_kernels.lora_add(y, x, a, b, order, blocks, scales)


@torch.library.custom_op(f"{NAMESPACE}::swiglu", mutates_args=(), device_types="cuda")
def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, elementwise, of one shape and dtype; rounded after the activation, as in transformers."""
    from tinker_local_backend.engine.cuda import elementwise_kernels

    return elementwise_kernels.swiglu(gate, up)


@torch.library.custom_op(f"{NAMESPACE}::swiglu_backward", mutates_args=(), device_types="cuda")
def swiglu_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients with respect to `gate` and `up`, contiguous."""
    from tinker_local_backend.engine.cuda import elementwise_kernels

    return elementwise_kernels.swiglu_backward(grad, gate, up)


@torch.library.custom_op(f"{NAMESPACE}::rotate", mutates_args=(), device_types="cuda")
def rotate(x: Tensor, cos: Tensor, sin: Tensor, backward: bool) -> Tensor:
    """Rotary positions: x * cos + rotate_half(x) * sin; with `backward` the transposed map.

    x (T, H, D) with any strides, cos and sin (T, D), D even -> (T, H, D) contiguous.
    """
    from tinker_local_backend.engine.cuda import elementwise_kernels

    return elementwise_kernels.rotate(x, cos, sin, backward)


for _operation in (paged_attention, store_keys, lora_add, swiglu, swiglu_backward, rotate):
    _operation.register_kernel("cpu")(getattr(plain, _operation._name.rpartition("::")[2]))


@paged_attention.register_fake
def _(query, keys, values, tables, lengths, scale, window, softcap, sinks=None):  # pyright: ignore
    return query.new_empty(query.shape)


@store_keys.register_fake
@lora_add.register_fake
def _(*args):  # pyright: ignore
    return None


@swiglu.register_fake
def _(gate, up):  # pyright: ignore
    return up.new_empty(up.shape)


@swiglu_backward.register_fake
def _(grad, gate, up):  # pyright: ignore
    return gate.new_empty(gate.shape), up.new_empty(up.shape)


@rotate.register_fake
def _(x, cos, sin, backward):  # pyright: ignore
    return x.new_empty(x.shape)


swiglu.register_autograd(
    lambda ctx, grad: swiglu_backward(grad, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


def _keep_positions(ctx, inputs, output) -> None:  # pyright: ignore
    ctx.save_for_backward(*inputs[1:3])
    ctx.was_backward = inputs[3]


rotate.register_autograd(
    lambda ctx, grad: (rotate(grad, *ctx.saved_tensors, not ctx.was_backward), None, None, None),
    setup_context=_keep_positions,
)
