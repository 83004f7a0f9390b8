"""Calls of every launcher at the shapes of real models, and what the kernels that they launch must be like.

A new kernel needs an entry of KERNELS, and a call that launches it in CASES.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch
from torch.nn import functional as F

from tests.engine.cuda.cases import BOUNDS, Shape, heads_case, lora_case, paged_case, relative_error
from tests.engine.limits import limits_case
from tinker_local_backend.engine.cuda.adapter_slots import padded_rank, row_blocks
from tinker_local_backend.engine.model.products import worst_error

SHARED_BYTES = 99 * 1024
"""Shared memory that a block may have on the smallest of these GPUs (sm_86, 89 and 120)."""


@dataclass(frozen=True)
class Expected:
    """What a kernel must be like."""

    pipelined: bool = False
    """its loop loads what later turns multiply"""
    waits_for_all: str = ""
    """why its loop over products may wait for all copies in each turn"""
    narrow: Mapping[str, str] = field(default_factory=dict)
    """tensors of a launch at a real shape that it reads by fewer than 16 bytes a thread, and why"""
    shared_bytes: int = SHARED_BYTES
    """more than the usual needs a reason beside it"""


MANY_BLOCKS = (
    "on an H100 five stages, which load ahead, took 170 us for 64 rows of 1,024 tokens where two took 136: the other blocks of a "
    "multiprocessor hide the wait, and fewer fit with more memory each"
)
HALVES = "a thread has the numbers of both halves of a head, 8 bytes each; 85 % of the copy's rate on an H100"

KERNELS = {
    "_partial_kernel": Expected(pipelined=True, waits_for_all=MANY_BLOCKS),
    "_combine_kernel": Expected(narrow={"stats": "two numbers of each split, beside its hundred of `partial`"}),
    "_store_kernel": Expected(),
    "_shrink_kernel": Expected(pipelined=True),
    "_expand_kernel": Expected(),
    "_truncate_kernel": Expected(),
    "_swiglu_kernel": Expected(),
    "_swiglu_backward_kernel": Expected(),
    "_rotate_kernel": Expected(narrow=dict.fromkeys(("x", "cos", "sin"), "only of models whose layers are not joined")),
    "_add_norm_kernel": Expected(),
    "_add_norm_backward_kernel": Expected(),
    "_split_heads_kernel": Expected(narrow=dict.fromkeys(("qkv", "norm", "cos", "sin"), HALVES)),
    "_split_heads_backward_kernel": Expected(
        narrow=dict.fromkeys(("grad_query", "grad_key", "grad_value", "qkv", "norm", "cos", "sin"), HALVES)
    ),
}
"""By the names of the functions with @triton.jit."""

Error = Callable[[], float]
"""Of what was computed, relative to float64."""


@dataclass(frozen=True)
class Case:
    """One call of a launcher. `launch` gives the error, to be asked for after the kernels have run."""

    launch: Callable[[SimpleNamespace, torch.dtype], Error]
    dtype: torch.dtype = torch.bfloat16

    def error(self, kernels: SimpleNamespace) -> Error:
        return self.launch(kernels, self.dtype)

    @property
    def bound(self) -> float:
        return BOUNDS[self.dtype]


def _random(*size: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(size[-1]))


def attention(shape: Shape, *lengths: int, dtype: torch.dtype = torch.bfloat16) -> Case:
    def launch(kernels: SimpleNamespace, dtype: torch.dtype) -> Error:
        case = paged_case(shape, lengths, dtype)
        found = kernels.paged_attention(*case.arguments)
        return lambda: relative_error(found, case.expected())

    return Case(launch, dtype)


def stored(shape: Shape, *positions: int) -> Case:
    """Keys and values of one token a row; the error is 0 or 1."""

    def launch(kernels: SimpleNamespace, dtype: torch.dtype) -> Error:
        case = paged_case(shape, [max(0, position) + 1 for position in positions], dtype)
        key, value = _random(2, shape.kv_heads, len(positions), shape.dim).to(dtype).transpose(1, 2)
        pools = [case.keys.clone(), case.values.clone()]
        kernels.store_keys(key, value, *pools, case.tables, torch.tensor(positions, dtype=torch.int32))

        def error() -> float:
            for before, found, new in zip((case.keys, case.values), pools, (key, value), strict=True):
                wanted = before.clone()
                for row, position in enumerate(positions):
                    if position >= 0:
                        wanted[case.tables[row, position // shape.page], :, position % shape.page] = new[row]
                if not torch.equal(wanted.nan_to_num(9.0), found.nan_to_num(9.0)):
                    return 1.0
            return 0.0

        return error

    return Case(launch)


def lora(
    rank: int,
    features: tuple[int, int],
    slots: Sequence[int],
    dtype: torch.dtype = torch.bfloat16,
    ends: Sequence[int] = (),
) -> Case:
    """`ends`: where the parts of a fused linear end, except the last."""

    def launch(kernels: SimpleNamespace, dtype: torch.dtype) -> Error:
        case = lora_case(slots, dtype, features, padded_rank(rank), ends)
        order, blocks = map(torch.from_numpy, row_blocks(case.slots, len(case.slots)))
        found = case.y.clone()
        kernels.lora_add(found, case.x, case.a, case.b, order, blocks, case.scales, case.ends)
        return lambda: relative_error(found, case.expected())

    return Case(launch, dtype)


def swiglu(rows: int, features: int) -> Case:
    def launch(kernels: SimpleNamespace, dtype: torch.dtype) -> Error:
        gate, up, grad = _random(3, rows, features).to(dtype)
        found = [kernels.swiglu(gate, up), *kernels.swiglu_backward(grad, gate, up)]
        inputs = [gate.double().requires_grad_(), up.double().requires_grad_()]
        exact = F.silu(inputs[0]) * inputs[1]

        def error() -> float:
            wanted = [exact.detach(), *torch.autograd.grad(exact, inputs, grad.double())]
            return worst_error(relative_error(one, other) for one, other in zip(found, wanted, strict=True))

        return error

    return Case(launch)


def joined_swiglu(rows: int, features: int) -> Case:
    def launch(kernels: SimpleNamespace, dtype: torch.dtype) -> Error:
        gate_up, grad = _random(rows, 2 * features).to(dtype), _random(rows, features).to(dtype)
        found = [kernels.joined_swiglu(gate_up), kernels.joined_swiglu_backward(grad, gate_up)]
        inputs = gate_up.double().requires_grad_()
        exact = F.silu(inputs[:, :features]) * inputs[:, features:]

        def error() -> float:
            (of_input,) = torch.autograd.grad(exact, inputs, grad.double())
            return worst_error(map(relative_error, found, (exact.detach(), of_input)))

        return error

    return Case(launch)


def residual_sum(rows: int, width: int) -> Case:
    """With its norm; residuals are in float32, as the joined layers keep them."""

    def launch(kernels: SimpleNamespace, dtype: torch.dtype) -> Error:
        x, grad_total = _random(2, rows, width)
        delta, grad_normed, (weight, *_) = _random(3, rows, width).to(dtype)
        total, normed = kernels.add_norm(x, delta, weight, 1e-6)
        gradients = kernels.add_norm_backward(grad_total, grad_normed, total, weight, 1e-6)
        inputs = total.double().requires_grad_()
        exact = inputs / (inputs.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()

        def error() -> float:
            (through,) = torch.autograd.grad(exact, inputs, grad_normed.double())
            wanted = [x.double() + delta.double(), exact.detach(), *2 * [through + grad_total.double()]]
            return worst_error(map(relative_error, (total, normed, *gradients), wanted))

        return error

    return Case(launch)


def heads_split(heads: int, kv_heads: int, dim: int, normed: bool, tokens: int) -> Case:
    def launch(kernels: SimpleNamespace, dtype: torch.dtype) -> Error:
        case = heads_case(heads, kv_heads, dim, normed, dtype, tokens)
        parts = kernels.split_heads(*case.arguments)
        grads = [_random(*part.shape).to(dtype) for part in parts]
        of_product = kernels.split_heads_backward(*grads, *case.arguments)

        def error() -> float:
            exact, inputs = case.expected()
            (wanted,) = torch.autograd.grad(exact, inputs, [grad.double() for grad in grads])
            found = (*parts, of_product)
            return worst_error(map(relative_error, found, [*(part.detach() for part in exact), wanted]))

        return error

    return Case(launch)


def norm(rows: int, width: int) -> Case:
    def launch(kernels: SimpleNamespace, dtype: torch.dtype) -> Error:
        x, weight = _random(rows, width), _random(width).to(dtype)
        found = kernels.norm(x, weight, 1e-6)
        exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
        return lambda: relative_error(found, exact)

    return Case(launch)


def heads_stored(shape: Shape, normed: bool, *positions: int) -> Case:
    """Queries, and the pools whose pages keys and values went into."""

    def launch(kernels: SimpleNamespace, dtype: torch.dtype) -> Error:
        pages = paged_case(shape, [max(0, position) + 1 for position in positions], dtype)
        case = heads_case(shape.heads, shape.kv_heads, shape.dim, normed, dtype, len(positions))
        pools = [pages.keys.clone(), pages.values.clone()]
        at = torch.tensor(positions, dtype=torch.int32)
        query = kernels.store_heads(*case.arguments, *pools, pages.tables, at)

        def error() -> float:
            (exact, *new), _ = case.expected()
            wanted = [pages.keys.double(), pages.values.double()]
            for pool, part in zip(wanted, new, strict=True):
                for row, position in enumerate(positions):
                    if position >= 0:
                        pool[pages.tables[row, position // shape.page], :, position % shape.page] = part[row].detach()
            stored = (relative_error(*(t.nan_to_num(9.0) for t in pair)) for pair in zip(pools, wanted, strict=True))
            return worst_error([relative_error(query, exact.detach()), *stored])

        return error

    return Case(launch)


def rotated(tokens: int, heads: int, dim: int, backward: bool) -> Case:
    def launch(kernels: SimpleNamespace, dtype: torch.dtype) -> Error:
        x = _random(heads, tokens, dim).to(dtype).transpose(0, 1)  # heads before tokens, as a layer has them
        cos, sin = _random(2, tokens, dim).to(dtype)
        found = kernels.rotate(x, cos, sin, backward)

        def error() -> float:
            (a, b), (c1, c2), (s1, s2) = (
                part.double().reshape(tokens, -1, dim).chunk(2, dim=-1) for part in (x, cos, sin)
            )
            turned = [a * c1 + b * s2, b * c2 - a * s1] if backward else [a * c1 - b * s1, b * c2 + a * s2]
            return relative_error(found, torch.cat(turned, dim=-1))

        return error

    return Case(launch)


def limited(vocabulary: int, *limits: tuple[int, float, float]) -> Case:
    """What top-k, top-p and min-p leave of a row each; the error is 0 or 1."""

    def launch(kernels: SimpleNamespace, dtype: torch.dtype) -> Error:
        case = limits_case(vocabulary, 2.0, 0.25, limits)
        found = kernels.truncate(*case.arguments)
        return lambda: float(not torch.equal(found, case.expected()))

    return Case(launch, torch.float32)


MANY = [0, 1, -1, *[2] * 18, 0, 0]
"""Rows of three adapters and of the base model, one of them more than a block holds."""

CASES = {
    "Qwen3-0.6B attends": attention(Shape(16, 8, 128), 2049, 40),
    "Qwen3-4B and 8B attend": attention(Shape(32, 8, 128), 5000, 1, 257, 4097),
    "one row attends": attention(Shape(32, 8, 128), 1000),
    "Qwen2.5-7B attends": attention(Shape(28, 4, 128), 300, 65),
    "Phi-3-mini attends": attention(Shape(32, 32, 96), 130),
    "gpt-oss-20b attends": attention(Shape(64, 8, 64, window=128, sinks=True), 900, 3),
    "gpt-oss-20b attends to all": attention(Shape(64, 8, 64, sinks=True), 1500, 3),
    "Gemma 2 9B attends": attention(Shape(16, 8, 256, softcap=50.0, window=4096), 4500, 30),
    "Gemma 3 4B attends": attention(Shape(8, 4, 256, window=1024), 1500),
    "Qwen3-4B attends in float32": attention(Shape(32, 8, 128), 130, dtype=torch.float32),
    "Gemma 3 4B attends in float32": attention(Shape(8, 4, 256, window=1024), 130, dtype=torch.float32),
    "Qwen3-4B stores": stored(Shape(32, 8, 128), 4999, -1, 0, 31),
    "gpt-oss-20b stores": stored(Shape(64, 8, 64), 70, 5),
    "rank 8, Qwen3-4B's q": lora(8, (2560, 4096), MANY),
    "rank 16, Qwen3-0.6B's down": lora(16, (3072, 1024), MANY),
    "rank 32, Qwen3-4B's down": lora(32, (9728, 2560), MANY),
    "rank 32, one row": lora(32, (2560, 4096), [0]),
    "rank 64, Qwen3-8B's k": lora(64, (4096, 1024), MANY),
    "rank 128, gpt-oss-20b's q": lora(128, (2880, 4096), [0, 1, 1]),
    "rank 256, Qwen3-4B's k": lora(256, (2560, 1024), [0, 1, 1]),
    "rank 512, Qwen3-0.6B's q": lora(512, (1024, 2048), [0, 1, 1]),
    "rank 32, Qwen3-4B's q, k and v": lora(32, (2560, 6144), MANY, ends=(4096, 5120)),
    "rank 128, Qwen3-0.6B's gate and up": lora(128, (1024, 6144), [0, 1, 1], ends=(3072,)),
    "rank 32, a head in float32": lora(32, (1024, 5000), [0, 1, 1], torch.float32),
    "rank 128, a head in float32": lora(128, (1024, 2000), [0, 1, 1], torch.float32),
    "rank 512, a head in float32": lora(512, (1024, 1000), [0, 1, 1], torch.float32),
    "Qwen3-4B's SwiGLU": swiglu(16, 9728),
    "Qwen3-0.6B's SwiGLU": swiglu(1, 3072),
    "Qwen3-4B's joined SwiGLU": joined_swiglu(16, 9728),
    "Qwen3-4B's residual sum": residual_sum(16, 2560),
    "Qwen3-8B's residual sum": residual_sum(16, 4096),
    "Qwen3-4B's norm": norm(16, 2560),
    "Qwen3-4B's heads go into pages": heads_stored(Shape(32, 8, 128), True, 700, -1, 0, 31, 32),
    "gpt-oss-20b's heads go into pages": heads_stored(Shape(64, 8, 64), False, 5),
    "Qwen3-4B's heads": heads_split(32, 8, 128, normed=True, tokens=16),
    "Qwen2.5-7B's heads": heads_split(28, 4, 128, normed=False, tokens=16),
    "Phi-3-mini's heads": heads_split(32, 32, 96, normed=False, tokens=8),
    "Qwen3-4B's queries are rotated": rotated(16, 32, 128, backward=False),
    "Qwen3-4B's gradients are rotated": rotated(16, 32, 128, backward=True),
    "Qwen3's vocabulary with top-p": limited(151_936, (0, 0.95, 0.0)),
    "limits of every kind": limited(4992, (50, 0.9, 0.0), (0, 1.0, 0.1), (0, 1.0, 0.0), (20, 1.0, 0.0), (0, 0.5, 0.05)),
    "Gemma's keys are rotated": rotated(64, 8, 256, backward=False),
}
