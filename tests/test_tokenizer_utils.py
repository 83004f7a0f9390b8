"""Where tokenizers come from, and which renderer a model is told to use. No network: registries and folders only."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.renderers.synthetic import HYBRID_TEMPLATE, INSTRUCT_TEMPLATE, make_tokenizer
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.models.info import get_recommended_renderer_name
from tinker_cookbook.tokenizer_utils import (
    _from_hugging_face,
    encode_without_special_tokens,
    get_registered_tokenizer_names,
    get_tokenizer,
    is_tokenizer_registered,
    register_tokenizer,
    unregister_tokenizer,
)

ROOT = Path(__file__).parents[1]


def test_register_use_unregister() -> None:
    made: list[str] = []

    def factory(name: str):
        made.append(name)
        return make_tokenizer()

    register_tokenizer("tests/a", lambda: factory("a"))
    register_tokenizer("tests/b", lambda: factory("b"))
    try:
        assert get_tokenizer("tests/a") is get_tokenizer("tests/a")
        get_tokenizer("tests/b")
        assert made == ["a", "b"]
        assert is_tokenizer_registered("tests/a")
        assert get_registered_tokenizer_names() == ["tests/a", "tests/b"]
        register_tokenizer("tests/a", lambda: factory("new"))
        get_tokenizer("tests/a")
        get_tokenizer("tests/b")
        assert made == ["a", "b", "new"]
    finally:
        assert unregister_tokenizer("tests/a")
        assert unregister_tokenizer("tests/b")
    assert not unregister_tokenizer("tests/a")
    assert not is_tokenizer_registered("tests/a")
    with pytest.raises(ConfigurationError, match="name is empty"):
        register_tokenizer("", make_tokenizer)


@pytest.mark.parametrize("has_copy", [True, False])
def test_gated_models_are_read_from_a_copy_that_is_open(has_copy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def load(name: str) -> object:
        asked.append(name)
        if name.startswith("thinkingmachineslabinc/") and not has_copy:
            raise OSError("not in the cache")
        return name

    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", load)
    copy = "thinkingmachineslabinc/meta-llama-3-instruct-tokenizer"
    for name in ("meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.3-70B-Instruct:peft:x"):
        asked.clear()
        _from_hugging_face.cache_clear()
        own = name.partition(":")[0]
        assert get_tokenizer(name) == (copy if has_copy else own)
        assert asked == ([copy] if has_copy else [copy, own])
    assert get_tokenizer("meta-llama/Llama-2-7b-hf") == "meta-llama/Llama-2-7b-hf"
    _from_hugging_face.cache_clear()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    return tmp_path / "model"


def test_a_folder_is_loaded_once_and_found_by_relative_path(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = get_tokenizer(str(folder))
    text = "hello\n\n<|im_end|>🙂"
    assert tokenizer.encode(text) == make_tokenizer().encode(text)
    monkeypatch.chdir(folder.parent)
    assert get_tokenizer("./model") is tokenizer
    assert get_tokenizer("model") is tokenizer
    assert get_tokenizer(f"{folder}:peft:run-1") is tokenizer
    # The same relative name elsewhere is another folder.
    monkeypatch.chdir(folder)
    with pytest.raises(ConfigurationError, match=r"'\./model': there is no such folder"):
        get_tokenizer("./model")


@pytest.mark.parametrize("name", ["/nowhere/model", "./nowhere", "~/nowhere-at-all", "a/b/c"])
def test_a_missing_folder_says_what_a_name_may_be(name: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        get_tokenizer(name)
    assert f"model_name={name!r}" in str(caught.value)
    assert "Hugging Face hub id such as" in str(caught.value)
    assert "register_tokenizer" in str(caught.value)


def test_a_failed_load_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoTokenizer

    def offline(name: str) -> None:
        raise OSError(f"cannot reach the hub for {name}\nmore")

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", offline)
    with pytest.raises(
        ConfigurationError, match=r"\(cannot reach the hub for org/model\).*Without a network"
    ) as caught:
        get_tokenizer("org/model")
    assert isinstance(caught.value.__cause__, OSError)


def test_importing_the_module_does_not_import_transformers() -> None:
    script = "import sys, tinker_cookbook.tokenizer_utils; print('transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert (done.stdout, done.returncode) == ("False\n", 0), done.stderr


# Recommended renderers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "renderer"),
    [
        ("Qwen/Qwen3-8B", "qwen3"),
        ("Qwen/Qwen3-0.6B", "qwen3"),
        ("Qwen/Qwen3-235B-A22B", "qwen3"),
        ("Qwen/Qwen3-4B-Instruct-2507", "qwen3_instruct"),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", "qwen3_instruct"),
        ("Qwen/Qwen3-8B-Base", "role_colon"),
        ("Qwen/Qwen3-8B-Base:peft:run", "role_colon"),
        ("meta-llama/Llama-3.1-8B", "role_colon"),
        ("meta-llama/Llama-3.1-8B-Instruct", "llama3"),
        ("Qwen/Qwen2.5-7B-Instruct", "qwen2_5"),
    ],
)
def test_hub_families(name: str, renderer: str) -> None:
    assert get_recommended_renderer_name(name) == renderer


@pytest.mark.parametrize(
    "name",
    [
        "Qwen/Qwen3-4B-Thinking-2507",
        "org/unknown",
    ],
)
def test_a_near_relative_is_no_match(name: str) -> None:
    with pytest.raises(ConfigurationError, match=r"Pass renderer_name=, one of role_colon, qwen3"):
        get_recommended_renderer_name(name)


@pytest.mark.parametrize(
    ("template", "renderer"), [(None, "role_colon"), (HYBRID_TEMPLATE, "qwen3"), (INSTRUCT_TEMPLATE, "qwen3_instruct")]
)
@pytest.mark.parametrize("inline", [True, False])
def test_folder_by_its_template(folder: Path, template: str | None, renderer: str, inline: bool) -> None:
    if template and inline:
        edit(folder / "tokenizer_config.json", chat_template=template)
    elif template:
        (folder / "chat_template.jinja").write_text(template)
    assert get_recommended_renderer_name(str(folder)) == renderer


def test_folder_names_its_renderer(folder: Path) -> None:
    edit(folder / "config.json", recommended_renderer="qwen3_disable_thinking")
    assert get_recommended_renderer_name(str(folder)) == "qwen3_disable_thinking"
    edit(folder / "tokenizer_config.json", recommended_renderer="qwen3_instruct")
    assert get_recommended_renderer_name(str(folder)) == "qwen3_instruct"
    edit(folder / "tokenizer_config.json", recommended_renderer="qwen9")
    with pytest.raises(ConfigurationError, match="recommended_renderer 'qwen9' is unknown"):
        get_recommended_renderer_name(str(folder))


def test_folder_of_another_family(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    with pytest.raises(ConfigurationError, match="chat template of model_type 'qwen3'"):
        get_recommended_renderer_name(str(folder))
    (folder / "chat_template.jinja").write_text(INSTRUCT_TEMPLATE)
    edit(folder / "config.json", model_type="llama")
    with pytest.raises(ConfigurationError, match="model_type 'llama'"):
        get_recommended_renderer_name(str(folder))
    edit(folder / "config.json", model_type="qwen3")
    forced = INSTRUCT_TEMPLATE.replace("{{- '<|im_start|>assistant\n' }}", "{{- '<|im_start|>assistant\n<think>\n' }}")
    assert forced != INSTRUCT_TEMPLATE
    (folder / "chat_template.jinja").write_text(forced)
    with pytest.raises(ConfigurationError, match="open a think block"):
        get_recommended_renderer_name(str(folder))
    (folder / "config.json").write_text("{")
    with pytest.raises(ConfigurationError, match=r"config\.json is not valid JSON"):
        get_recommended_renderer_name(str(folder))


def edit(path: Path, **changes: str) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_text_gets_nothing_around_it() -> None:
    tokenizer = make_tokenizer()
    tokenizer.add_bos_token = True
    assert tokenizer.decode(encode_without_special_tokens(tokenizer, "1 + 1")) == "1 + 1"

    class Ordinary:
        def encode_ordinary(self, text: str) -> list[int]:
            return [*text.encode()]

    assert encode_without_special_tokens(Ordinary(), "ab") == [97, 98]
