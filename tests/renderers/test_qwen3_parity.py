"""Qwen3 renderers write what the chat template writes, token for token, as transformers' own engine renders it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.drawn import examples
from tests.renderers.synthetic import (
    HYBRID_TEMPLATE,
    INSTRUCT_TEMPLATE,
    conversation,
    make_tokenizer,
    template_tokens,
)
from tinker_cookbook.renderers import Message, Renderer, TextPart, ThinkingPart, ToolSpec, TrainOnWhat, get_renderer

NAMES = ("qwen3", "qwen3_disable_thinking", "qwen3_instruct")
TOOL = ToolSpec(name="add", description="Adds: 1 < 2, é", parameters={"type": "object", "properties": {}})


def make(name: str) -> Renderer:
    return get_renderer(name, make_tokenizer(chat_template=template_of(name)))


def template_of(name: str) -> str:
    return INSTRUCT_TEMPLATE if name == "qwen3_instruct" else HYBRID_TEMPLATE


def reference(name: str, messages: list[Message], prompt: bool, tools: list[ToolSpec] | None = None) -> list[int]:
    renderer = make(name)
    options: dict[str, object] = {"enable_thinking": False} if renderer.disables_thinking else {}
    if tools:
        options["tools"] = [{"type": "function", "function": tool} for tool in tools]
    hf_messages = [renderer.to_openai_message(message) for message in messages]
    return template_tokens(make_tokenizer(chat_template=template_of(name)), hf_messages, prompt=prompt, **options)


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
@examples(60)
def test_prompt_and_whole_conversation_equal_the_template(name: str, data: st.DataObject) -> None:
    messages = data.draw(conversation(thinking=name == "qwen3"))
    renderer = make(name)
    assert renderer.build_generation_prompt(messages[:-1]).to_ints() == reference(name, messages[:-1], prompt=True)
    whole, _ = renderer.build_supervised_example(messages, TrainOnWhat.ALL_TOKENS)
    # The template closes every message with a line break; a model stops before it.
    line_break = make_tokenizer().encode("\n", add_special_tokens=False)
    assert whole.to_ints() + line_break == reference(name, messages, prompt=False)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("system_prompt", ["", "Be brief."])
def test_tool_declarations_equal_the_template(name: str, system_prompt: str) -> None:
    user = Message(role="user", content="1+1?")
    renderer = make(name)
    ours = [*renderer.create_conversation_prefix_with_tools([TOOL, TOOL], system_prompt), user]
    plain = [Message(role="system", content=system_prompt), user] if system_prompt else [user]
    expected = reference(name, plain, prompt=True, tools=[TOOL, TOOL])
    assert renderer.build_generation_prompt(ours).to_ints() == expected


@pytest.mark.parametrize("is_history", [True, False])
def test_reasoning_inside_a_string_is_cut_as_the_template_cuts_it(is_history: bool) -> None:
    messages = [
        Message(role="user", content="q"),
        Message(role="assistant", content="<think>\n\nbecause\n\n</think>\n\n\nanswer"),
    ]
    if is_history:
        messages.append(Message(role="user", content="next"))
        prompt = make("qwen3").build_generation_prompt(messages)
        assert prompt.to_ints() == reference("qwen3", messages, prompt=True)
        assert "because" not in text_of_prompt(messages)
    else:
        assert make("qwen3").build_generation_prompt(messages).to_ints() == reference("qwen3", messages, prompt=True)
        assert "because" in text_of_prompt(messages)


def text_of_prompt(messages: list[Message]) -> str:
    text = make_tokenizer().decode(make("qwen3").build_generation_prompt(messages).to_ints())
    assert isinstance(text, str)
    return text


def test_thinking_is_kept_within_a_tool_turn_and_dropped_after_the_next_question() -> None:
    thinking = Message(
        role="assistant",
        content=[ThinkingPart(type="thinking", thinking="because"), TextPart(type="text", text="calling")],
    )
    within = [Message(role="user", content="q"), thinking, Message(role="tool", content="2")]
    assert "because" in text_of_prompt(within)
    wrapped = Message(role="user", content="<tool_response>\n2\n</tool_response>")
    assert "because" in text_of_prompt([*within[:-1], wrapped])
    assert "because" not in text_of_prompt([*within, Message(role="user", content="next")])


@pytest.mark.parametrize(
    ("name", "ending"),
    [
        ("qwen3", "<|im_end|>\n<|im_start|>assistant\n"),
        ("qwen3_disable_thinking", "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"),
        ("qwen3_instruct", "<|im_end|>\n<|im_start|>assistant\n"),
    ],
)
def test_prompt_text(name: str, ending: str) -> None:
    renderer = make(name)
    prompt = renderer.build_generation_prompt([Message(role="user", content="Hi")], prefill="So")
    assert make_tokenizer().decode(prompt.to_ints()) == "<|im_start|>user\nHi" + ending + "So"


def test_line_breaks_around_reasoning_are_those_of_the_template() -> None:
    loose = Message(
        role="assistant",
        content=[ThinkingPart(type="thinking", thinking="\n\nhm\n"), TextPart(type="text", text="\n\nanswer")],
    )
    messages = [Message(role="user", content="q"), loose]
    assert make("qwen3").build_generation_prompt(messages).to_ints() == reference("qwen3", messages, prompt=True)
    assert "<think>\nhm\n</think>\n\nanswer<|im_end|>" in text_of_prompt(messages)
