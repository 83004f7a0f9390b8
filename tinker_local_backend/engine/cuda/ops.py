"""The operations of plain.py, registered with torch: on CUDA a Triton kernel, on a CPU plain torch, which is the reference in
tests and runs captured steps without a GPU.

Each has a fake implementation, so that shapes and devices can be checked without running either.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from tinker_local_backend.engine.cuda import plain

NAMESPACE = "tinker_local"


@cache
def _kernel(name: str) -> Callable[..., Any]:
    """The function that launches the Triton kernel of an operation. Triton exists only beside a GPU."""
    from tinker_local_backend.engine.cuda import elementwise_kernels, lora_kernels, paged_attention_kernels

    modules = (elementwise_kernels, lora_kernels, paged_attention_kernels)
    return next(getattr(module, name) for module in modules if hasattr(module, name))


def _operation(name: str, fake: Callable[..., Any], mutates: Sequence[str] = ()) -> Any:
    """Register the operation of plain.py with this name; `fake` makes its results from the arguments, without values."""
    function: Any = getattr(plain, name)
    operation: Any = torch.library.custom_op(f"{NAMESPACE}::{name}", function, mutates_args=mutates, device_types="cpu")
    operation.register_kernel("cuda")(lambda *arguments: _kernel(name)(*arguments))
    operation.register_fake(fake)
    return operation


paged_attention = _operation("paged_attention", lambda query, *_: query.new_empty(query.shape))
store_keys = _operation("store_keys", lambda *_: None, mutates=("keys", "values"))
lora_add = _operation("lora_add", lambda *_: None, mutates=("y",))
swiglu = _operation("swiglu", lambda gate, up: up.new_empty(up.shape))
swiglu_backward = _operation(
    "swiglu_backward", lambda grad, gate, up: (gate.new_empty(gate.shape), up.new_empty(up.shape))
)
rotate = _operation("rotate", lambda x, cos, sin, backward: x.new_empty(x.shape))

swiglu.register_autograd(
    lambda ctx, grad: swiglu_backward(grad, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


def _keep_positions(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs[1:3])
    ctx.was_backward = inputs[3]


rotate.register_autograd(
    lambda ctx, grad: (rotate(grad, *ctx.saved_tensors, not ctx.was_backward), None, None, None),
    setup_context=_keep_positions,
)
