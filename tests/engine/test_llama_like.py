"""The decode step with joined operations gives what the model's own modules give, and is left out where it would not."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaModel

from tests.engine.devices import here
from tests.engine.direct import frozen_adapter
from tests.engine.test_families import write_family
from tinker_local_backend.engine import llama_like
from tinker_local_backend.engine.base_model import BaseModel
from tinker_local_backend.engine.decode_attention import DecodePlan, Table, Tables
from tinker_local_backend.engine.llama_like import LlamaLikeDecoder
from tinker_local_backend.engine.lora import LoraLinear, Spans
from tinker_local_backend.engine.lora_spec import LoraSpec

pytestmark = pytest.mark.skipif(not here().is_reference, reason="the step is for CPUs, and the bounds for float32")

FAMILIES = ["llama-untied", "llama3-rope", "qwen2-window", "qwen3-tied", "mistral-window"]
ROWS, LENGTH = 12, 40


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> BaseModel:
    return BaseModel(write_family(request.param, tmp_path_factory.mktemp("family")))


def hidden_states(model: BaseModel, spans: Spans) -> torch.Tensor:
    """Of one more token for each of several sequences whose keys are random."""
    cache = model.new_cache()
    cache.resize(2 * ROWS)
    generator = torch.Generator().manual_seed(0)
    for layer in cache._layers:
        layer.copy_(torch.randn(layer.shape, generator=generator))
    tables = Tables.of([Table([2 * row, 2 * row + 1]) for row in range(ROWS)], model.heads, model.device)
    plan = DecodePlan(cache, tables, np.arange(ROWS) + LENGTH)
    with torch.inference_mode():
        return model.hidden_states(torch.arange(ROWS) * 7, plan.lengths, plan, spans)


def through_modules(model: BaseModel, spans: Spans, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    with monkeypatch.context() as patch:
        patch.setattr(model, "_decoder", None)
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
    assert model._decoder is not None
    found, expected = hidden_states(model, spans[rows]), through_modules(model, spans[rows], monkeypatch)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    if rows != "none":
        assert not torch.allclose(expected, through_modules(model, [], monkeypatch), atol=1e-3)


@pytest.mark.parametrize("part", ["train_attn", "train_mlp"])
def test_an_adapter_on_some_modules_is_added_there_alone(
    part: str, model: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    off = {"train_attn": False, "train_mlp": False, "train_unembed": False}
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
    assert model._decoder is not None
    for layer in model._decoder._layers:
        for joined in (layer.qkv, layer.gate_up):
            offset = 0
            for part in joined._parts:
                assert part.weight.data_ptr() == joined.weight.data_ptr() + offset and part.weight.is_contiguous()
                assert not part.weight.requires_grad and not part.weight.is_inference()
                offset += part.weight.nbytes


@pytest.mark.parametrize("family", ["gemma-tied", "gemma2-tied", "gemma3-tied"])
def test_other_architectures_decode_through_their_modules(family: str, tmp_path: Path) -> None:
    assert BaseModel(write_family(family, tmp_path))._decoder is None


def test_a_subclass_of_a_known_module_may_compute_something_else(tmp_path: Path) -> None:
    class OtherMLP(LlamaMLP):
        pass

    class OtherModel(LlamaModel):
        pass

    class OtherLinear(LoraLinear):
        pass

    model = BaseModel(write_family("llama-tied", tmp_path))
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
    normalised = llama_like._normalised
    monkeypatch.setattr(llama_like, "_normalised", lambda x, eps: normalised(x, eps) * 1.01)
    with caplog.at_level(logging.WARNING):
        model = BaseModel(write_family("qwen3-tied", tmp_path))
    assert model._decoder is None and "goes through the modules" in caplog.text
