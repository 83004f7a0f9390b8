"""The operations of plain.py as torch custom ops: a Triton kernel on CUDA, plain torch on a CPU, which is the reference in tests
and runs decode steps without a GPU.

Each has a fake implementation, for shapes and devices without computation.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from tinker_local_backend.engine.cuda import plain

NAMESPACE = "tinker_local"


@cache
def _kernel(name: str) -> Callable[..., Any]:
    """The function that launches the Triton kernel of an operation. Imported lazily, because Triton needs a GPU."""
    from tinker_local_backend.engine.cuda import (
        choice_kernels,
        elementwise_kernels,
        layer_kernels,
        lora_kernels,
        paged_attention_kernels,
    )

    modules = (choice_kernels, elementwise_kernels, layer_kernels, lora_kernels, paged_attention_kernels)
    return next(getattr(module, name) for module in modules if hasattr(module, name))


def _operation(name: str, fake: Callable[..., Any], mutates: Sequence[str] = ()) -> Any:
    """Register the operation of plain.py with this name; `fake` returns results of the right shapes, without values."""
    function: Any = getattr(plain, name)
    operation: Any = torch.library.custom_op(f"{NAMESPACE}::{name}", function, mutates_args=mutates, device_types="cpu")
    operation.register_kernel("cuda")(lambda *arguments: _kernel(name)(*arguments))
    operation.register_fake(fake)
    return operation


def _split_heads_fake(
    qkv: torch.Tensor, norm: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor, kv_heads: int, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    tokens, dim = cos.shape
    of_keys = (tokens, kv_heads, dim)
    return (
        qkv.new_empty(tokens, qkv.shape[1] // dim - 2 * kv_heads, dim),
        qkv.new_empty(of_keys),
        qkv.new_empty(of_keys),
    )


paged_attention = _operation("paged_attention", lambda query, *_: query.new_empty(query.shape))
store_keys = _operation("store_keys", lambda *_: None, mutates=("keys", "values"))
lora_add = _operation("lora_add", lambda *_: None, mutates=("y",))
swiglu = _operation("swiglu", lambda gate, up: up.new_empty(up.shape))
swiglu_backward = _operation(
    "swiglu_backward", lambda grad, gate, up: (gate.new_empty(gate.shape), up.new_empty(up.shape))
)
joined_swiglu = _operation("joined_swiglu", lambda gate_up: gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2))
joined_swiglu_backward = _operation("joined_swiglu_backward", lambda grad, gate_up: gate_up.new_empty(gate_up.shape))
add_norm = _operation("add_norm", lambda x, delta, *_: (x.new_empty(x.shape), delta.new_empty(x.shape)))
norm = _operation("norm", lambda x, weight, eps: weight.new_empty(x.shape))
add_norm_backward = _operation(
    "add_norm_backward",
    lambda grad_total, grad_normed, *_: (torch.empty_like(grad_total), torch.empty_like(grad_normed)),
)
split_heads = _operation("split_heads", _split_heads_fake)
store_heads = _operation(
    "store_heads", lambda *arguments: _split_heads_fake(*arguments[:6])[0], mutates=("keys", "values")
)
split_heads_backward = _operation(
    "split_heads_backward", lambda grad_query, grad_key, grad_value, qkv, *_: qkv.new_empty(qkv.shape)
)
rotate = _operation("rotate", lambda x, cos, sin, backward: x.new_empty(x.shape))
truncate = _operation("truncate", lambda probs, *_: probs.new_empty(probs.shape))

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


joined_swiglu.register_autograd(
    lambda ctx, grad: joined_swiglu_backward(grad.contiguous(), *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


def _keep_sum(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(output[0], inputs[2])
    ctx.eps = inputs[3]


def _add_norm_gradients(ctx: Any, grad_total: torch.Tensor, grad_normed: torch.Tensor) -> Any:
    given = grad_total.contiguous(), grad_normed.contiguous()
    return *add_norm_backward(*given, *ctx.saved_tensors, ctx.eps), None, None


def _keep_input(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs[:2])
    ctx.eps = inputs[2]


def _norm_gradients(ctx: Any, grad: torch.Tensor) -> Any:
    x, weight = ctx.saved_tensors
    return add_norm_backward(torch.zeros_like(x), grad.contiguous(), x, weight, ctx.eps)[0], None, None


norm.register_autograd(_norm_gradients, setup_context=_keep_input)
add_norm.register_autograd(_add_norm_gradients, setup_context=_keep_sum)


def _keep_heads(ctx: Any, inputs: Any, output: Any) -> None:
    qkv, norm, cos, sin, ctx.kv_heads, ctx.eps = inputs
    ctx.save_for_backward(qkv, norm, cos, sin)


def _split_heads_gradients(ctx: Any, *grads: torch.Tensor) -> Any:
    given = (grad.contiguous() for grad in grads)
    return split_heads_backward(*given, *ctx.saved_tensors, ctx.kv_heads, ctx.eps), None, None, None, None, None


split_heads.register_autograd(_split_heads_gradients, setup_context=_keep_heads)
