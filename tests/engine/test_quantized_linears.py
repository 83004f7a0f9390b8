"""Quantized linears: what stands for a quantizer's module multiplies with its weight, and has that product's gradient."""

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers.integrations.finegrained_fp8 import FP8Linear

from tests.engine.quantized_models import BLOCK, fp8_blocks, int4_groups, needs
from tinker_local_backend.engine.model.lora import Adapter, AdapterRouting, LoraLinear
from tinker_local_backend.engine.model.lora_spec import LoraSpec
from tinker_local_backend.engine.model.quantized import QuantizedLinear, plain, quantized_linear

IN, OUT, RANK = 192, 160, 4
"""No multiple of a block of fp8."""


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) / shape[-1] ** 0.5


def dense(bias: bool) -> nn.Linear:
    module = nn.Linear(IN, OUT, bias=bias).requires_grad_(False)
    module.weight.copy_(drawn(OUT, IN))
    if bias:
        module.bias.copy_(drawn(OUT, seed=1))
    return module


def bits4(module: nn.Linear, quant_type: str = "nf4", double: bool = True) -> nn.Module:
    made: nn.Module = importlib.import_module("bitsandbytes.nn").Linear4bit(
        IN, OUT, module.bias is not None, torch.float32, double, quant_type
    )
    made.load_state_dict(module.state_dict())
    return made.to("cpu")


def int8(module: nn.Linear) -> nn.Module:
    made: nn.Module = importlib.import_module("bitsandbytes.nn").Linear8bitLt(
        IN, OUT, module.bias is not None, has_fp16_weights=False, threshold=0.0
    )
    made.load_state_dict(module.state_dict())
    return made.to("cpu")


def float8(module: nn.Linear, block: tuple[int, int] | None = (BLOCK, BLOCK)) -> nn.Module:
    made = FP8Linear(IN, OUT, block, has_bias=module.bias is not None)
    if block is None:
        scale = module.weight.abs().max() / torch.finfo(torch.float8_e4m3fn).max
        numbers = (module.weight / scale).to(torch.float8_e4m3fn)
    else:
        numbers, scale = fp8_blocks(module.weight)
    made.weight, made.weight_scale_inv = (nn.Parameter(t, requires_grad=False) for t in (numbers, scale))
    made.bias = module.bias
    return made


def torchao(kind: str) -> Callable[[nn.Linear], nn.Module]:
    def make(module: nn.Linear) -> nn.Module:
        quantization: Any = importlib.import_module("torchao.quantization")
        configs = {
            "int8": quantization.Int8WeightOnlyConfig,
            "float8": quantization.Float8WeightOnlyConfig,
            "dynamic int8": quantization.Int8DynamicActivationInt8WeightConfig,
        }
        sequence = nn.Sequential(module)
        quantization.quantize_(sequence, configs[kind]())
        return sequence[0]

    return make


def compressed(module: nn.Linear) -> nn.Module:
    parts: Any = importlib.import_module("compressed_tensors.quantization")
    weights = parts.QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy="group", group_size=32)
    stored = int4_groups(module.weight)
    del module.weight
    for name, tensor in stored.items():
        module.register_buffer(name, tensor)
    module.quantization_scheme = parts.QuantizationScheme(targets=["Linear"], weights=weights, format="pack-quantized")
    return module


Make = Callable[[nn.Linear], nn.Module]
FORMATS: dict[str, tuple[Make, Sequence[str], float, float]] = {
    "nf4": (bits4, ["bitsandbytes"], 0.15, 0.56),
    "fp4": (lambda module: bits4(module, "fp4", double=False), ["bitsandbytes"], 0.25, 0.57),
    "int8": (int8, ["bitsandbytes"], 0.02, 1.03),
    "fp8 blocks": (float8, [], 0.05, 1.01),
    "fp8 of one scale": (lambda module: float8(module, None), [], 0.05, 1.01),
    "torchao int8": (torchao("int8"), ["torchao"], 0.02, 1.06),
    "torchao float8": (torchao("float8"), ["torchao"], 0.05, 1.03),
    "torchao dynamic int8": (torchao("dynamic int8"), ["torchao"], 0.02, 1.06),
    "int4": (compressed, ["compressed-tensors"], 0.15, 0.63),
}
"""How a module of the format is made, the packages for it, and at most: its relative error, and its bytes for a number."""

ALL = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=needs(*packages)) for name, (_, packages, _, _) in FORMATS.items()]
)


def made(name: str, bias: bool = True) -> QuantizedLinear:
    found = quantized_linear(FORMATS[name][0](dense(bias)))
    assert found is not None
    return found


@ALL
def test_it_keeps_the_weight_quantized(name: str) -> None:
    quantized, (_, _, most, most_bytes) = made(name), FORMATS[name]
    weight = dense(True).weight
    error = float((quantized.dequantized(torch.float32) - weight).norm() / weight.norm())
    assert 1e-4 < error < most
    assert 0.5 <= (quantized.nbytes - 4 * OUT) / weight.numel() < most_bytes
    assert (quantized.out_features, quantized.in_features, quantized.device.type) == (OUT, IN, "cpu")
    assert not any(parameter.requires_grad for parameter in quantized.parameters())


@ALL
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_product_and_gradient_are_those_of_the_dequantised_weight(name: str, bias: bool, dtype: torch.dtype) -> None:
    quantized = made(name, bias)
    x, grad_y = drawn(1, 5, IN, seed=2).to(dtype).requires_grad_(), drawn(1, 5, OUT, seed=3).to(dtype)
    y = quantized(x)
    weight = quantized.dequantized(dtype).double()
    expected = F.linear(x.double(), weight, None if quantized.bias is None else quantized.bias.double())
    (gradient,) = torch.autograd.grad(y, x, grad_y)
    assert y.dtype == gradient.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(y.double(), expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(gradient.double(), grad_y.double() @ weight, rtol=tolerance, atol=tolerance)
    with torch.no_grad():
        assert torch.equal(quantized(x), y)
    module = plain(quantized, dtype)
    torch.testing.assert_close(module(x), y, rtol=tolerance, atol=tolerance)


QUANTIZES_INPUTS = ("int8", "torchao dynamic int8")
NOT_ON_A_CPU = ("fp8 blocks", "fp8 of one scale")


@ALL
def test_it_is_the_modules_own_forward_where_that_runs_and_keeps_its_inputs(name: str) -> None:
    """transformers' fp8 needs a GPU. Two quantize their inputs too and differ by that."""
    module, x = FORMATS[name][0](dense(True)), drawn(5, IN, seed=2).requires_grad_()
    quantized = quantized_linear(module)
    assert quantized is not None
    y = quantized(x)
    if name in NOT_ON_A_CPU:
        with pytest.raises((ImportError, RuntimeError)):
            module(x)
        return
    if name == "int4":
        importlib.import_module("compressed_tensors.compressors.base").decompress_module(module)
    error = float(((module.eval()(x) - y).norm() / y.norm()).detach())
    assert (1e-4 < error < 0.05) if name in QUANTIZES_INPUTS else error < 1e-6


@ALL
@pytest.mark.parametrize("first_layer", [False, True])
def test_an_adapter_on_it_has_the_gradients_of_autograd(name: str, first_layer: bool) -> None:
    quantized = made(name)
    layer = LoraLinear(quantized, "q_proj", AdapterRouting())
    a, b = drawn(RANK, IN, seed=4).requires_grad_(), drawn(OUT, RANK, seed=5).requires_grad_()
    adapter = Adapter(LoraSpec(RANK), {"q_proj": a}, {"q_proj": b})
    x, grad_y = drawn(1, 7, IN, seed=2).requires_grad_(not first_layer), drawn(1, 7, OUT, seed=3)
    wanted = [a, b] if first_layer else [x, a, b]
    with layer.routing.use([(slice(None), adapter)]):
        y = layer(x)
        found = (y.detach(), *torch.autograd.grad(y, wanted, grad_y))
    expected = F.linear(x, quantized.dequantized(torch.float32), quantized.bias)
    expected = expected + adapter.spec.scale * F.linear(F.linear(x, a), b)
    for one, other in zip(found, (expected.detach(), *torch.autograd.grad(expected, wanted, grad_y)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_plain_linears_are_left_alone() -> None:
    module: Any = dense(True)
    assert quantized_linear(module) is None and quantized_linear(nn.LayerNorm(4)) is None
