"""Layers with joined operations give what the model's own modules give, with the same gradients, and are left out where not."""

import logging
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaModel

from tests.engine.devices import here
from tests.engine.direct import frozen_adapter
from tests.engine.test_families import WINDOW, write_family
from tinker_local_backend.engine.model import decoder
from tinker_local_backend.engine.model.attention import PackedPlan, Segment
from tinker_local_backend.engine.model.base_model import BaseModel
from tinker_local_backend.engine.model.decoder import LlamaLikeDecoder
from tinker_local_backend.engine.model.lora import Adapter, LoraLinear, Spans
from tinker_local_backend.engine.model.lora_spec import LoraSpec
from tinker_local_backend.engine.model.paged_attention import DecodePlan, Table, Tables
from tinker_local_backend.engine.models import adopt_module, load_model

pytestmark = pytest.mark.skipif(not here().is_reference, reason="the step is for CPUs, and the bounds for float32")

FAMILIES = ["llama-untied", "llama3-rope", "qwen2-window", "qwen3-tied", "mistral-window"]
ROWS, LENGTH = 12, 40
PREFIX = WINDOW + 3
SEGMENTS = [
    *(Segment(start, start + 5) for start in (0, 5, 10)),
    Segment(15, 15 + 2 * WINDOW),
    Segment(31, 31 + PREFIX),
    Segment(31 + PREFIX, 36 + PREFIX, PREFIX, (31, 31 + PREFIX)),
    Segment(36 + PREFIX, 39 + PREFIX, PREFIX, (31, 31 + PREFIX)),
]
"""Three of one length, one longer than a window, and two that go on from a prefix that is longer too."""
STEP = 1e-6
"""of a difference quotient"""


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> BaseModel:
    return load_model(write_family(request.param, tmp_path_factory.mktemp("family")))


def hidden_states(model: BaseModel, spans: Spans) -> torch.Tensor:
    """Of one more token for each of several sequences whose keys are random."""
    cache = model.new_cache()
    cache.resize(2 * ROWS)
    generator = torch.Generator().manual_seed(0)
    for layer in cache._stored():
        layer.copy_(torch.randn(layer.shape, generator=generator))
    tables = Tables.of([Table([2 * row, 2 * row + 1]) for row in range(ROWS)], model.device)
    plan = DecodePlan(cache, tables, np.arange(ROWS) + LENGTH)
    with torch.inference_mode():
        return model.hidden_states(torch.arange(ROWS) * 7, plan.lengths, plan, spans)


def through_modules(model: BaseModel, spans: Spans, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    with monkeypatch.context() as patch:
        patch.setattr(model, "decoder", None)
        return hidden_states(model, spans)


@pytest.mark.parametrize("rows", ["none", "all", "neighbours", "scattered"])
def test_hidden_states_are_those_of_the_modules(rows: str, model: BaseModel, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (frozen_adapter(model, rank, seed=rank) for rank in (4, 3))
    spans: dict[str, Spans] = {
        "none": [],
        "all": [(slice(None), first)],
        "neighbours": [(slice(0, 5), first), (slice(5, 9), second)],
        "scattered": [(torch.tensor([0, 3, 11]), first), (torch.tensor([1, 4]), second)],
    }
    assert model.decoder is not None
    found, expected = hidden_states(model, spans[rows]), through_modules(model, spans[rows], monkeypatch)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    if rows != "none":
        assert not torch.allclose(expected, through_modules(model, [], monkeypatch), atol=1e-3)


@pytest.mark.parametrize("part", ["train_attn", "train_mlp"])
def test_an_adapter_on_some_modules_is_added_there_alone(
    part: str, model: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    off: dict[str, Any] = {"train_attn": False, "train_mlp": False, "train_unembed": False}
    adapter = model.new_adapter(LoraSpec(4, **{**off, part: True}), 0)
    names = sorted(adapter.a)
    for name in names[:2] if part == "train_attn" else names[:1]:  # as a loaded adapter may be
        del adapter.a[name], adapter.b[name]
    for matrix in adapter.b.values():
        matrix.data.normal_(std=0.1, generator=torch.Generator().manual_seed(1))
    spans: Spans = [(slice(None), adapter)]
    torch.testing.assert_close(
        hidden_states(model, spans), through_modules(model, spans, monkeypatch), rtol=1e-5, atol=1e-5
    )
    # It is being trained, so what was joined before must not be used again.
    for matrix in adapter.a.values():
        matrix.data.mul_(2)
    torch.testing.assert_close(
        hidden_states(model, spans), through_modules(model, spans, monkeypatch), rtol=1e-5, atol=1e-5
    )


def test_weights_are_views_of_the_joined_ones_and_exist_once(model: BaseModel) -> None:
    assert model.decoder is not None
    for layer in model.decoder._layers:
        for joined in (layer.qkv, layer.gate_up):
            offset = 0
            for part in (model.linears[name] for name in joined.sizes):
                assert part.weight.data_ptr() == joined.weight.data_ptr() + offset and part.weight.is_contiguous()
                assert not part.weight.requires_grad and not part.weight.is_inference()
                offset += part.weight.nbytes


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


def packed(segments: list[Segment]) -> tuple[torch.Tensor, torch.Tensor, PackedPlan]:
    positions = torch.cat([torch.arange(s.past, s.past + s.end - s.start) for s in segments])
    return torch.arange(len(positions)) * 7 + 3, positions, PackedPlan(segments)


def hidden_and_gradients(model: BaseModel, adapter: Adapter) -> list[torch.Tensor]:
    with model.routed(adapter):
        hidden, backward = model.training_pass(*packed(SEGMENTS), adapter)
        gradients = backward(torch.randn(hidden.shape, generator=torch.Generator().manual_seed(2)))
    assert not hidden.requires_grad
    return [hidden, *(gradient for gradient in gradients if gradient is not None)]


@pytest.mark.parametrize("trained", ["all", "attention", "MLP", "loaded"])
def test_a_training_pass_is_that_of_the_modules(
    trained: str, model: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert model.decoder is not None
    spec = LoraSpec(4, train_attn=trained != "MLP", train_mlp=trained != "attention", train_unembed=False)
    adapter = trained_adapter(model, spec)
    if trained == "loaded":  # by someone who adapts only some of the linears
        for name in [name for name in adapter.a if name.endswith(("k_proj", "gate_proj", "o_proj"))]:
            del adapter.a[name], adapter.b[name]
    found = hidden_and_gradients(model, adapter)
    with monkeypatch.context() as patch:
        patch.setattr(model, "decoder", None)
        expected = hidden_and_gradients(model, adapter)
    for one, other in zip(found, expected, strict=True):
        assert float(other.abs().max()) > 0
        torch.testing.assert_close(one, other, rtol=0, atol=2e-5 * float(other.abs().max()))


def test_recomputed_layers_give_the_same_bits(model: BaseModel) -> None:
    adapter = trained_adapter(model, LoraSpec(4, train_unembed=False))
    expected = hidden_and_gradients(model, adapter)
    with model.recompute(True):
        found = hidden_and_gradients(model, adapter)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_a_pass_without_gradients_gives_the_same_bits(model: BaseModel) -> None:
    adapter = trained_adapter(model, LoraSpec(4, train_unembed=False))
    expected, _ = model.training_pass(*packed(SEGMENTS), adapter)
    with torch.no_grad():
        found = model.hidden_states(*packed(SEGMENTS), adapter)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("family", ["llama-untied", "qwen3-tied"])
def test_gradients_in_float64(family: str, tmp_path: Path) -> None:
    path = write_family(family, tmp_path)
    module = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    model = adopt_module("double", module, AutoTokenizer.from_pretrained(path))
    assert model.decoder is not None
    adapter = trained_adapter(model, LoraSpec(1, train_unembed=False), torch.float64)
    segments = [Segment(0, 2), Segment(2, 4), Segment(4, 6), Segment(6, 7, 2, (4, 6))]
    generator = torch.Generator().manual_seed(0)
    projection = torch.randn(7, module.config.hidden_size, dtype=torch.float64, generator=generator)

    def value_at(matrix: torch.Tensor, difference: torch.Tensor) -> float:
        before = matrix.clone()
        with torch.no_grad():
            matrix += difference
            result = (model.hidden_states(*packed(segments), adapter) * projection).sum()
            matrix.copy_(before)
        return float(result)

    gradients = model.training_pass(*packed(segments), adapter)[1](projection)
    for matrix, gradient in zip(adapter.parameters(), gradients, strict=True):
        assert gradient is not None
        for _ in range(3):
            direction = torch.randn(matrix.shape, dtype=torch.float64, generator=generator)
            slope = (value_at(matrix, direction * STEP) - value_at(matrix, -direction * STEP)) / (2 * STEP)
            assert slope == pytest.approx(float((gradient * direction).sum()), rel=1e-6, abs=1e-8)


@pytest.mark.parametrize("factor", [1.01, math.nan])
def test_a_packed_pass_that_gives_something_else_is_not_used(
    factor: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also if the step of decoding is right."""
    hidden_states = LlamaLikeDecoder.hidden_states

    def changed(self: LlamaLikeDecoder, tokens: torch.Tensor, positions: torch.Tensor, plan: Any, *rest: Any) -> Any:
        return hidden_states(self, tokens, positions, plan, *rest) * (factor if isinstance(plan, PackedPlan) else 1)

    monkeypatch.setattr(LlamaLikeDecoder, "hidden_states", changed)
    with caplog.at_level(logging.WARNING):
        model = load_model(write_family("qwen3-tied", tmp_path))
    assert model.decoder is None and "runs through the modules" in caplog.text


@pytest.mark.parametrize("family", ["gemma-tied", "gemma2-tied", "gemma3-tied"])
def test_other_architectures_decode_through_their_modules(family: str, tmp_path: Path) -> None:
    assert load_model(write_family(family, tmp_path)).decoder is None


def test_a_subclass_of_a_known_module_may_compute_something_else(tmp_path: Path) -> None:
    class OtherMLP(LlamaMLP):
        pass

    class OtherModel(LlamaModel):
        pass

    class OtherLinear(LoraLinear):
        pass

    model = load_model(write_family("llama-tied", tmp_path))
    windows = [None] * model.config.num_hidden_layers
    assert LlamaLikeDecoder.of(model._body, windows, model._head) is not None
    body: Any = model._body
    layer = body.layers[1]
    for changed, kind in ((layer.mlp, OtherMLP), (model._body, OtherModel), (layer.self_attn.k_proj, OtherLinear)):
        before, changed.__class__ = type(changed), kind
        assert LlamaLikeDecoder.of(model._body, windows, model._head) is None
        changed.__class__ = before


def test_a_step_that_gives_something_else_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rms_norm = decoder._rms_norm
    monkeypatch.setattr(decoder, "_rms_norm", lambda *arguments: rms_norm(*arguments) * 1.01)
    with caplog.at_level(logging.WARNING):
        model = load_model(write_family("qwen3-tied", tmp_path))
    assert model.decoder is None and "runs through the modules" in caplog.text
