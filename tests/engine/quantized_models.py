"""Quantized checkpoints, as they are released, and what a plain reference of them is."""

from __future__ import annotations

import importlib
import importlib.util
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig, TorchAoConfig

from tests.engine.conftest import SHAPE, TOKENIZER_FILES
from tinker_local_backend.engine.model.quantized import dequantize

BLOCK = 128
"""rows and columns of a block of fp8"""
GROUP = 32
"""numbers with one scale, in int4 and mxfp4"""
WIDE: dict[str, Any] = {
    **SHAPE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "head_dim": 32,
    "tie_word_embeddings": False,
}
"""Several blocks of 64 numbers, and rows that a group of 32 divides."""
KEPT_PLAIN = ("embed", "lm_head", "norm", "router", "gate.weight")
FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def needs(*packages: str) -> pytest.MarkDecorator:
    """Skips where a package of the extra `quantized` is missing (`make test-quantized` installs them)."""
    missing = [name for name in packages if importlib.util.find_spec(name.replace("-", "_")) is None]
    return pytest.mark.skipif(bool(missing), reason=f"needs the extra `quantized`: no {', '.join(missing)} here")


def write_fp8(source: str, folder: Path) -> str:
    """Blocks of float8 with a float32 scale each, as DeepSeek and Qwen release them."""

    def quantize(weight: torch.Tensor) -> dict[str, torch.Tensor]:
        blocks, scale = fp8_blocks(weight)
        return {"weight": blocks, "weight_scale_inv": scale}

    config = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
    return _write(source, folder, config, quantize)


def fp8_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The numbers (out, in) and their scales."""
    rows, columns = weight.shape
    padded = torch.zeros(-(-rows // BLOCK) * BLOCK, -(-columns // BLOCK) * BLOCK)
    padded[:rows, :columns] = weight
    blocks = padded.view(padded.shape[0] // BLOCK, BLOCK, -1, BLOCK)
    scale = blocks.abs().amax((1, 3)) / torch.finfo(torch.float8_e4m3fn).max
    numbers = (blocks / scale[:, None, :, None].clamp(min=1e-12)).view(padded.shape)[:rows, :columns]
    return numbers.to(torch.float8_e4m3fn).contiguous(), scale.float()


def write_int4(source: str, folder: Path) -> str:
    """Groups of 32 integers of 4 bits, eight in an int32, as compressed-tensors packs them (Kimi)."""
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
    config = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head", "re:.*mlp.gate$"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }
    return _write(source, folder, config, int4_groups)


def int4_groups(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """The stored tensors of a weight (out, in)."""
    groups = weight.unflatten(1, (-1, GROUP))
    scale = groups.abs().amax(2) / 7
    integers = (groups / scale[..., None]).round().clamp(-8, 7).flatten(1).long() + 8
    words = (integers.unflatten(1, (-1, 8)) << torch.arange(0, 32, 4)).sum(2)
    words = torch.where(words >= 1 << 31, words - (1 << 32), words).int()
    return {"weight_packed": words, "weight_scale": scale, "weight_shape": torch.tensor(weight.shape)}


def write_mxfp4(source: str, folder: Path) -> str:
    """gpt-oss's experts: groups of 32 numbers of 4 bits with a power of two each; the rest stays plain."""
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(Path(source) / "model.safetensors").items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            groups = tensor.transpose(1, 2).contiguous().unflatten(2, (-1, GROUP))
            exponent = torch.floor(torch.log2(groups.abs().amax(-1))) - 2
            scaled = groups / 2 ** exponent[..., None]
            index = (scaled.abs()[..., None] - FP4).abs().argmin(-1) + 8 * (scaled < 0)
            tensors[f"{name}_blocks"] = (index[..., 0::2] | (index[..., 1::2] << 4)).to(torch.uint8)
            tensors[f"{name}_scales"] = (exponent + 127).to(torch.uint8)
        else:
            tensors[name] = tensor
    plain = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    return _save(source, folder, {"quant_method": "mxfp4", "modules_to_not_convert": plain}, tensors)


def write_by(config: Callable[[], Any]) -> Callable[[str, Path], str]:
    """A checkpoint that transformers itself writes after it has quantized a plain one."""

    def write(source: str, folder: Path) -> str:
        model = AutoModelForCausalLM.from_pretrained(
            source, dtype=torch.float32, quantization_config=config(), device_map={"": "cpu"}
        )
        model.save_pretrained(folder)
        _copy_tokenizer(source, folder)
        return str(folder)

    return write


def nf4() -> BitsAndBytesConfig:
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)


def torchao_int8() -> TorchAoConfig:
    return TorchAoConfig(importlib.import_module("torchao.quantization").Int8WeightOnlyConfig())


def write_plain(path: str, folder: Path, **arguments: Any) -> str:
    """A copy of a model with the weights that it has when they are dequantised, in float32."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **arguments)
    dequantize(model)
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    assert "quantization_config" not in config
    return str(folder)


def _write(
    source: str, folder: Path, config: dict[str, Any], quantize: Callable[[torch.Tensor], dict[str, torch.Tensor]]
) -> str:
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(Path(source) / "model.safetensors").items():
        if tensor.dim() == 2 and not any(part in name for part in KEPT_PLAIN):
            path = name.removesuffix("weight")
            tensors |= {f"{path}{key}": stored for key, stored in quantize(tensor).items()}
        else:
            tensors[name] = tensor
    return _save(source, folder, config, tensors)


def _save(source: str, folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> str:
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    plain = json.loads((Path(source) / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**plain, "quantization_config": config}))
    _copy_tokenizer(source, folder)
    assert AutoConfig.from_pretrained(folder).quantization_config
    return str(folder)


def _copy_tokenizer(source: str, folder: Path) -> None:
    for name in TOKENIZER_FILES:
        shutil.copy(Path(source) / name, folder)


Write = Callable[[str, Path], str]
RELEASED: dict[str, tuple[Write, Sequence[str]]] = {
    "nf4": (write_by(nf4), ["bitsandbytes"]),
    "int8": (write_by(lambda: BitsAndBytesConfig(load_in_8bit=True)), ["bitsandbytes"]),
    "torchao": (write_by(torchao_int8), ["torchao"]),
    "int4": (write_int4, ["compressed-tensors"]),
    "fp8": (write_fp8, []),
}
"""By name: how a checkpoint is written, and the packages that it needs."""
MADE = {"nf4": "bitsandbytes", "int8": "bitsandbytes", "fp8": "torchao"}
"""Values of TINKER_LOCAL_QUANTIZATION and the package that each needs."""
