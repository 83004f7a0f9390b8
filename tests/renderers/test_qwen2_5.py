"""Qwen2.5's own rule: there is always a system prompt. And what its format shares with Qwen3."""

import pytest

from tests.renderers.families import TOOLS, family_tokenizer, make
from tinker_cookbook.exceptions import RendererError
from tinker_cookbook.renderers import ImagePart, Message, ParseTermination, TextPart, ThinkingPart, get_renderer

DEFAULT = "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"


def prompt_text(messages: list[Message]) -> str:
    text = family_tokenizer("qwen2_5").decode(make("qwen2_5").build_generation_prompt(messages).to_ints())
    assert isinstance(text, str)
    return text


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([], DEFAULT + "<|im_start|>assistant\n"),
        (
            [Message(role="user", content="U")],
            DEFAULT + "<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n",
        ),
        (
            [Message(role="system", content="")],
            "<|im_start|>system\n<|im_end|>\n<|im_start|>assistant\n",
        ),
        (
            [Message(role="tool", content="4")],
            DEFAULT + "<|im_start|>user\n<tool_response>\n4\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
        ),
    ],
)
def test_the_default_system_prompt_opens_what_has_none(messages: list[Message], expected: str) -> None:
    assert prompt_text(messages) == expected


def test_tools_go_with_the_default_system_prompt_too() -> None:
    (message,) = make("qwen2_5").create_conversation_prefix_with_tools(TOOLS)
    assert str(message["content"]).startswith(
        "You are Qwen, created by Alibaba Cloud. You are a helpful assistant.\n\n# Tools"
    )
    assert make("qwen2_5").create_conversation_prefix_with_tools(TOOLS, "S") == get_renderer(
        "qwen3_instruct", family_tokenizer("qwen2_5")
    ).create_conversation_prefix_with_tools(TOOLS, "S")


def test_reasoning_passes_through_as_written() -> None:
    answer = family_tokenizer("qwen2_5").encode("<think>\nhm\n</think>\n\nA<|im_end|>", add_special_tokens=False)
    message, termination = make("qwen2_5").parse_response(answer)
    assert message == Message(
        role="assistant",
        content=[ThinkingPart(type="thinking", thinking="hm"), TextPart(type="text", text="A")],
    )
    assert termination is ParseTermination.STOP_SEQUENCE
    history = [Message(role="user", content="U"), message, Message(role="user", content="V")]
    assert "<think>\nhm\n</think>\n\nA<|im_end|>" in prompt_text(history)


def test_media_cannot_be_written() -> None:
    image = ImagePart(type="image", image="file.png")
    with pytest.raises(RendererError, match="message 0: the Qwen format cannot hold image"):
        make("qwen2_5").build_generation_prompt([Message(role="assistant", content=[image])])
