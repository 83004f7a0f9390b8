"""What is said of the models that the hosted service names, beside what the reference package says of them."""

import json
from typing import Any

import pytest
import transformers

from tests.reference.compare import GOLDEN
from tinker_cookbook import hyperparam_utils, model_info
from tinker_cookbook.exceptions import ConfigurationError

RECORDED: dict[str, dict[str, Any]] = json.loads((GOLDEN / "models.json").read_text(encoding="utf-8"))
NOT_KNOWN_HERE = {
    "deepseek-ai/DeepSeek-V4.1-Flash",
    "deepseek-ai/DeepSeek-V4.1-Flash-1017",
    "nvidia/NVIDIA-Nemotron-3.5-Super-VL-120B-A12B-BF16",
}
HERE = sorted(RECORDED.keys() - NOT_KNOWN_HERE)


@pytest.mark.parametrize("name", HERE)
def test_what_the_name_says(name: str) -> None:
    attributes, recorded = model_info.get_model_attributes(name), RECORDED[name]
    assert (attributes.is_chat, attributes.is_vl) == (recorded["is_chat"], recorded["is_vl"])
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


@pytest.mark.parametrize("name", sorted(NOT_KNOWN_HERE))
def test_what_is_not_known_here_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_hub(_: str) -> None:
        raise OSError("the hub cannot be reached")

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", no_hub)
    with pytest.raises(ConfigurationError, match="shapes are not known"):
        hyperparam_utils.get_lr(name)
