"""Triton kernels against plain float64 computations, in Triton's interpreter or on the GPU that the tests are given."""

import importlib
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch._library.custom_ops import CustomOpDef
from torch.nn import functional as F

from tests.engine.cuda.cases import BOUNDS, Shape, heads_case, lora_case, paged_case, relative_error
from tests.engine.devices import here
from tests.engine.limits import LIMITS, limits_case
from tinker_local_backend.engine.cuda import ops, plain
from tinker_local_backend.engine.cuda.adapter_slots import row_blocks

pytestmark = pytest.mark.kernels

Rows = list[int]
Outputs = list[torch.Tensor]

DTYPES = [torch.float32, torch.float16]
if here().device.type == "cuda":
    DTYPES.append(torch.bfloat16)  # Triton's interpreter computes it wrongly
SHAPES = {
    "grouped": Shape(),
    "one head for each": Shape(heads=4, kv_heads=4, dim=64),
    "one key head": Shape(heads=8, kv_heads=1, dim=64, softcap=30.0),
    "window": Shape(window=20),
    "sinks": Shape(sinks=True),
    "window and sinks": Shape(window=20, sinks=True),
    "long window, other pages": Shape(window=300, page=16),
    "dimension of no power of two": Shape(heads=6, kv_heads=2, dim=80),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_paged_attention(kernels: SimpleNamespace, name: str, dtype: torch.dtype) -> None:
    # Idle, one token, borders of pages and blocks, one split, several splits with a last one that is not full.
    case = paged_case(SHAPES[name], [0, 1, 32, 64, 65, 257, 700], dtype)
    assert relative_error(kernels.paged_attention(*case.arguments), case.expected()) < BOUNDS[dtype]


def test_a_row_alone_gets_the_bits_that_it_gets_in_a_batch(kernels: SimpleNamespace) -> None:
    case = paged_case(Shape(), [600, 40, 0, 600, 513], torch.float16, seed=1)
    together = kernels.paged_attention(*case.arguments)
    for row in range(5):
        alone = case.of_rows([row])
        assert torch.equal(kernels.paged_attention(*alone.arguments)[0], together[row])
        wider = replace(alone, tables=F.pad(alone.tables, (0, 9), value=-1))
        assert torch.equal(kernels.paged_attention(*wider.arguments)[0], together[row])


TOKENS = 18
"""Rows of the next tests: more than a block of LoRA's has."""


def _numbers(dtype: torch.dtype, *size: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(size[-1])).to(here().device, dtype)


def _attended(kernels: SimpleNamespace, dtype: torch.dtype, rows: Rows) -> Outputs:
    lengths = [1 + 71 * i % 560 for i in range(TOKENS)]
    return [kernels.paged_attention(*paged_case(Shape(), lengths, dtype).of_rows(rows).arguments)]


def _adapted(kernels: SimpleNamespace, dtype: torch.dtype, rows: Rows) -> Outputs:
    case = lora_case([i % 3 if i % 5 else 2 for i in range(TOKENS)], dtype, (700, 96), 32, (64,))
    slots = [case.slots[row] for row in rows]
    order, blocks = (torch.from_numpy(array).to(here().device) for array in row_blocks(slots, len(slots)))
    y = case.y[rows].clone()
    kernels.lora_add(y, case.x[rows].clone(), case.a, case.b, order, blocks, case.scales, case.ends)
    return [y]


def _heads(kernels: SimpleNamespace, dtype: torch.dtype, rows: Rows) -> Outputs:
    case = heads_case(6, 2, 32, True, dtype, TOKENS)
    arguments = (case.qkv[rows].clone(), case.norm, case.cos[rows].clone(), case.sin[rows].clone(), 2, case.eps)
    parts = kernels.split_heads(*arguments)
    grads = [_numbers(dtype, TOKENS, *part.shape[1:])[rows] for part in parts]
    return [*parts, kernels.split_heads_backward(*grads, *arguments)]


def _stored(kernels: SimpleNamespace, dtype: torch.dtype, rows: Rows) -> Outputs:
    case, width = heads_case(6, 2, 32, True, dtype, TOKENS), 2
    pools = _numbers(dtype, 2, width * TOKENS, 2, 16, 32)
    tables = torch.arange(width * TOKENS, dtype=torch.int32, device=here().device).view(TOKENS, width)[rows]
    positions = torch.arange(TOKENS, dtype=torch.int32, device=here().device)[rows]
    arguments = (case.qkv[rows].clone(), case.norm, case.cos[rows].clone(), case.sin[rows].clone(), 2, case.eps)
    query = kernels.store_heads(*arguments, *pools, tables, positions)
    again = pools.clone()
    kernels.store_keys(*_numbers(dtype, 2, TOKENS, 2, 32)[:, rows].clone(), *again, tables, positions)
    at = tables[range(len(rows)), positions // 16].long(), slice(None), positions.long() % 16
    return [query, *(pool[at] for pool in (*pools, *again))]


def _summed(kernels: SimpleNamespace, dtype: torch.dtype, rows: Rows) -> Outputs:
    x, delta, of_total, of_normed = (_numbers(dtype, 4, TOKENS, 700)[i][rows].clone() for i in range(4))
    weight = _numbers(dtype, 700)
    total, normed = kernels.add_norm(x.float(), delta, weight, 1e-6)
    gradients = kernels.add_norm_backward(of_total.float(), of_normed, total, weight, 1e-6)
    return [total, normed, kernels.norm(total, weight, 1e-6), *gradients]


def _gated(kernels: SimpleNamespace, dtype: torch.dtype, rows: Rows) -> Outputs:
    gate_up, grad = _numbers(dtype, TOKENS, 1400)[rows].clone(), _numbers(dtype, TOKENS, 700)[rows].clone()
    gate, up = gate_up.chunk(2, dim=1)
    own = [kernels.swiglu(gate, up), *kernels.swiglu_backward(grad, gate, up)]
    return [*own, kernels.joined_swiglu(gate_up), kernels.joined_swiglu_backward(grad, gate_up)]


def _rotated(kernels: SimpleNamespace, dtype: torch.dtype, rows: Rows) -> Outputs:
    x, (cos, sin) = _numbers(dtype, TOKENS, 3, 32)[rows], _numbers(dtype, 2, TOKENS, 32)[:, rows]
    return [kernels.rotate(x, cos, sin, backward) for backward in (False, True)]


def _limited(kernels: SimpleNamespace, dtype: torch.dtype, rows: Rows) -> Outputs:
    case = limits_case(700, 1.0, limits=[LIMITS[i % len(LIMITS)] for i in range(TOKENS)])
    return [kernels.truncate(*(argument[rows].clone() for argument in case.arguments))]


BY_ROW: dict[str, Callable[[SimpleNamespace, torch.dtype, Rows], Outputs]] = {
    "paged_attention": _attended,
    "lora_add": _adapted,
    "split_heads, split_heads_backward": _heads,
    "store_heads, store_keys": _stored,
    "add_norm, add_norm_backward, norm": _summed,
    "swiglu, swiglu_backward, joined_swiglu, joined_swiglu_backward": _gated,
    "rotate": _rotated,
    "truncate": _limited,
}
"""By the operations: what they give for these rows of TOKENS."""


def test_every_operation_is_asked_for_its_bits() -> None:
    operations = {name for name, value in vars(ops).items() if isinstance(value, CustomOpDef)}
    assert {name for names in BY_ROW for name in names.split(", ")} == operations


def test_sums_in_another_order_are_noticed(kernels: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    together = _attended(kernels, torch.float16, list(range(TOKENS)))[0]
    module = importlib.import_module(kernels.paged_attention.__module__)
    monkeypatch.setattr(module, "MIN_TOKENS", 64)  # as if it depended on the number of rows
    assert not torch.equal(_attended(kernels, torch.float16, [7])[0], together[[7]])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("names", BY_ROW)
def test_a_row_has_the_same_bits_in_any_batch(kernels: SimpleNamespace, names: str, dtype: torch.dtype) -> None:
    """Alone, among all, and elsewhere among a few: nothing of a launch depends on how many rows there are."""
    compute, every = BY_ROW[names], list(range(TOKENS))
    together = compute(kernels, dtype, every)
    for rows in ([5], [17, 0, 7]):
        for one, all_of_them in zip(compute(kernels, dtype, rows), together, strict=True):
            assert torch.equal(one.nan_to_num(9.0), all_of_them[rows].nan_to_num(9.0)), rows


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strided_queries(kernels: SimpleNamespace, dtype: torch.dtype) -> None:
    """As a layer gives them: heads before rows."""
    case = paged_case(Shape(), [5, 100], dtype)
    strided = replace(case, query=case.query.transpose(0, 1).contiguous().transpose(0, 1))
    assert not strided.query.is_contiguous()
    assert torch.equal(kernels.paged_attention(*strided.arguments), kernels.paged_attention(*case.arguments))


def test_store_keys(kernels: SimpleNamespace) -> None:
    case = paged_case(Shape(dim=24), [5, 40, 33], torch.float32)
    positions = torch.tensor([4, 39, -1], dtype=torch.int32, device=here().device)
    key, value = torch.randn(2, 2, 3, 24, device=here().device).transpose(1, 2)  # heads before rows
    keys, values = case.keys.clone(), case.values.clone()
    kernels.store_keys(key, value, keys, values, case.tables, positions)
    wanted_keys, wanted_values = case.keys.clone(), case.values.clone()
    for row, position in ((0, 4), (1, 39)):
        page = case.tables[row, position // 32]
        wanted_keys[page, :, position % 32], wanted_values[page, :, position % 32] = key[row], value[row]
    assert torch.equal(keys.nan_to_num(9.0), wanted_keys.nan_to_num(9.0))
    assert torch.equal(values.nan_to_num(9.0), wanted_values.nan_to_num(9.0))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("features", [(300, 260), (128, 64), (1500, 130)], ids=str)
def test_lora_of_rows_of_many_adapters(kernels: SimpleNamespace, features: tuple[int, int], dtype: torch.dtype) -> None:
    # 19 rows of one adapter fill a block and a part of the next one.
    case = lora_case([0, 1, -1, 2, 2, 0, -1, *[1] * 18], dtype, features)
    order, blocks = (torch.from_numpy(array).to(here().device) for array in row_blocks(case.slots, len(case.slots)))
    got = case.y.clone()
    kernels.lora_add(got, case.x, case.a, case.b, order, blocks, case.scales, case.ends)
    assert relative_error(got, case.expected()) < BOUNDS[dtype]
    base = [row for row, slot in enumerate(case.slots) if slot < 0]
    assert torch.equal(got[base], case.y[base])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("ends", "rank"),
    [((128, 192), 16), ((32,), 32), ((), 256), ((96, 112), 128)],
    ids=["qkv", "gate, up", "256", "odd"],
)
def test_lora_of_joined_products_and_of_large_ranks(
    kernels: SimpleNamespace, ends: tuple[int, ...], rank: int, dtype: torch.dtype
) -> None:
    case = lora_case([0, 1, -1, 2, 2, 0], dtype, (200, 260), rank, ends)
    order, blocks = (torch.from_numpy(array).to(here().device) for array in row_blocks(case.slots, len(case.slots)))
    got = case.y.clone()
    kernels.lora_add(got, case.x, case.a, case.b, order, blocks, case.scales, case.ends)
    assert relative_error(got, case.expected()) < BOUNDS[dtype]


def test_parts_that_no_block_of_columns_divides_are_refused(kernels: SimpleNamespace) -> None:
    case = lora_case([0], torch.float32, (32, 60), ends=(20,))
    order, blocks = (torch.from_numpy(array).to(here().device) for array in row_blocks(case.slots, 1))
    with pytest.raises(ValueError, match=r"end at \[20, 60\], not at multiples of 16"):
        kernels.lora_add(case.y, case.x, case.a, case.b, order, blocks, case.scales, case.ends)


def test_lora_of_a_row_alone(kernels: SimpleNamespace) -> None:
    """The order of its sums does not depend on what else is in its block."""
    case = lora_case([1, 0, 1, 1], torch.float16)
    results = []
    for rows in ([0, 1, 2, 3], [2]):
        slots = [case.slots[row] for row in rows]
        order, blocks = (torch.from_numpy(array).to(here().device) for array in row_blocks(slots, len(slots)))
        y = case.y[rows].clone()
        kernels.lora_add(y, case.x[rows], case.a, case.b, order, blocks, case.scales, case.ends)
        results.append(y[rows.index(2)])
    assert relative_error(results[1], results[0]) < (1e-6 if here().device.type == "cpu" else 1e-12)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_swiglu_and_its_gradients(kernels: SimpleNamespace, dtype: torch.dtype) -> None:
    gate, up, grad = torch.randn(3, 5, 700, generator=torch.Generator().manual_seed(0)).to(here().device, dtype)
    exact = [gate.double().requires_grad_(), up.double().requires_grad_()]
    wanted = F.silu(exact[0]) * exact[1]
    assert relative_error(kernels.swiglu(gate, up), wanted.detach()) < BOUNDS[dtype]
    for got, want in zip(
        kernels.swiglu_backward(grad, gate, up), torch.autograd.grad(wanted, exact, grad.double()), strict=True
    ):
        assert relative_error(got, want) < BOUNDS[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_joined_swiglu_and_its_gradient(kernels: SimpleNamespace, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    gate_up, grad = (torch.randn(5, n, generator=generator).to(here().device, dtype) for n in (2 * 1030, 1030))
    exact = gate_up.double().requires_grad_()
    wanted = F.silu(exact[:, :1030]) * exact[:, 1030:]
    assert relative_error(kernels.joined_swiglu(gate_up), wanted.detach()) < BOUNDS[dtype]
    (of_input,) = torch.autograd.grad(wanted, exact, grad.double())
    assert relative_error(kernels.joined_swiglu_backward(grad, gate_up), of_input) < BOUNDS[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("width", "residuals"), [(64, None), (300, None), (300, torch.float32)], ids=str)
def test_residual_sum_with_its_norm_and_their_gradient(
    kernels: SimpleNamespace, width: int, residuals: torch.dtype | None, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(width)
    x, delta, grad_total, grad_normed = torch.randn(4, 6, width, generator=generator).to(here().device, dtype)
    x, grad_total = (tensor.to(residuals or dtype) for tensor in (x / 3, grad_total / 3))  # thirds: 32 bits show
    weight = torch.randn(width, generator=generator).to(here().device, dtype)
    total, normed = kernels.add_norm(x, delta, weight, 1e-5)
    assert torch.equal(total, x + delta) and total.dtype == x.dtype and normed.dtype == dtype
    exact = total.double().requires_grad_()  # rounded, as the next layer has it
    wanted = exact / (exact.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    assert relative_error(normed, wanted.detach()) < BOUNDS[dtype]
    (through,) = torch.autograd.grad(wanted, exact, grad_normed.double())
    expected = through + grad_total.double()
    of_x, of_delta = kernels.add_norm_backward(grad_total, grad_normed, total, weight, 1e-5)
    assert (of_x.dtype, of_delta.dtype) == (x.dtype, dtype)
    assert relative_error(of_x, expected) < BOUNDS[x.dtype] and relative_error(of_delta, expected) < BOUNDS[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("normed", [True, False], ids=["norms", "no norms"])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 32), (14, 2, 16), (6, 1, 80)])
def test_split_heads_and_their_gradient(
    kernels: SimpleNamespace, heads: int, kv_heads: int, dim: int, normed: bool, dtype: torch.dtype
) -> None:
    case = heads_case(heads, kv_heads, dim, normed, dtype)
    wanted, qkv = case.expected()
    got = kernels.split_heads(*case.arguments)
    for mine, theirs in zip(got, wanted, strict=True):
        assert mine.is_contiguous() and relative_error(mine, theirs.detach()) < 2 * BOUNDS[dtype]
    grads = [torch.randn(part.shape, generator=torch.Generator().manual_seed(1)).to(part.device, dtype) for part in got]
    (expected,) = torch.autograd.grad(wanted, qkv, [grad.double() for grad in grads])
    assert relative_error(kernels.split_heads_backward(*grads, *case.arguments), expected) < 2 * BOUNDS[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 32), (6, 1, 80)])
def test_heads_that_go_into_pages(
    kernels: SimpleNamespace, heads: int, kv_heads: int, dim: int, dtype: torch.dtype
) -> None:
    """The same bits as when they are split and then stored; an idle row stores nothing."""
    case = heads_case(heads, kv_heads, dim, True, dtype, tokens=4)
    query, key, value = kernels.split_heads(*case.arguments)
    generator = torch.Generator().manual_seed(0)
    pools = torch.randn(2, 9, kv_heads, 16, dim, generator=generator).to(here().device, dtype)
    tables = torch.randperm(8, generator=generator).int().view(4, 2).to(here().device)
    positions = torch.tensor([0, -1, 31, 16], dtype=torch.int32, device=here().device)
    wanted, got = pools.clone(), pools.clone()
    kernels.store_keys(key, value, *wanted, tables, positions)
    assert torch.equal(kernels.store_heads(*case.arguments, *got, tables, positions), query)
    assert torch.equal(got, wanted) and not torch.equal(got, pools)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [16, 80])
def test_rotary_positions_and_their_gradient(kernels: SimpleNamespace, dim: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(dim)
    # Strided, as a layer has them. Cosines and sines of all dimensions differ, so that halves cannot be mistaken.
    x = torch.randn(3, 6, dim, generator=generator).to(here().device, dtype).transpose(0, 1)
    cos, sin = torch.randn(2, 6, dim, generator=generator).to(here().device, dtype)
    grad = torch.randn(6, 3, dim, generator=generator).to(here().device, dtype)
    exact = x.double().requires_grad_()
    first, second = exact.chunk(2, dim=-1)
    wanted = exact * cos.double()[:, None] + torch.cat((-second, first), -1) * sin.double()[:, None]
    assert relative_error(kernels.rotate(x, cos, sin, False), wanted.detach()) < BOUNDS[dtype]
    (grad_x,) = torch.autograd.grad(wanted, exact, grad.double())
    assert relative_error(kernels.rotate(grad, cos, sin, True), grad_x) < BOUNDS[dtype]


@pytest.mark.parametrize("spread", [0.1, 3.0])
@pytest.mark.parametrize("step", [0.0, 0.5], ids=["distinct", "ties"])
def test_what_limits_leave(kernels: SimpleNamespace, spread: float, step: float) -> None:
    case = limits_case(700, spread, step)
    assert torch.equal(kernels.truncate(*case.arguments).cpu(), case.expected())


def test_limits_of_more_tokens_than_a_turn_reads(kernels: SimpleNamespace) -> None:
    case = limits_case(10_001, 1.0, 0.5, LIMITS[4:8])
    assert torch.equal(kernels.truncate(*case.arguments).cpu(), case.expected())


def test_a_row_of_nan_is_left_without_mass(kernels: SimpleNamespace) -> None:
    case = limits_case(700, 1.0)
    case.probs[2] = torch.nan
    kept = kernels.truncate(*case.arguments)
    others = [row for row in range(len(LIMITS)) if row != 2]
    assert not kept[2].any() and torch.equal(kept[others], plain.truncate(*case.arguments)[others])


def test_kernels_and_plain_operations_agree_at_a_models_real_shape(kernels: SimpleNamespace) -> None:
    """Qwen3-4B: 32 heads, 8 of them for keys, 128 wide."""
    case = paged_case(Shape(heads=32, kv_heads=8, dim=128), [90, 300], torch.float32)
    expected = plain.paged_attention(*case.arguments)
    assert relative_error(kernels.paged_attention(*case.arguments), expected) < BOUNDS[torch.float32]
