"""The linear that trains: value and gradients are autograd's own, in any dtype and with whatever library multiplies."""

from collections.abc import Sequence

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tinker_local_backend.engine.model.lora import Adapter, AdapterRouting, LoraLinear
from tinker_local_backend.engine.model.lora_spec import LoraSpec

RANK, IN, OUT = 4, 48, 96


def make(rows: int, bias: bool) -> tuple[LoraLinear, Adapter, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) / shape[-1] ** 0.5

    base = nn.Linear(IN, OUT, bias=bias).requires_grad_(False)
    with torch.no_grad():
        for parameter in base.parameters():
            parameter.copy_(drawn(*parameter.shape))
    a, b = drawn(RANK, IN).requires_grad_(), drawn(OUT, RANK).requires_grad_()
    adapter = Adapter(LoraSpec(RANK), {"q_proj": a}, {"q_proj": b})
    return LoraLinear(base, "q_proj", AdapterRouting()), adapter, drawn(1, rows, IN), drawn(1, rows, OUT)


def gradients(
    layer: LoraLinear, adapter: Adapter, x: torch.Tensor, grad_y: torch.Tensor, wanted: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    with layer.routing.use([(slice(None), adapter)]):
        y = layer(x)
        return (y.detach(), *torch.autograd.grad(y, wanted, grad_y))


@pytest.mark.parametrize("rows", [1, 2, 700])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("first_layer", [False, True])
def test_value_and_gradients_are_those_of_autograd(rows: int, bias: bool, first_layer: bool) -> None:
    layer, adapter, x, grad_y = make(rows, bias)
    x.requires_grad_(not first_layer)
    a, b = adapter.a["q_proj"], adapter.b["q_proj"]
    wanted = [a, b] if first_layer else [x, a, b]
    expected = F.linear(x, layer.weight, layer.bias) + adapter.spec.scale * F.linear(F.linear(x, a), b)
    found = gradients(layer, adapter, x, grad_y, wanted)
    for one, other in zip(found, (expected.detach(), *torch.autograd.grad(expected, wanted, grad_y)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_gradients_in_float64() -> None:
    layer, adapter, x, _ = make(3, bias=True)
    layer.double()
    leaves = [tensor.detach().double().requires_grad_() for tensor in (x, adapter.a["q_proj"], adapter.b["q_proj"])]

    def value(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        with layer.routing.use([(slice(None), Adapter(adapter.spec, {"q_proj": a}, {"q_proj": b}))]):
            return layer(x)

    assert torch.autograd.gradcheck(value, tuple(leaves))


def test_in_half_precision_the_adapter_keeps_float32() -> None:
    layer, adapter, x, grad_y = make(5, bias=False)
    layer.to(torch.bfloat16)
    wanted = [adapter.a["q_proj"], adapter.b["q_proj"]]
    y, grad_a, grad_b = gradients(layer, adapter, x.bfloat16(), grad_y.bfloat16(), wanted)
    assert (y.dtype, grad_a.dtype, grad_b.dtype) == (torch.bfloat16, torch.float32, torch.float32)


def test_a_model_may_change_the_result_in_place() -> None:
    """OLMo clips queries, keys and values so."""
    layer, adapter, x, grad_y = make(700, bias=False)
    a = adapter.a["q_proj"]
    results = []
    for clip in (torch.Tensor.clamp, torch.Tensor.clamp_):
        with layer.routing.use([(slice(None), adapter)]):
            y = clip(layer(x), -0.5, 0.5)
        results.append((y.detach(), *torch.autograd.grad(y, a, grad_y)))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("training", [False, True])
def test_rows_without_a_batch_get_the_same(training: bool) -> None:
    """As models give them to shared experts."""
    layer, adapter, x, _ = make(6, bias=True)
    rows = slice(None) if training else torch.tensor([1, 4])
    with torch.set_grad_enabled(training), layer.routing.use([(rows, adapter)]):
        found, expected = layer(x[0]), layer(x)[0]
    assert torch.equal(found, expected) and found.shape == (6, OUT)
    assert not torch.allclose(found[1], F.linear(x[0, 1], layer.weight, layer.bias))
