"""What a model's name or folder says: attributes, fitting renderers, and a warning for one that does not fit."""

import json
import logging
from pathlib import Path

import pytest
import transformers

from tests.renderers.families import FAMILIES
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.models import info as model_info
from tinker_cookbook.models.info import (
    ModelAttributes,
    get_deepseek_info,
    get_gemma_info,
    get_gpt_oss_info,
    get_llama_info,
    get_mistral_info,
    get_model_attributes,
    get_qwen_info,
    get_recommended_renderer_name,
    get_recommended_renderer_names,
    warn_if_renderer_not_recommended,
)
from tinker_cookbook.renderers import known_renderer_names

EVERY = {
    "meta-llama": get_llama_info(),
    "Qwen": get_qwen_info(),
    "mistralai": get_mistral_info(),
    "google": get_gemma_info(),
    "deepseek-ai": get_deepseek_info(),
    "openai": get_gpt_oss_info(),
}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "meta-llama/Llama-3.2-1B-Instruct",
            ModelAttributes("meta-llama", "3.2", "1B", True, ("llama3", "llama3_tools")),
        ),
        ("meta-llama/Meta-Llama-3-70B", ModelAttributes("meta-llama", "3", "70B", False, ("role_colon",))),
        (
            "Qwen/Qwen3-30B-A3B",
            ModelAttributes("Qwen", "3", "30B-A3B", True, ("qwen3", "qwen3_disable_thinking")),
        ),
        ("Qwen/Qwen2.5-Coder-0.5B-Instruct", ModelAttributes("Qwen", "2.5", "0.5B", True, ("qwen2_5",))),
        ("Qwen/Qwen2.5-Math-7B", ModelAttributes("Qwen", "2.5", "7B", False, ("role_colon",))),
        ("mistralai/Mistral-Nemo-Instruct-2407", ModelAttributes("mistralai", "", "12B", True, ("mistral_v3",))),
        (
            "mistralai/Mistral-Small-3.1-24B-Instruct-2503",
            ModelAttributes("mistralai", "3.1", "24B", True, ("mistral",), is_vl=True),
        ),
        ("google/gemma-3-4b-it", ModelAttributes("google", "3", "4b", True, ("gemma",), is_vl=True)),
        ("google/gemma-3-270m", ModelAttributes("google", "3", "270m", False, ("role_colon",))),
        (
            "deepseek-ai/DeepSeek-V3.1",
            ModelAttributes(
                "deepseek-ai",
                "3.1",
                "671B-A37B",
                True,
                ("deepseekv3", "deepseekv3_disable_thinking", "deepseekv3_thinking"),
            ),
        ),
        ("org/Any-Base", ModelAttributes("org", "", "", False, ("role_colon",))),
    ],
)
def test_attributes(name: str, expected: ModelAttributes) -> None:
    assert get_model_attributes(name) == expected
    assert get_model_attributes(f"{name}:peft:run-1") == expected
    assert get_recommended_renderer_names(name) == list(expected.recommended_renderers)
    assert get_recommended_renderer_name(f"{name}:peft:run-1") == expected.recommended_renderers[0]


@pytest.mark.parametrize("organization", EVERY)
def test_released_models_have_renderers_that_exist(organization: str) -> None:
    models = EVERY[organization]
    assert models
    for name, attributes in models.items():
        assert attributes == get_model_attributes(f"{organization}/{name}")
        assert attributes.organization == organization
        assert attributes.size_str
        assert set(attributes.recommended_renderers) <= set(known_renderer_names())
        assert attributes.is_chat == (attributes.recommended_renderers != ("role_colon",))
    assert any(attributes.is_chat for attributes in models.values())


def test_gpt_oss_goes_without_a_system_message_unless_told() -> None:
    assert get_recommended_renderer_name("openai/gpt-oss-20b") == "gpt_oss_no_sysprompt"
    assert set(get_recommended_renderer_names("openai/gpt-oss-120b")) == {
        name for name in known_renderer_names() if name.startswith("gpt_oss")
    }


@pytest.mark.parametrize(
    "name",
    [
        "Qwen/Qwen2.5-7B-Instruct-1M",
        "Qwen/Qwen2.5-Math-7B-Instruct",
        "Qwen/Qwen2.5-VL-7B-Instruct",
        "Qwen/Qwen2-7B-Instruct",
        "meta-llama/Llama-3.2-11B-Vision-Instruct",
        "meta-llama/Llama-Guard-3-8B",
        "mistralai/Mistral-7B-Instruct-v0.3",
        "mistralai/Mistral-Large-Instruct-2411",
        "mistralai/Mistral-Small-3.2-24B-Instruct-2506",
        "google/gemma-3n-E2B-it",
        "google/gemma-4-4b-it",
        "deepseek-ai/DeepSeek-V3",
        "deepseek-ai/DeepSeek-R1",
        "openai/gpt-oss-safeguard-20b",
    ],
)
def test_a_near_relative_is_no_match(name: str) -> None:
    with pytest.raises(ConfigurationError, match=r"neither a local folder nor in a known family.*Pass renderer_name="):
        get_recommended_renderer_names(name)
    with pytest.raises(ConfigurationError, match="belongs to no family that this library knows"):
        get_model_attributes(name)


# Folders -------------------------------------------------------------------------------------------------------------


def write(folder: Path, model_type: str, template: str) -> str:
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    (folder / "chat_template.jinja").write_text(template)
    return str(folder)


@pytest.mark.parametrize(
    ("model_type", "family"),
    [
        ("qwen2", "qwen2_5"),
        ("llama", "llama3"),
        ("gemma2", "gemma"),
        ("gemma3", "gemma"),
        ("gemma3_text", "gemma"),
        ("mistral", "mistral"),
        ("mistral3", "mistral"),
        ("mistral", "mistral_v3"),
    ],
)
def test_a_folder_by_its_template(tmp_path: Path, model_type: str, family: str) -> None:
    assert get_recommended_renderer_names(write(tmp_path, model_type, FAMILIES[family].template)) == [family]


def test_a_folder_of_gpt_oss(tmp_path: Path) -> None:
    folder = write(tmp_path, "gpt_oss", "{{ '<|start|>assistant<|channel|>final<|message|>' }}")
    assert get_recommended_renderer_name(folder) == "gpt_oss_no_sysprompt"


@pytest.mark.parametrize(
    ("model_type", "family", "written", "instead"),
    [
        ("qwen2", "qwen2_5", "You are Qwen, created by Alibaba Cloud. You", "You"),
        ("qwen2", "qwen2_5", "<|im_end|>", "<think>"),
        ("llama", "llama3", "<|eot_id|>", "<|end|>"),
        ("llama", "llama3", "| trim", "| trim + detailed_thinking"),
        ("gemma3", "gemma", "<end_of_turn>", "<start_function_call>"),
        ("gemma4", "gemma", "", ""),
        ("mistral", "mistral", "[INST]", "[INST] "),
        ("mistral", "mistral", "[TOOL_CALLS]", "[TOOL_CALLS]name[ARGS]"),
        ("mistral", "mistral_v3", "[AVAILABLE_TOOLS]", ""),
        ("mistral", "mistral_v3", "[INST]", "Q: "),
        ("gpt_oss", "llama3", "", ""),
    ],
)
def test_a_template_that_differs_is_no_match(
    tmp_path: Path, model_type: str, family: str, written: str, instead: str
) -> None:
    template = FAMILIES[family].template
    assert written in template
    folder = write(tmp_path, model_type, template.replace(written, instead) if written else template)
    with pytest.raises(ConfigurationError, match=f"chat template of model_type '{model_type}'"):
        get_recommended_renderer_names(folder)


def test_a_folder_has_no_attributes(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"is a local folder.*get_recommended_renderer_names"):
        get_model_attributes(str(tmp_path))


# The warning ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "renderer", "warns"),
    [
        ("Qwen/Qwen3-8B", "qwen3", False),
        ("Qwen/Qwen3-8B", "qwen3_disable_thinking", False),
        ("Qwen/Qwen3-8B", "llama3", True),
        ("meta-llama/Llama-3.1-8B", "llama3", True),
        ("Qwen/Qwen3-8B", None, False),
        ("org/unknown", "llama3", False),
    ],
)
def test_warning(caplog: pytest.LogCaptureFixture, model: str, renderer: str | None, warns: bool) -> None:
    with caplog.at_level(logging.WARNING):
        warn_if_renderer_not_recommended(model, renderer)
    assert bool(caplog.records) == warns
    if warns:
        assert f"renderer_name={renderer!r} is not recommended for model_name={model!r}" in caplog.text


def test_the_context_of_a_folder_is_read_and_that_of_a_hub_name_asked_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3", "max_position_embeddings": 77}')
    assert model_info.get_context_length(str(tmp_path)) == 77
    asked = []

    def refuse(name: str) -> None:
        asked.append(name)
        raise OSError("no such model on the hub")

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", refuse)
    assert [model_info.get_context_length("owner/asked-once") for _ in range(3)] == [None] * 3
    assert asked == ["owner/asked-once"]


@pytest.mark.parametrize(
    ("name", "length"),
    [
        ("Qwen/Qwen3-8B", 40960),
        ("Qwen/Qwen3-8B-Base", 32768),
        ("Qwen/Qwen3-30B-A3B", 40960),
        ("Qwen/Qwen3-4B-Instruct-2507", 262144),
        ("Qwen/Qwen3-VL-30B-A3B-Instruct", 262144),
        ("meta-llama/Meta-Llama-3.1-8B-Instruct:peft:x", 131072),
        ("openai/gpt-oss-20b", 131072),
    ],
)
def test_contexts_of_known_models_are_not_asked_of_the_hub(
    name: str, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_info, "_context_length_of_hub_name", None)
    assert model_info.get_context_length(name) == length
