"""Frozen quantized linears, which replace those that transformers' quantizers create.

All formats share one product: x @ W.T, where W is the stored weight, dequantized to the dtype of x for this product. The modules
of some formats also quantize their inputs: in blocks (FP8), or except for outlier columns of the whole pass (LLM.int8). A token's
logprob would then depend on the rest of the pass, and the gradient would not be that of the forward pass. With one product the
sampler and the trainer agree, the gradient of x is exact, and a format runs wherever its weight can be dequantized. The cost is
the memory of one dequantized weight at a time.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from transformers.models.falcon.modeling_falcon import FalconLinear
from transformers.pytorch_utils import Conv1D

from tinker_local_backend.engine.model.products import linear


class QuantizedLinear(nn.Module):
    """A linear (..., in) -> (..., out) with a stored weight that is never trained. There is a subclass per format.

    Args:
        shape: of the weight, (out, in).
        bias: (out,) or None.
    """

    format = ""
    """its name in the log line at load"""

    is_transposed = False
    """it replaces transformers' Conv1D, whose plain weight is (in, out)"""

    def __init__(self, shape: tuple[int, int], bias: torch.Tensor | None):
        super().__init__()
        self.out_features, self.in_features = shape
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        """A new tensor with the weight (out, in)."""
        raise NotImplementedError

    def stored(self) -> Iterator[torch.Tensor]:
        """The tensors of the stored weight."""
        yield from self.buffers()

    @property
    def nbytes(self) -> int:
        """Bytes of the stored weight and the bias."""
        return sum(tensor.nbytes for tensor in self.stored()) + (0 if self.bias is None else self.bias.nbytes)

    @property
    def device(self) -> torch.device:
        return next(self.stored()).device

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """x @ weight.T + bias; not recorded by autograd."""
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return linear(x, self.dequantized(x.dtype), bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`product`, differentiable by x."""
        if torch.is_grad_enabled() and x.requires_grad:
            result: Any = _Product.apply(x, self)
            return result
        return self.product(x)


class _Product(torch.autograd.Function):
    """Saves nothing for the backward pass, which dequantizes the weight again."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: QuantizedLinear) -> torch.Tensor:
        ctx.weight = weight
        return weight.product(x)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *gradients: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        grad_y = gradients[0].contiguous()
        return linear(grad_y, ctx.weight.dequantized(grad_y.dtype).t()), None


class _Bits4(QuantizedLinear):
    """bitsandbytes: blocks of 64 numbers in 16 levels (nf4, fp4), each with a scale, which may be quantized too."""

    def __init__(self, module: Any):
        state = module.weight.quant_state
        super().__init__(tuple(state.shape), module.bias)
        self.format = f"{state.quant_type} (bitsandbytes)"
        self.is_transposed = getattr(module, "source_cls", None) is Conv1D
        self._state = state
        self.register_buffer("packed", module.weight.data)

    def stored(self) -> Iterator[torch.Tensor]:
        yield from self.buffers()
        for state in filter(None, (self._state, self._state.state2)):
            yield from (state.absmax, state.code)
        if self._state.nested:
            yield self._state.offset

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        functional: Any = importlib.import_module("bitsandbytes.functional")
        return functional.dequantize_4bit(self.packed, self._state).to(dtype)


class _Int8(QuantizedLinear):
    """bitsandbytes: rows of 8-bit integers, each with its largest magnitude."""

    format = "int8 (bitsandbytes)"

    def __init__(self, module: Any):
        super().__init__((module.out_features, module.in_features), module.bias)
        self.is_transposed = getattr(module, "source_cls", None) is Conv1D
        # A module that has run has them in its state.
        rows, largest = (getattr(module.weight, name, None) for name in ("CB", "SCB"))
        self.rows: torch.Tensor
        self.largest: torch.Tensor
        self.register_buffer("rows", module.weight.data if rows is None else rows)
        self.register_buffer("largest", module.state.SCB if largest is None else largest)

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        return (self.rows.float() * (self.largest.float() / 127)[:, None]).to(dtype)


class _Float8(QuantizedLinear):
    """transformers: float8 numbers with a scale per block of the weight, or one for all (DeepSeek, Qwen-FP8)."""

    format = "fp8 blocks"

    def __init__(self, module: Any):
        super().__init__((module.out_features, module.in_features), module.bias)
        self._block = module.block_size
        self.numbers: torch.Tensor
        self.scales: torch.Tensor
        self.register_buffer("numbers", module.weight.data)
        self.register_buffer("scales", module.weight_scale_inv.data)

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        scales = self.scales.float()
        if self._block is not None:
            rows, columns = self._block
            scales = scales.repeat_interleave(rows, 0)[: self.out_features]
            scales = scales.repeat_interleave(columns, 1)[:, : self.in_features]
        return (self.numbers.float() * scales).to(dtype)


class _TorchAo(QuantizedLinear):
    """torchao: a subclass of torch's tensor."""

    def __init__(self, module: Any):
        super().__init__((module.out_features, module.in_features), module.bias)
        self.format = f"{type(module.weight).__name__} (torchao)"
        self.register_buffer("weights", module.weight.detach())

    def stored(self) -> Iterator[torch.Tensor]:
        weights: Any = self.weights
        yield from (getattr(weights, name) for name in weights.tensor_data_names)
        others = (getattr(weights, name, None) for name in getattr(weights, "optional_tensor_data_names", ()))
        yield from (tensor for tensor in others if tensor is not None)

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        weights: Any = self.weights
        if hasattr(weights, "dequantize"):
            return weights.dequantize().to(dtype)
        # Some formats have only a product.
        identity = torch.eye(self.in_features, dtype=weights.dtype, device=self.device)
        return nn.functional.linear(identity, weights).t().to(dtype)


_SHAPE = "weight_shape"


class _Compressed(QuantizedLinear):
    """compressed-tensors: packed integers and others, with scales per group, row or tensor."""

    def __init__(self, module: Any):
        super().__init__((module.out_features, module.in_features), module.bias)
        self._scheme = module.quantization_scheme
        name = getattr(self._scheme.format, "value", self._scheme.format)
        compressors: Any = importlib.import_module("compressed_tensors.compressors")
        self._compressor: Any = compressors.BaseCompressor.get_value_from_registry(name)
        self.format = f"{name} of {self._scheme.weights.num_bits} bits (compressed-tensors)"
        for key, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            if key not in ("bias", _SHAPE):
                self.register_buffer(key, tensor.detach())

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        # Not the stored shape, which is a tensor: reading it would synchronise, which a captured step cannot.
        stored = {**dict(self.named_buffers()), _SHAPE: (self.out_features, self.in_features)}
        return self._compressor.decompress(stored, self._scheme)["weight"].to(dtype)


_BY_NAME: dict[tuple[str, str], Callable[[Any], QuantizedLinear]] = {
    ("bitsandbytes", "Linear4bit"): _Bits4,
    ("bitsandbytes", "Linear8bitLt"): _Int8,
    ("transformers", "FP8Linear"): _Float8,
}
"""(package, name) of a module's class -> its replacement. Loading such a model has imported the package."""


def quantized_linear(module: nn.Module) -> QuantizedLinear | None:
    """The replacement of a module that a quantizer created; None for any other."""
    package = type(module).__module__.partition(".")[0]
    known = _BY_NAME.get((package, type(module).__name__))
    if known is not None:
        return known(module)
    if not isinstance(module, nn.Linear):
        return None
    if getattr(module, "quantization_scheme", None) is not None and not hasattr(module, "weight"):
        return _Compressed(module)
    if type(module.weight).__module__.startswith("torchao."):
        return _TorchAo(module)
    return None


def install_quantized(model: nn.Module, keep: bool = True) -> list[QuantizedLinear]:
    """Replace every linear that a quantizer created. Returns the quantized linears that are now in the model.

    keep: False dequantizes all of them to the model's dtype. The head is always dequantized, because its weight is read in
    chunks."""
    whole: Any = model
    head = whole.get_output_embeddings()
    candidates = [(path, module, quantized_linear(module)) for path, module in model.named_modules()]
    kept: list[QuantizedLinear] = []
    for path, module, quantized in candidates:
        if quantized is None:
            continue
        parent_path, _, leaf = path.rpartition(".")
        keeps = keep and module is not head
        setattr(model.get_submodule(parent_path), leaf, quantized if keeps else plain(quantized, whole.dtype))
        if keeps:
            kept.append(quantized)
    return kept


def dequantize(model: Any) -> None:
    """Give a quantized model plain weights, in place, and remove its quantizer, so that it can be cast and saved as any other."""
    install_quantized(model, keep=False)
    if (quantizer := getattr(model, "hf_quantizer", None)) is not None:
        quantizer.remove_quantization_config(model)
    for config in (model.config, model.config.get_text_config()):
        if hasattr(config, "quantization_config"):
            del config.quantization_config
    if hasattr(model, "_weight_conversions"):  # of the quantized checkpoint
        del model._weight_conversions


def special_linears(modules: Iterable[nn.Module]) -> set[str]:
    """Names of linear classes that are not supported: other formats, ternary weights."""
    known = nn.Linear, Conv1D, FalconLinear
    return {type(m).__name__ for m in modules if type(m) not in known and not isinstance(m, QuantizedLinear)}


def has_quantized(model: nn.Module) -> bool:
    """Whether a quantizer created some linear of a model that was just loaded."""
    return any(quantized_linear(module) is not None for module in model.modules())


def plain(quantized: QuantizedLinear, dtype: torch.dtype) -> nn.Linear | Conv1D:
    """A frozen linear with the dequantized weight."""
    weight = quantized.dequantized(dtype)
    with torch.device("meta"):
        if quantized.is_transposed:
            module = Conv1D(quantized.out_features, quantized.in_features)
            weight = weight.t().contiguous()
        else:
            module = nn.Linear(quantized.in_features, quantized.out_features, bias=False)
    module.weight = nn.Parameter(weight, requires_grad=False)
    if quantized.bias is not None:
        module.bias = nn.Parameter(quantized.bias.to(dtype), requires_grad=False)
    return module
