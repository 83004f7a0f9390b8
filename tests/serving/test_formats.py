"""Which renderer a served model's chats have, and which one a request chooses."""

import json
from pathlib import Path

import pytest

from tests.renderers.test_all_families import ENTRIES, built_in_names
from tests.server.serving import TINY_CHAT
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.models import families
from tinker_cookbook.renderers import get_renderer
from tinker_cookbook.serving.formats import ServedFormats
from tinker_cookbook.serving.variants import variant
from tinker_cookbook.tokenizer_utils import get_tokenizer


def test_the_default_is_what_recipes_choose() -> None:
    formats = ServedFormats()
    assert formats.name_of(TINY_CHAT, {}) == "qwen3_instruct"
    assert formats.name_of("openai/gpt-oss-20b", {}) == "gpt_oss_no_sysprompt"
    assert formats.name_of("meta-llama/Llama-3.2-1B-Instruct", {}) == "llama3"
    assert formats.name_of("thinkingmachines/Inkling", {}) is None, "no renderer here writes this format"
    assert formats.name_of("somebody/something", {}) is None
    assert formats.make("somebody/something", get_tokenizer(TINY_CHAT), {}) is None


def test_a_checkpoint_has_the_renderer_of_its_training() -> None:
    trained = {"renderer_name": "qwen3_disable_thinking"}
    made = ServedFormats().make(TINY_CHAT, get_tokenizer(TINY_CHAT), trained)
    assert made is not None and made.name == "qwen3_disable_thinking"
    assert (
        made.prompt([{"role": "user", "content": "U"}])
        == get_renderer("qwen3_disable_thinking", get_tokenizer(TINY_CHAT))
        .build_generation_prompt([{"role": "user", "content": "U"}])
        .to_ints()
    )
    for chat, name in (("template", None), ("qwen3", "qwen3")):
        assert ServedFormats(chat).name_of(TINY_CHAT, trained) == name, "the server's own key goes first"


def test_code_that_a_checkpoint_names_is_not_loaded(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("raise AssertionError('loaded')")
    with pytest.raises(ValueError, match="the server loads only if it is started with chat="):
        ServedFormats().make(TINY_CHAT, get_tokenizer(TINY_CHAT), {"renderer_name": f"{file}:Mine"})


def test_a_renderer_of_ones_own_is_named_at_the_start(tmp_path: Path) -> None:
    file = tmp_path / "served_renderer.py"
    file.write_text("from tinker_cookbook.renderers.qwen3 import Qwen3InstructRenderer as Mine\n")
    made = ServedFormats(f"{file}:Mine").make(TINY_CHAT, get_tokenizer(TINY_CHAT), {})
    assert made is not None and made.prompt([{"role": "user", "content": "U"}])
    with pytest.raises(
        ConfigurationError, match="chat='hermes' is unknown; choose renderer, template, or a renderer: "
    ):
        ServedFormats("hermes")
    with pytest.raises(ConfigurationError, match=r"nowhere\.py"):
        ServedFormats(f"{tmp_path}/nowhere.py:Mine")


def test_a_tokenizer_without_the_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="no single id for the special token"):
        ServedFormats("llama3").make(TINY_CHAT, get_tokenizer(TINY_CHAT), {})


@pytest.mark.parametrize(
    ("name", "effort", "options", "chosen"),
    [
        ("qwen3", None, {}, "qwen3"),
        ("qwen3", None, {"enable_thinking": False}, "qwen3_disable_thinking"),
        ("qwen3", "none", {}, "qwen3_disable_thinking"),
        ("qwen3_disable_thinking", None, {"enable_thinking": True}, "qwen3"),
        ("qwen3_disable_thinking", None, {"enable_thinking": False}, "qwen3_disable_thinking"),
        ("qwen3_instruct", None, {"enable_thinking": False}, "qwen3_instruct"),
        ("qwen3_5", None, {"preserve_thinking": True}, "qwen3_5_preserve_thinking"),
        ("qwen3_5_preserve_thinking", None, {"preserve_thinking": False}, "qwen3_5"),
        ("qwen3_5_preserve_thinking", None, {"enable_thinking": True}, "qwen3_5_preserve_thinking"),
        ("qwen3_5", None, {"preserve_thinking": False}, "qwen3_5"),
        ("qwen3_8_xhigh_reasoning", "low", {}, "qwen3_8_low_reasoning"),
        ("qwen3_8_low_reasoning", None, {"enable_thinking": True, "preserve_thinking": True}, "qwen3_8_low_reasoning"),
        ("qwen3_8_disable_thinking", "medium", {"enable_thinking": True}, "qwen3_8_medium_reasoning"),
        ("deepseekv3", None, {"thinking": True}, "deepseekv3_thinking"),
        ("deepseekv4_1", "high", {}, "deepseekv4_1"),
        ("deepseekv4_1", "max", {}, "deepseekv4_1_max_reasoning"),
        ("glm5_3_max_reasoning", None, {"reasoning_effort": "low"}, "glm5_3_low_reasoning"),
        ("kimi_k31_pro_no_reasoning_effort", "high", {}, "kimi_k31_pro_high_reasoning"),
        ("gpt_oss_no_sysprompt", "medium", {"reasoning_effort": "medium"}, "gpt_oss_medium_reasoning"),
        ("nemotron3", "low", {}, "nemotron3_low_thinking"),
    ],
    ids=str,
)
def test_a_request_chooses_a_variant(
    name: str, effort: str | None, options: dict[str, bool | str], chosen: str
) -> None:
    assert variant(name, effort, options, with_tools=False) == chosen


@pytest.mark.parametrize(
    ("name", "effort", "options", "message"),
    [
        (
            "qwen3",
            "low",
            {},
            "reasoning_effort: the renderer 'qwen3' has no variant for reasoning_effort=low; it has enable_",
        ),
        ("qwen3_instruct", None, {"enable_thinking": True}, "'qwen3_instruct' has no variant for enable_thinking=true"),
        (
            "kimi_k2",
            None,
            {"enable_thinking": False},
            "no variant for enable_thinking=false; it has enable_thinking=true",
        ),
        ("gpt_oss_no_sysprompt", "none", {}, "reasoning_effort: .* no variant for enable_thinking=false"),
        ("gpt_oss_no_sysprompt", "minimal", {}, "it has reasoning_effort=low, reasoning_effort=medium"),
        ("glm5_3_max_reasoning", None, {"preserve_thinking": False}, "no variant for preserve_thinking=false"),
        ("qwen3", "huge", {}, "reasoning_effort='huge' is unknown; choose none, minimal"),
        ("qwen3", None, {"enable_thinking": "no"}, "enable_thinking='no' must be true or false"),
        ("qwen3", None, {"add_date": True}, "chat_template_kwargs.add_date is not an option of this model's renderer"),
        ("qwen3_8_low_reasoning", "none", {"enable_thinking": True}, "contradict each other"),
        ("deepseekv4_1", "low", {"reasoning_effort": "max"}, "contradict each other"),
        ("path/mine.py:Mine", None, {"enable_thinking": True}, "'path/mine.py:Mine' has no variant .* no variants"),
    ],
    ids=str,
)
def test_what_there_is_no_renderer_for_is_refused_by_name(
    name: str, effort: str | None, options: dict[str, bool | str], message: str
) -> None:
    if ":" in name:
        options = {"enable_thinking": False}
    with pytest.raises(ValueError, match=message):
        variant(name, effort, options, with_tools=False)


def test_a_request_chooses_only_what_fits_the_model() -> None:
    assert variant("llama3", None, {}, True, families.LLAMA3_1) == "llama3_tools"
    assert variant("llama3", None, {}, False, families.LLAMA3_1) == "llama3"
    assert variant("llama3", None, {}, True, ("llama3",)) == "llama3", "Llama 3.0 was not trained to call tools"
    assert variant("nemotron3", "low", {}, False, (*families.NEMOTRON3, "nemotron3_low_thinking"))
    with pytest.raises(ValueError, match="no variant for reasoning_effort=low"):
        variant("nemotron3", "low", {}, False, families.NEMOTRON3)


@pytest.mark.parametrize("name", ENTRIES)
def test_every_renderer_is_of_a_family_of_variants(name: str) -> None:
    """And where a request turns thinking off, its renderer is one of a model that does not think."""
    assert variant(name, None, {}, with_tools=False) == name
    try:
        off = variant(name, None, {"enable_thinking": False}, with_tools=False)
    except ValueError as error:
        assert "it has" in str(error) and "no variants" not in str(error)
        return
    assert off in built_in_names()
    made = get_renderer(off, ENTRIES[off].tokenizer())
    family = {
        "role_colon",
        "llama3",
        "mistral",
        "mistral_v3",
        "gemma",
        "qwen2_5",
        "qwen3_instruct",
        "qwen3_vl_instruct",
    }
    assert made.disables_thinking or off in family


def test_variants_of_a_family_fit_the_same_models() -> None:
    """What the table of variants puts together, the table of models does too."""
    lists = [set(family.renderers) for family in families.FAMILIES]
    for name in ENTRIES:
        for options in ({"enable_thinking": False}, {"enable_thinking": True}, {"preserve_thinking": True}):
            try:
                other = variant(name, None, options, with_tools=False)
            except ValueError:
                continue
            assert any({name, other} <= names for names in lists) or other == name, (name, other)


def test_a_folder_names_its_renderer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"recommended_renderer": "qwen3"}))
    assert ServedFormats().name_of(str(tmp_path), {}) == "qwen3"
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    assert ServedFormats().name_of(str(tmp_path), {}) == "role_colon", "no chat template: a base model"
