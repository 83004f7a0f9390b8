"""The operations as torch sees them: plain torch on a CPU, compared with float64 row by row, and their gradients."""

import weakref
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from tests.engine.cuda.cases import BOUNDS, Shape, heads_case, lora_case, paged_case, relative_error
from tests.engine.devices import here
from tests.engine.limits import limits_case
from tinker_local_backend.engine.cuda import ops
from tinker_local_backend.engine.cuda.adapter_slots import row_blocks
from tinker_local_backend.engine.cuda.fused_layer import FusedOperations

DTYPE = here().dtype
SHAPES = [
    Shape(),
    Shape(heads=8, kv_heads=1, softcap=20.0),
    Shape(window=40, page=16, dim=24, heads=6),
    Shape(window=40, sinks=True),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_paged_attention(shape: Shape) -> None:
    case = paged_case(shape, [0, 1, 32, 65, 300], DTYPE)
    assert relative_error(ops.paged_attention(*case.arguments), case.expected()) < BOUNDS[DTYPE]


def test_keys_are_stored_where_the_table_says() -> None:
    case = paged_case(Shape(), [5, 40, 9], DTYPE)
    positions = torch.tensor([4, 39, -1], dtype=torch.int32, device=here().device)
    key, value = torch.randn(2, 3, 2, 32, device=here().device).to(DTYPE)
    before = case.keys.clone()
    ops.store_keys(key, value, case.keys, case.values, case.tables, positions)
    for row, position in ((0, 4), (1, 39)):
        page = case.tables[row, position // 32]
        assert torch.equal(case.keys[page, :, position % 32], key[row])
        assert torch.equal(case.values[page, :, position % 32], value[row])
        before[page, :, position % 32] = key[row]
    assert torch.equal(case.keys.nan_to_num(9.0), before.nan_to_num(9.0)), "nothing else has changed"


def test_lora_of_rows_of_many_adapters() -> None:
    case = lora_case([0, 1, -1, 2, 2, 0, -1, *[1] * 18], DTYPE)
    order, blocks = (torch.from_numpy(array).to(here().device) for array in row_blocks(case.slots, 32))
    y = case.y.clone()
    ops.lora_add(y, case.x, case.a, case.b, order, blocks, case.scales, case.ends)
    assert relative_error(y, case.expected()) < BOUNDS[DTYPE]
    assert torch.equal(y[2], case.y[2])


def test_gradients_go_through_the_operations() -> None:
    generator = torch.Generator().manual_seed(0)
    gate, up = (torch.randn(5, 40, generator=generator).to(here().device).requires_grad_() for _ in range(2))
    x = torch.randn(6, 3, 16, generator=generator).to(here().device).requires_grad_()
    cos, sin = torch.randn(2, 6, 16, generator=generator).to(here().device)
    first, second = x.chunk(2, dim=-1)
    pairs = [
        (ops.swiglu(gate, up), F.silu(gate) * up, (gate, up)),
        (ops.rotate(x, cos, sin, False), x * cos[:, None] + torch.cat((-second, first), -1) * sin[:, None], (x,)),
    ]
    for got, wanted, inputs in pairs:
        assert relative_error(got.detach(), wanted.detach()) < 1e-6
        grad = torch.randn(got.shape, generator=generator).to(here().device)
        for mine, theirs in zip(
            torch.autograd.grad(got, inputs, grad), torch.autograd.grad(wanted, inputs, grad), strict=True
        ):
            assert relative_error(mine, theirs) < 1e-6


def scaled_again(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The RMS norm in float64."""
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()


@pytest.mark.parametrize("normed", [True, False], ids=["norms", "no norms"])
def test_gradients_between_the_products_of_a_layer(normed: bool) -> None:
    case = heads_case(4, 2, 8, normed, torch.float32)
    wanted, exact = case.expected()
    qkv = case.qkv.clone().requires_grad_()
    got = ops.split_heads(qkv, *case.arguments[1:])
    grads = [torch.randn(part.shape, generator=torch.Generator().manual_seed(1)).to(part.device) for part in got]
    (mine,) = torch.autograd.grad(got, qkv, grads)
    (theirs,) = torch.autograd.grad(wanted, exact, [grad.double() for grad in grads])
    assert relative_error(mine, theirs) < 1e-6
    x, delta = torch.randn(2, 3, 6, generator=torch.Generator().manual_seed(2)).to(here().device).requires_grad_()
    weight = torch.linspace(0.5, 2, 6, device=here().device)
    total, normed_x = ops.add_norm(x, delta, weight, 1e-5)
    mine = torch.autograd.grad((total.sin().sum() + normed_x.cos().sum()), (x, delta))
    sum_x = (x.double() + delta.double()).detach().requires_grad_()
    scaled = scaled_again(sum_x, weight)
    (theirs,) = torch.autograd.grad(sum_x.sin().sum() + scaled.cos().sum(), sum_x)
    assert torch.equal(*mine) and relative_error(mine[0], theirs) < 1e-6
    (theirs,) = torch.autograd.grad(scaled_again(sum_x, weight).cos().sum(), sum_x)
    whole = (x + delta).detach().requires_grad_()
    (mine_alone,) = torch.autograd.grad(ops.norm(whole, weight, 1e-5).cos().sum(), whole)
    assert relative_error(mine_alone, theirs) < 1e-6


def test_operations_keep_what_torch_asks_of_them() -> None:
    """Schema, fake implementation and autograd registration, by torch's own check."""
    case = paged_case(Shape(), [3, 40], torch.float32)
    lora = lora_case([0, -1, 1], torch.float32)
    order, blocks = (torch.from_numpy(array).to(here().device) for array in row_blocks(lora.slots, 3))
    x = torch.randn(4, 2, 8, device=here().device, requires_grad=True)
    cos, sin = torch.randn(2, 4, 8, device=here().device)
    gate, up = (torch.randn(3, 5, device=here().device, requires_grad=True) for _ in range(2))
    heads = heads_case(4, 2, 8, True, torch.float32)
    qkv = heads.qkv.clone().requires_grad_()
    tables = torch.zeros(5, 1, dtype=torch.int32, device=here().device)
    positions5 = torch.tensor([0, 1, -1, 2, 3], dtype=torch.int32, device=here().device)
    positions = case.lengths - 1
    key, value = torch.randn(2, 2, 2, 32, device=here().device)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    for operation, arguments in (
        (ops.paged_attention, case.arguments),
        (ops.store_keys, (key, value, case.keys.nan_to_num(), case.values.nan_to_num(), case.tables, positions)),
        (ops.lora_add, (lora.y, lora.x, lora.a, lora.b, order, blocks, lora.scales, lora.ends)),
        (ops.swiglu, (gate, up)),
        (ops.joined_swiglu, (torch.randn(3, 10, device=here().device, requires_grad=True),)),
        (ops.norm, (gate, torch.randn(5, device=here().device), 1e-5)),
        (ops.add_norm, (gate, up, torch.randn(5, device=here().device), 1e-5)),
        (ops.add_norm, (gate, up.half(), torch.randn(5, device=here().device).half(), 1e-5)),
        (ops.split_heads, (qkv, *heads.arguments[1:])),
        (ops.store_heads, (*heads.arguments, *torch.zeros(2, 3, 2, 4, 8, device=here().device), tables, positions5)),
        (ops.rotate, (x, cos, sin, False)),
        (ops.truncate, limits_case(40, 1.0).arguments),
    ):
        torch.library.opcheck(operation, arguments, test_utils=tests)


def test_a_pass_that_is_dropped_frees_all_that_it_kept() -> None:
    """Nothing that is kept may refer to its own graph: a pass that fails never reaches the backward pass that would free it."""
    operations = FusedOperations()
    x = torch.randn(5, 8, device=here().device, requires_grad=True)
    weights = torch.randn(16, 8, device=here().device, requires_grad=True)
    norm = SimpleNamespace(weight=torch.ones(8, device=here().device), variance_epsilon=1e-5)
    kept: list[weakref.ref] = []

    def product(normed: torch.Tensor) -> torch.Tensor:
        result = (normed @ weights.t()).exp()  # keeps its own result
        kept.append(weakref.ref(result))
        return result

    total, out = operations.norm_and_product(x, x * 2, norm, product)
    (grad,) = torch.autograd.grad(out.sum() + total.sum(), x)
    assert torch.isfinite(grad).all()
    total, out = operations.norm_and_product(x, x * 2, norm, product)
    del total, out
    assert [reference() for reference in kept] == [None, None]
