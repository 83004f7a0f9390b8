"""The joined training pass gives the hidden states and gradients of the model's own modules, and is left out where it would not.

tests/engine/test_families.py compares it with float64 references.
"""

import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.engine.devices import here
from tests.engine.test_families import WINDOW, write_family
from tinker_local_backend.engine import trained_attention, trained_layers, trained_linears, trained_norms
from tinker_local_backend.engine.attention import PackedPlan, Segment
from tinker_local_backend.engine.base_model import BaseModel
from tinker_local_backend.engine.llama_like import JoinedLinear
from tinker_local_backend.engine.lora import Adapter, AdapterRouting, LoraLinear
from tinker_local_backend.engine.lora_spec import LoraSpec
from tinker_local_backend.engine.trained_layers import TrainedLayers

pytestmark = pytest.mark.skipif(not here().is_reference, reason="the pass is for CPUs, and the bounds for float32")

FAMILIES = ["llama-untied", "llama3-rope", "qwen2-window", "qwen3-tied", "mistral-window"]
PREFIX = WINDOW + 3
SEGMENTS = [
    *(Segment(start, start + 5) for start in (0, 5, 10)),
    Segment(15, 15 + 2 * WINDOW),
    Segment(31, 31 + PREFIX),
    Segment(31 + PREFIX, 36 + PREFIX, PREFIX, (31, 31 + PREFIX)),
    Segment(36 + PREFIX, 39 + PREFIX, PREFIX, (31, 31 + PREFIX)),
]
"""Three of one length, one longer than a window, and two that go on from a prefix that is longer too."""


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> BaseModel:
    return BaseModel(write_family(request.param, tmp_path_factory.mktemp("family")))


def trained_adapter(model: BaseModel, spec: LoraSpec, dtype: torch.dtype = torch.float32) -> Adapter:
    """One whose B matrices are not zero."""
    fresh = model.new_adapter(spec, 0)
    generator = torch.Generator().manual_seed(1)
    a = {name: matrix.detach().to(dtype).requires_grad_() for name, matrix in fresh.a.items()}
    b = {
        name: (torch.randn(matrix.shape, generator=generator) * 0.05).to(dtype).requires_grad_()
        for name, matrix in fresh.b.items()
    }
    return Adapter(spec, a, b)


def inputs(segments: list[Segment]) -> tuple[torch.Tensor, torch.Tensor, PackedPlan]:
    positions = torch.cat([torch.arange(s.before, s.before + s.end - s.start) for s in segments])
    return torch.arange(len(positions)) * 7 + 3, positions, PackedPlan(segments)


def hidden_and_gradients(model: BaseModel, adapter: Adapter) -> list[torch.Tensor]:
    with model.routed(adapter):
        hidden, backward = model.training_pass(*inputs(SEGMENTS), adapter)
        gradients = backward(torch.randn(hidden.shape, generator=torch.Generator().manual_seed(2)))
    assert not hidden.requires_grad
    return [hidden, *(gradient for gradient in gradients if gradient is not None)]


def through_modules(model: BaseModel, adapter: Adapter, monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    with monkeypatch.context() as patch:
        patch.setattr(model, "_trained", None)
        return hidden_and_gradients(model, adapter)


def assert_equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert float(other.abs().max()) > 0
        torch.testing.assert_close(one, other, rtol=0, atol=2e-5 * float(other.abs().max()))


@pytest.mark.parametrize("share", [0, 1000], ids=["apart", "merged"])
@pytest.mark.parametrize("trained", ["all", "attention", "MLP", "loaded"])
def test_hidden_states_and_gradients_are_those_of_the_modules(
    trained: str, share: int, model: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the adapter's products beside those of the weights, and with the adapter in a copy of them."""
    assert model._trained is not None
    monkeypatch.setattr(trained_linears, "MERGED_SHARE", share)
    spec = LoraSpec(4, train_attn=trained != "MLP", train_mlp=trained != "attention", train_unembed=False)
    adapter = trained_adapter(model, spec)
    if trained == "loaded":  # by someone who adapts only some of the linears
        for name in [name for name in adapter.a if name.endswith(("k_proj", "gate_proj", "o_proj"))]:
            del adapter.a[name], adapter.b[name]
    assert_equal(hidden_and_gradients(model, adapter), through_modules(model, adapter, monkeypatch))


def test_recomputed_layers_give_the_same_bits(model: BaseModel) -> None:
    adapter = trained_adapter(model, LoraSpec(4, train_unembed=False))
    expected = hidden_and_gradients(model, adapter)
    with model.recompute(True):
        found = hidden_and_gradients(model, adapter)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_a_pass_without_gradients_gives_the_same_bits(model: BaseModel) -> None:
    adapter = trained_adapter(model, LoraSpec(4, train_unembed=False))
    expected, _ = model.training_pass(*inputs(SEGMENTS), adapter)
    with torch.no_grad():
        found = model.hidden_states(*inputs(SEGMENTS), adapter)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("rope_type", ["default", "dynamic"])
def test_rotary_factors_are_kept_for_the_same_positions_where_nothing_else_changes_them(
    rope_type: str, model: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert model._trained is not None
    adapter = trained_adapter(model, LoraSpec(2, train_unembed=False))
    rotary = Counted(model._trained._rotary, rope_type)
    monkeypatch.setattr(model._trained, "_rotary", rotary)
    monkeypatch.setattr(model._trained, "_rotation", None)
    tokens, calls = torch.arange(5), []
    for start in (0, 0, 3, 0):
        model.training_pass(tokens, tokens + start, PackedPlan([Segment(0, 5)]), adapter)
        calls.append(rotary.calls)
    assert calls == ([1, 1, 2, 3] if rope_type == "default" else [1, 2, 3, 4])
    monkeypatch.setattr(trained_layers, "KEPT_ROTATIONS", 0)
    model.training_pass(tokens, tokens + 1, PackedPlan([Segment(0, 5)]), adapter)
    assert model._trained._rotation is None


class Counted:
    """A rotary embedding that counts its calls."""

    def __init__(self, rotary: Any, rope_type: str):
        self._rotary, self.rope_type, self.calls = rotary, rope_type, 0

    def __call__(self, *arguments: Any) -> Any:
        self.calls += 1
        return self._rotary(*arguments)


@pytest.mark.parametrize(("short", "halved"), [(0, 99), (64, 99), (64, 2)], ids=["kernel", "products", "halves"])
def test_all_kinds_of_attention(short: int, halved: int, model: BaseModel, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = trained_adapter(model, LoraSpec(4, train_unembed=False))
    monkeypatch.setattr(trained_attention, "SHORT", short)
    monkeypatch.setattr(trained_attention, "LEAST_HALVED", halved)
    assert_equal(hidden_and_gradients(model, adapter), through_modules(model, adapter, monkeypatch))


def test_small_weights_take_the_adapter_in_where_that_is_less_work() -> None:
    def way(tokens: int, size_in: int, size_out: int, rank: int) -> str:
        linears = [LoraLinear(nn.Linear(size_in, size_out), name, AdapterRouting()) for name in ("gate", "up")]
        a = {linear.name: torch.zeros(rank, size_in) for linear in linears}
        b = {linear.name: torch.zeros(size_out, rank) for linear in linears}
        adapter = Adapter(LoraSpec(rank), a, b)
        return type(trained_linears.trained_linear(JoinedLinear(linears), adapter, tokens)).__name__

    assert way(512, 64, 192, 16) == way(512, 64, 192, 32) == "_Merged"
    assert way(512, 64, 192, 1) == way(8, 64, 192, 16) == way(2048, 512, 1536, 64) == "_Apart"


@pytest.mark.parametrize("family", ["llama-untied", "qwen3-tied"])
def test_gradients_in_float64(family: str, tmp_path: Path) -> None:
    path = write_family(family, tmp_path)
    module = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    model = BaseModel.from_module("double", module, AutoTokenizer.from_pretrained(path))
    assert model._decoder is not None and model._trained is None
    layers = TrainedLayers(model._decoder)
    adapter = trained_adapter(model, LoraSpec(1, train_unembed=False), torch.float64)
    segments = [Segment(0, 2), Segment(2, 4), Segment(4, 6), Segment(6, 7, 2, (4, 6))]
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    projection = drawn(7, module.config.hidden_size)

    def value() -> torch.Tensor:
        return (layers.hidden_states(*inputs(segments), adapter) * projection).sum()

    def value_at(matrix: torch.Tensor, difference: torch.Tensor) -> torch.Tensor:
        before = matrix.clone()
        matrix += difference
        result = value()
        matrix.copy_(before)
        return result

    gradients = layers.training_pass(*inputs(segments), adapter)[1](projection)
    for matrix, gradient in zip(adapter.parameters(), gradients, strict=True):
        assert gradient is not None
        for _ in range(3):
            direction, step = drawn(*matrix.shape), 1e-6
            with torch.no_grad():
                above = float(value_at(matrix, direction * step))
                below = float(value_at(matrix, -direction * step))
            slope = (above - below) / (2 * step)
            assert slope == pytest.approx(float((gradient * direction).sum()), rel=1e-6, abs=1e-8)


@pytest.mark.parametrize("family", ["gemma-tied", "gemma2-tied", "gemma3-tied"])
def test_other_architectures_train_through_their_modules(family: str, tmp_path: Path) -> None:
    assert BaseModel(write_family(family, tmp_path))._trained is None


def test_another_activation_or_dtype_trains_through_the_modules(tmp_path: Path) -> None:
    path = write_family("llama-tied", tmp_path)
    assert BaseModel(path, dtype=torch.bfloat16)._trained is None
    model = BaseModel(path)
    assert model._decoder is not None and model._trained is not None
    model._decoder.parts[2][1].activation = nn.GELU()
    assert trained_layers.checked_layers(model, model._decoder, model._check_sequences()) is None


@pytest.mark.parametrize(("part", "factor"), [("gradient", 1.01), ("gradient", math.nan), ("reciprocal_rms", 1.01)])
def test_a_pass_that_gives_something_else_is_not_used(
    part: str, factor: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also if the hidden states are right, and gradients are NaN."""
    right = getattr(trained_norms, part)
    monkeypatch.setattr(trained_norms, part, lambda *arguments: right(*arguments) * factor)
    with caplog.at_level(logging.WARNING):
        model = BaseModel(write_family("qwen3-tied", tmp_path))
    assert model._trained is None and "trains through the modules" in caplog.text
