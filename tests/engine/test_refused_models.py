"""A model that the engine would compute wrongly is refused when it is loaded, with the reason and a way out."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BertConfig,
    Gemma3Config,
    Gemma3TextConfig,
    GraniteConfig,
    LlamaConfig,
    MambaConfig,
    Phi3Config,
    PretrainedConfig,
    T5Config,
)

from benchmarks.architecture_configs import make_config
from tests.engine.conftest import SHAPE, write_model
from tests.engine.devices import here
from tests.engine.helpers import params, prompt, random_tokens
from tinker_local_backend import ModelLoadError, RequestError, ServiceClient
from tinker_local_backend.engine.model.base_model import BaseModel
from tinker_local_backend.engine.model.head import HeadWeights
from tinker_local_backend.engine.model.lora import LoraLinear
from tinker_local_backend.engine.model.lora_spec import LoraSpec
from tinker_local_backend.engine.models import adopt_module, load_model

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
}

BY_CONFIG: dict[str, tuple[PretrainedConfig, str]] = {
    "compressed attention": (
        make_config("deepseek_v4"),
        r"\(deepseek_v4\) has layers of type heavily_compressed_attention,",
    ),
    "t5": (T5Config(vocab_size=1536, d_model=32), r"\(t5\) has an encoder \(config\.is_encoder_decoder\)"),
    "no context length": (
        MambaConfig(vocab_size=1536, hidden_size=32),
        r"\(mamba\) states no context length: set max_position_embeddings in its config\.json",
    ),
}
"""refused before any weight is read"""

SMALL: dict[str, Any] = {"vocab_size": 1536, "hidden_size": 32, "num_attention_heads": 4}

BY_TRYING: dict[str, tuple[PretrainedConfig, str]] = {
    "bidirectional gemma": (
        Gemma3TextConfig(**SHAPE, use_bidirectional_attention=True),
        r"\(gemma3_text\) has other logits in the local engine than in transformers",
    ),
    "bert": (
        BertConfig(**SMALL, num_hidden_layers=2, intermediate_size=48, initializer_range=0.2),
        r"\(bert\) has other logits",
    ),
}
"""refused because the logits are not those of transformers"""

BY_TYPE: dict[str, tuple[PretrainedConfig, str]] = {
    "no cache": (make_config("openai-gpt"), r"\(openai-gpt\) keeps no keys"),
    "states in modules": (make_config("recurrent_gemma"), r"\(recurrent_gemma\) keeps the states of one batch"),
    "states in another cache": (make_config("rwkv"), r"\(rwkv\) keeps its states in tensors of another kind"),
    "states that differ in prefill": (make_config("zamba2"), r"\(zamba2\) limits the steps of its states in prefill"),
    "layers behind the decoder": (make_config("modernbert-decoder"), r"\(modernbert-decoder\) has layers between"),
}
"""refused because of what their code does"""


@pytest.mark.parametrize("kind", [*BY_CONFIG, *BY_TYPE])
def test_what_the_config_says_is_refused_before_loading(kind: str, tmp_path: Path) -> None:
    config, message = (BY_CONFIG | BY_TYPE)[kind]
    config.save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match=f"^model '.*' {message}") as refusal:
        load_model(str(tmp_path))
    assert str(tmp_path) in str(refusal.value)
    assert "use a dense Llama- or Qwen-like model, or backend=tinker" in str(refusal.value)


@pytest.mark.filterwarnings("ignore:.*is_decoder.*")
@pytest.mark.parametrize("kind", list(BY_TRYING))
def test_what_the_config_does_not_say_is_found_by_trying(kind: str, tmp_path: Path) -> None:
    config, message = BY_TRYING[kind]
    path = write_model(config, tmp_path, 0)
    with pytest.raises(ModelLoadError, match=f"^model '.*' {message}") as refusal:
        load_model(path)
    assert "use a dense Llama- or Qwen-like model, or backend=tinker" in str(refusal.value)


def test_logits_that_are_changed_behind_the_head_are_found_by_trying(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scale under a name that nothing here knows."""
    path = write_model(GraniteConfig(**SHAPE, logits_scaling=8.0), tmp_path, 0)
    monkeypatch.setattr(
        BaseModel, "head_weights", lambda self, adapter: HeadWeights(self.module.get_output_embeddings().weight)
    )
    with pytest.raises(ModelLoadError, match=r"\(granite\) has other logits"):
        load_model(path)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB"),
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR"),
    ],
    ids=lambda error: f"{type(error).__name__} {str(error)[:11]}",
)
def test_what_a_device_fails_with_is_not_said_of_the_model(
    error: Exception, tied_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> torch.Tensor:
        raise error

    monkeypatch.setattr(BaseModel, "_pass_logits", fails)
    with pytest.raises(type(error)) as raised:
        BaseModel(tied_model, here().device, here().dtype)
    assert raised.value is error


def test_an_unknown_architecture_is_a_model_that_cannot_be_loaded(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "nonesuch"}))
    with pytest.raises(ModelLoadError, match=r"cannot be loaded: .*nonesuch"):
        load_model(str(tmp_path))


def test_a_folder_without_all_weights_is_refused(tmp_path: Path) -> None:
    """transformers itself would go on with random ones."""
    path = write_model(LlamaConfig(**SHAPE), tmp_path, 0)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"has no weights for model\.layers\.1\.mlp\.up_proj\.weight and 0 more"):
        load_model(path)


def test_where_long_sequences_turn_the_positions_of_short_ones_the_context_ends(tmp_path: Path) -> None:
    """longrope has two sets of frequencies and takes one for a whole pass, by its longest sequence."""
    path = write_model(Phi3Config(**SHAPE, rope_parameters=LONGROPE, original_max_position_embeddings=64), tmp_path, 0)
    assert load_model(path).context_length == 64


def test_a_sliding_window_that_the_attention_never_hears_of_ends_the_context(tmp_path: Path) -> None:
    config = LlamaConfig(**SHAPE)
    config.sliding_window = 16  # Llama's attention ignores it
    assert load_model(write_model(config, tmp_path, 0)).context_length == 16


def test_the_refusal_reaches_the_caller_and_the_service_goes_on(
    service: ServiceClient, tied_model: str, tmp_path: Path
) -> None:
    BY_CONFIG["compressed attention"][0].save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match="heavily_compressed_attention"):
        service.create_sampling_client(base_model=str(tmp_path)).result()
    with pytest.raises(ModelLoadError, match="heavily_compressed_attention"):
        service.create_lora_training_client(str(tmp_path), 4).result()
    sampler = service.create_sampling_client(base_model=tied_model).result()
    with pytest.raises(RequestError, match="256"):
        sampler.sample(prompt(random_tokens(250, 0)), 1, params(50)).result()
    assert sampler.sample(prompt(random_tokens(5, 0)), 1, params(2)).result().sequences


def test_a_model_that_lora_would_cover_in_part_is_sampled_from_but_not_trained(tied_model: str) -> None:
    module = AutoModelForCausalLM.from_pretrained(tied_model)
    module.model.layers[1].mlp.register_parameter("mixing", nn.Parameter(torch.zeros(2, 3, 4)))
    model = BaseModel.from_module("in part", module, AutoTokenizer.from_pretrained(tied_model))
    assert model.logits(torch.zeros(1, SHAPE["hidden_size"]), None).shape == (1, model.vocab_size)
    with pytest.raises(ModelLoadError, match=r"has weights that are not linears \(mixing\).*not trained"):
        model.new_adapter(LoraSpec(4), seed=0)


class Halved(nn.Linear):
    """A linear that does something else with its weight, as quantized and ternary ones do."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) / 2


def test_a_special_linear_is_refused_and_not_replaced(tied_model: str) -> None:
    module = AutoModelForCausalLM.from_pretrained(tied_model)
    layer = module.model.layers[1].mlp
    special = Halved(layer.up_proj.in_features, layer.up_proj.out_features, bias=False)
    layer.up_proj = special
    with pytest.raises(ModelLoadError, match="has linears of type Halved, to which this engine cannot add LoRA"):
        adopt_module("halved", module, AutoTokenizer.from_pretrained(tied_model))
    assert layer.up_proj is special


def test_the_engine_is_compared_with_the_model_as_it_came(tied_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what replaces the linears is checked, as the reference is computed before."""
    forward = LoraLinear.forward
    monkeypatch.setattr(LoraLinear, "forward", lambda self, x: forward(self, x) / 2)
    with pytest.raises(ModelLoadError, match="has other logits in the local engine than in transformers"):
        load_model(tied_model)


def test_of_a_multimodal_model_the_text_is_trained_alone(tmp_path: Path) -> None:
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = Gemma3Config(
        text_config={**SHAPE, "model_type": "gemma3_text"},
        vision_config={**vision, "image_size": 28, "patch_size": 14},
        mm_tokens_per_image=1,
    )
    model = load_model(write_model(config, tmp_path, 0))
    names = set(model.new_adapter(LoraSpec(2), 0).a)
    assert "lm_head" in names and len(names) == 1 + 7 * SHAPE["num_hidden_layers"]
    assert all(name == "lm_head" or name.startswith("model.language_model.layers.") for name in names)
