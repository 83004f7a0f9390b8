"""What is said of the models that the hosted service names, beside what the reference package says of them."""

import json
import re
from typing import Any

import pytest
import transformers

from tests.reference.compare import GOLDEN
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.models import hyperparameters as hyperparam_utils
from tinker_cookbook.models import info as model_info

RECORDED: dict[str, dict[str, Any]] = json.loads((GOLDEN / "models.json").read_text(encoding="utf-8"))
HERE = sorted(RECORDED)


@pytest.mark.parametrize("name", HERE)
def test_what_the_name_says(name: str) -> None:
    attributes, recorded = model_info.get_model_attributes(name), RECORDED[name]
    for key in ("is_chat", "is_vl", "is_audio_in"):
        assert getattr(attributes, key) == recorded[key]
    assert attributes.recommended_renderers[0] == recorded["renderers"][0]
    assert set(attributes.recommended_renderers) >= set(recorded["renderers"])


@pytest.mark.parametrize("name", HERE)
def test_learning_rates(name: str) -> None:
    for is_lora, recorded in zip((True, False), RECORDED[name]["learning_rates"], strict=True):
        if recorded is None:
            with pytest.raises(NotImplementedError, match="no learning rate rule"):
                hyperparam_utils.get_lr(name, is_lora)
        else:
            assert hyperparam_utils.get_lr(name, is_lora) == pytest.approx(recorded, rel=1e-12)


@pytest.mark.parametrize("name", HERE)
def test_sizes_of_adapters(name: str) -> None:
    parts = {"mlp": (True, False, False), "attn": (False, True, False), "unembed": (False, False, True)}
    sizes = {part: hyperparam_utils.get_lora_param_count(name, 1, *on) for part, on in parts.items()}
    assert sizes == RECORDED[name]["lora"]
    assert hyperparam_utils.get_lora_param_count(name) == 32 * sum(sizes.values())


def test_the_suffix_of_a_service_is_no_part_of_the_name() -> None:
    for name in ("Qwen/Qwen3-30B-A3B", "nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16"):
        known = hyperparam_utils.get_lora_param_count(name)
        assert hyperparam_utils.get_lora_param_count(f"{name}:peft:262144") == known


@pytest.mark.parametrize("name", HERE)
def test_hidden_sizes(name: str) -> None:
    assert hyperparam_utils.get_hidden_size(f"{name}:peft:262144") == RECORDED[name]["hidden"]


def test_every_model_of_the_tables_is_counted_without_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_hub(_: str) -> None:
        raise OSError("the hub cannot be reached")

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", no_hub)
    tables = [getattr(model_info, name) for name in dir(model_info) if re.fullmatch(r"get_\w+_info", name)]
    names = [f"{found.organization}/{name}" for table in tables for name, found in table().items()]
    assert set(RECORDED) < set(names)
    for name in names:
        assert hyperparam_utils.get_lora_param_count(name, 1) > hyperparam_utils.get_hidden_size(name)
    with pytest.raises(ConfigurationError, match="shapes are unknown"):
        hyperparam_utils.get_lr("nobody/knows-this")


PUBLISHED = {
    "Qwen/Qwen2.5-0.5B": 494_032_768,
    "Qwen/Qwen2.5-Coder-7B-Instruct": 7_615_616_512,
    "Qwen/Qwen2.5-Math-72B": 72_706_203_648,
    "google/gemma-2-9b-it": 9_241_705_984,
    "google/gemma-3-270m": 268_098_176,
    "google/gemma-3-1b-pt": 999_885_952,
    "meta-llama/Meta-Llama-3-8B-Instruct": 8_030_261_248,
    "meta-llama/Llama-3.1-405B": 405_853_388_800,
    "mistralai/Mistral-Nemo-Base-2407": 12_247_782_400,
    "mistralai/Ministral-8B-Instruct-2410": 8_019_808_256,
    "mistralai/Mistral-Small-24B-Instruct-2501": 23_572_403_200,
}
"""Parameters as the model cards and the index files of the weights say."""


@pytest.mark.parametrize(("name", "parameters"), PUBLISHED.items())
def test_shapes_give_the_published_number_of_parameters(name: str, parameters: int) -> None:
    assert hyperparam_utils.get_full_finetune_param_count(name) == parameters
