"""Memory by arithmetic is memory that is allocated: of loaded models, and of large ones on fake tensors."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config

from tests.engine.conftest import write_model
from tests.engine.devices import here
from tests.engine.quantized_models import MADE, WIDE, needs
from tinker_cookbook.models.shapes import shapes_of
from tinker_local_backend import ServiceClient
from tinker_local_backend.engine.model.footprint import footprint, parameter_count, quantized_bytes, weight_bytes
from tinker_local_backend.engine.model.memory_plan import of_card
from tinker_local_backend.engine.model.quantization import VARIABLE
from tinker_local_backend.engine.models import load_model

GIB = 1 << 30


def on_meta(config: Any, dtype: torch.dtype) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


@pytest.fixture
def path(tmp_path: Path) -> str:
    return write_model(Qwen3Config(**WIDE), tmp_path, 3)


def test_plain_weights(path: str) -> None:
    model = load_model(path)
    tensors = {tensor.data_ptr(): tensor for tensor in AutoModelForCausalLM.from_pretrained(path).state_dict().values()}
    arithmetic = on_meta(model.config, model.dtype)
    assert weight_bytes(model.module) == weight_bytes(arithmetic)
    numbers = sum(tensor.numel() for tensor in tensors.values())
    frequencies = sum(b.numel() for b in model.module.buffers())
    assert parameter_count(model.module) == parameter_count(arithmetic) == numbers + frequencies


@pytest.mark.parametrize("name", [pytest.param(name, marks=needs(package)) for name, package in MADE.items()])
def test_quantized_weights(name: str, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, name)
    model = load_model(path)
    arithmetic = on_meta(model.config, model.dtype)
    assert weight_bytes(model.module) == weight_bytes(arithmetic, name) < weight_bytes(arithmetic)
    assert parameter_count(model.module) == parameter_count(arithmetic)
    for linear in model.quantized:
        assert linear.nbytes == quantized_bytes(name, (linear.out_features, linear.in_features))


def qwen3_8b() -> Any:
    shapes = shapes_of("Qwen/Qwen3-8B")
    assert shapes is not None
    return on_meta(AutoConfig.for_model(**shapes), torch.bfloat16)


def test_qwen3_8b_in_nf4_on_a_card_of_24_gib() -> None:
    """Every tensor that is on the card, made as a fake one: packed weights with their scales, the rest in bfloat16."""
    model = qwen3_8b()
    head = model.get_output_embeddings()
    linears = [m for m in model.modules() if isinstance(m, nn.Linear) and m is not head]
    quantized = {id(linear.weight) for linear in linears}
    with FakeTensorMode():
        tensors = [torch.empty(t.shape, dtype=t.dtype) for t in model.parameters() if id(t) not in quantized]
        tensors += [torch.empty(t.shape, dtype=t.dtype) for t in model.buffers()]
        for linear in linears:
            numbers = linear.weight.numel()
            tensors += [torch.empty(numbers // 2, dtype=torch.uint8), torch.empty(numbers // 64, dtype=torch.uint8)]
            tensors += [torch.empty(-(-numbers // 64 // 256)), torch.empty(16), torch.empty(256), torch.empty(1)]
        weights = sum(tensor.nbytes for tensor in tensors)
        assert weights == weight_bytes(model, "nf4")
        assert 5.6 * GIB < weights < 5.8 * GIB
        found = footprint(model, "nf4", rank=32)
        matrices = [
            torch.empty(shape)
            for linear in (*linears, head)
            for shape in ((32, linear.in_features), (linear.out_features, 32))
        ]
        assert found.adapter == sum(matrix.numel() for matrix in matrices)
        plan = of_card(24, found)
        cache = torch.empty(36, 2, plan.kv_tokens, 8, 128, dtype=torch.bfloat16)
        assert cache.nbytes == plan.kv_tokens * found.kv_token <= plan.cache
        total = weights + 4 * sum(matrix.nbytes for matrix in matrices) + cache.nbytes
        assert total + plan.plain_tokens * found.pass_token < 21 * GIB
    assert plan.kv_tokens > 8_000 and plan.longest_tokens > 16_384
    plain = footprint(model, None, rank=32)
    assert 15.2 * GIB < plain.weights < 15.3 * GIB
    assert of_card(24, plain).longest_tokens < plan.longest_tokens / 3
    assert of_card(16, plain).kv_tokens == of_card(16, plain).pass_tokens == 0


@pytest.mark.cpu_promise  # joined layers, on a GPU, keep other tensors
def test_a_loaded_model_has_the_footprint_of_arithmetic(path: str) -> None:
    model = load_model(path)
    found = footprint(on_meta(model.config, model.dtype), None, rank=4, fused=False)
    assert found.kv_token == model.kv_bytes_per_token()
    assert found.pass_token == model.token_bytes().plain
    adapter = model.new_adapter(model.widest_spec(4), 0)
    assert found.adapter == sum(matrix.numel() for matrix in adapter.parameters())


@pytest.mark.parametrize("name", [None, *(pytest.param(name, marks=needs(package)) for name, package in MADE.items())])
def test_a_model_that_is_loaded_tells_once_in_a_line(
    name: str | None, path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if name is not None:
        monkeypatch.setenv(VARIABLE, name)
    with caplog.at_level(logging.INFO), ServiceClient(home=tmp_path / "home") as service:
        for _ in range(2):
            service.create_lora_training_client(path, 4).result()
    (line,) = [record.getMessage() for record in caplog.records if record.getMessage().startswith("model ")]
    formats = {
        None: "plain",
        "nf4": "nf4 (bitsandbytes)",
        "int8": "int8 (bitsandbytes)",
        "fp8": "Float8Tensor (torchao)",
    }
    dtype = str(here().dtype).removeprefix("torch.")
    assert "\n" not in line and line.startswith(f"model {path!r}: qwen3, 283,104 ")
    assert f"parameters in {weight_bytes(load_model(path).module) / 2**20:,.1f} MiB, {formats[name]} weights" in line
    assert (
        f"computed in {dtype} on {here().device}; adapters train attention, MLPs, head; the KV cache has room for"
        in line
    )
