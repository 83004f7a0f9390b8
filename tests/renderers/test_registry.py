"""Renderers by name: known, unknown, registered by a user; and tokenizers that do not fit."""

import pytest

from tests.renderers.synthetic import make_tokenizer
from tinker_cookbook.exceptions import ConfigurationError, RendererError
from tinker_cookbook.renderers import (
    get_registered_renderer_names,
    get_renderer,
    is_renderer_registered,
    register_renderer,
    unregister_renderer,
)
from tinker_cookbook.renderers.role_colon import RoleColonRenderer


def test_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ConfigurationError, match=r"'qwen9'.*role_colon, qwen3, qwen3_disable_thinking, qwen3_instruct"):
        get_renderer("qwen9", make_tokenizer())


def test_register_use_unregister() -> None:
    received: list[object] = []

    def factory(tokenizer, image_processor):
        received.append(image_processor)
        return RoleColonRenderer(tokenizer)

    register_renderer("mine", factory)
    try:
        assert is_renderer_registered("mine")
        assert get_registered_renderer_names() == ["mine"]
        renderer = get_renderer("mine", make_tokenizer(), image_processor="processor", model_name="m")
        assert received == ["processor"]
        assert (renderer._renderer_name, renderer._model_name, renderer._has_image_processor) == ("mine", "m", True)
    finally:
        assert unregister_renderer("mine")
    assert not unregister_renderer("mine")
    assert not is_renderer_registered("mine")


@pytest.mark.parametrize("name", ["qwen3", ""])
def test_a_name_of_ours_or_none_cannot_be_registered(name: str) -> None:
    with pytest.raises(ConfigurationError, match="choose another"):
        register_renderer(name, lambda tokenizer, _: RoleColonRenderer(tokenizer))


def test_text_renderers_refuse_an_image_processor() -> None:
    with pytest.raises(ConfigurationError, match="reads text only"):
        get_renderer("qwen3", make_tokenizer(), image_processor=object())


@pytest.mark.parametrize("missing", ["<|im_start|>", "<|im_end|>"])
def test_a_tokenizer_without_the_special_tokens_is_refused(missing: str) -> None:
    markers = tuple(t for t in ("<|endoftext|>", "<|im_start|>", "<|im_end|>") if t != missing)
    with pytest.raises(RendererError, match=rf"no single id for the special token '{missing}'".replace("|", r"\|")):
        get_renderer("qwen3", make_tokenizer(markers=markers))
