"""How a checkpoint in fewer bits is loaded, and how weights are brought into fewer bits when they are loaded.

transformers' quantizers do either; quantized.py then stands in for the linears that they made.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import BitsAndBytesConfig, PreTrainedConfig, TorchAoConfig

from tinker_local_backend import environment
from tinker_local_backend.engine.model.refusals import QUANTIZED, has_experts, quantization_method
from tinker_local_backend.engine.model.vision import TOWERS, takes_pictures
from tinker_local_backend.errors import ModelLoadError

logger = logging.getLogger(__name__)

VARIABLE = "TINKER_LOCAL_QUANTIZATION"

_DEQUANTIZED_BY_TRANSFORMERS = ("compressed-tensors", "fp8", "mxfp4")


def _nf4(dtype: torch.dtype, plain: list[str] | None) -> BitsAndBytesConfig:
    """As in QLoRA: the scales of the blocks are quantised too."""
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
        llm_int8_skip_modules=plain,
    )


def _int8(dtype: torch.dtype, plain: list[str] | None) -> BitsAndBytesConfig:
    return BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=plain)


def _fp8(dtype: torch.dtype, plain: list[str] | None) -> TorchAoConfig:
    """A scale for each row. transformers' own quantizer makes blocks on a GPU alone."""
    made = importlib.import_module("torchao.quantization").Float8WeightOnlyConfig()
    return TorchAoConfig(made, modules_to_not_convert=plain)


_MADE: dict[str, tuple[str, Callable[[torch.dtype, list[str] | None], Any]]] = {
    "nf4": ("bitsandbytes", _nf4),
    "int8": ("bitsandbytes", _int8),
    "fp8": ("torchao", _fp8),
}
"""By value of the variable: the method, and transformers' config of it; `plain` names modules that stay as they are, None:
what transformers leaves out."""


def load_arguments(
    name: str, config: PreTrainedConfig, dtype: torch.dtype, device: torch.device, asked: str | None
) -> dict[str, Any]:
    """Further arguments of from_pretrained for a model with this (whole) config; none for plain weights.

    asked: the value of TINKER_LOCAL_QUANTIZATION; None: as the checkpoint is, "none": plain, which `dequantize` completes.

    Raises ModelLoadError, before any weight is read, for a package that is missing and for a checkpoint in fewer bits that
    TINKER_LOCAL_QUANTIZATION asks to quantize in another way.
    """
    method = quantization_method(config)
    if method is None:
        if asked is None or asked == "none":
            return {}
        method, make = _MADE[asked]
        _require(name, method, f"{VARIABLE}={asked}")
        plain = [*(f"model.{tower}" for tower in TOWERS), "lm_head"] if takes_pictures(config) else None
        return {"quantization_config": make(dtype, plain), "device_map": {"": device}}
    has = _format(config, method)
    if asked not in (None, "none", has):
        raise ModelLoadError(
            f"model {name!r} has weights in {has}, and {VARIABLE}={asked} asks for others: unset it to load them as they are, "
            "or give the model's copy with plain weights"
        )
    _require(name, method, f"its weights are in {has}")
    if asked != "none" and environment.read("TINKER_LOCAL_BASE_WEIGHTS") == "sharded":
        raise ModelLoadError(
            f"model {name!r} has weights in {has}, which TINKER_LOCAL_BASE_WEIGHTS=sharded cannot divide: unset it, or set "
            f"{VARIABLE}=none, which makes them plain"
        )
    arguments: dict[str, Any] = {"config": config, "device_map": {"": device}}
    quantization: Any = config.quantization_config
    if method in _DEQUANTIZED_BY_TRANSFORMERS:
        why = None if asked == "none" else _why_plain(config, method, device)
        if asked == "none" or why is not None:
            quantization["dequantize"] = True
        if why is not None:
            logger.warning(
                "model %r: its weights in %s are dequantised to %s when they are loaded, and take the memory of plain ones: %s",
                name,
                has,
                str(dtype).removeprefix("torch."),
                why,
            )
    return arguments


def round_dequantized(model: nn.Module, arguments: dict[str, Any], dtype: torch.dtype) -> None:
    """Give a model that transformers dequantised its dtype, in place: of fp8 it leaves all weights in that of the file."""
    if "config" in arguments and arguments["config"].quantization_config.get("dequantize"):
        kept = tuple(getattr(model, "_keep_in_fp32_modules", None) or ())
        for name, weight in model.named_parameters():
            if weight.is_floating_point() and not any(part in name for part in kept):
                weight.data = weight.data.to(dtype)


def _why_plain(config: PreTrainedConfig, method: str, device: torch.device) -> str | None:
    """Why a checkpoint cannot stay in fewer bits; None if it can."""
    if method == "mxfp4" or has_experts(config.get_text_config()):
        return "routed experts in fewer bits have no product here"
    if method == "fp8" and (device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 9)):
        return "transformers keeps fp8 blocks on GPUs of compute capability 8.9 or newer alone"
    return None


def _format(config: Any, method: str) -> str:
    """The value of the variable that means the same, if there is one; else a name of the format."""
    quantization: Any = config.quantization_config
    if method != "bitsandbytes":
        return method
    if quantization.get("load_in_8bit"):
        return "int8"
    return str(quantization.get("bnb_4bit_quant_type", "fp4"))


def _require(name: str, method: str, why: str) -> None:
    package = QUANTIZED[method]
    if package is not None and importlib.util.find_spec(method.replace("-", "_")) is None:
        raise ModelLoadError(f"model {name!r}: {why}, which needs {method}: pip install '{package}'")
