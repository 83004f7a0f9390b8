"""Qwen3.5, Qwen3.8 and Nemotron 3: what the chat templates say where the recordings of the reference say something else, and
tool calls with a tag per parameter."""

import json

import pytest

from tests.renderers.reasoning_families import call
from tests.renderers.synthetic import make_tokenizer
from tinker_cookbook.exceptions import RendererError
from tinker_cookbook.renderers import (
    Message,
    TextPart,
    ThinkingPart,
    ToolCall,
    TrainOnWhat,
    UnparsedToolCall,
    get_renderer,
)
from tinker_cookbook.renderers.qwen3_8 import REASONING_EFFORT_INSTRUCTIONS, Qwen3_8Renderer
from tinker_cookbook.renderers.xml_calls import read_call

USER, NEXT = Message(role="user", content=" Q\n"), Message(role="user", content="N")
CALLING = "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"


def thought(thinking: str, text: str) -> Message:
    parts: list[TextPart | ThinkingPart] = [ThinkingPart(type="thinking", thinking=thinking)]
    return Message(role="assistant", content=[*parts, TextPart(type="text", text=text)])


def prompt_text(name: str, messages: list[Message]) -> str:
    renderer = get_renderer(name, make_tokenizer())
    return str(renderer.tokenizer.decode(renderer.build_generation_prompt(messages).to_ints()))


def example_text(name: str, messages: list[Message]) -> str:
    renderer = get_renderer(name, make_tokenizer())
    return str(renderer.tokenizer.decode(renderer.build_supervised_example(messages)[0].to_ints()))


# Qwen3.5 and Qwen3.8 ----------------------------------------------------------------------------------------------------


def test_qwen3_5_trims_texts_and_opens_the_block() -> None:
    assert prompt_text("qwen3_5", [USER]) == "<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n<think>\n"
    assert prompt_text("qwen3_5_disable_thinking", [USER]).endswith("assistant\n<think>\n\n</think>\n\n")


def test_qwen3_5_keeps_reasoning_within_a_turn_only() -> None:
    calling: Message = {**thought(" hm\n", "t "), "tool_calls": [call()]}
    turn = [USER, calling, Message(role="tool", content="2 "), thought("so", "A")]
    body = f"<think>\nhm\n</think>\n\nt\n\n{CALLING}<|im_end|>\n<|im_start|>user\n<tool_response>\n2\n</tool_response>"
    assert body in prompt_text("qwen3_5", turn[:3])
    later = prompt_text("qwen3_5", [*turn, NEXT])
    assert "hm" not in later
    assert f"assistant\nt\n\n{CALLING}<|im_end|>" in later
    assert later.endswith("assistant\nA<|im_end|>\n<|im_start|>user\nN<|im_end|>\n<|im_start|>assistant\n<think>\n")
    kept = prompt_text("qwen3_5_preserve_thinking", [*turn, NEXT])
    assert body in kept
    assert "<think>\nso\n</think>\n\nA<|im_end|>" in kept


def test_the_block_of_an_earlier_answer_of_the_turn_is_trained_but_for_what_the_prompt_supplies() -> None:
    renderer = get_renderer("qwen3_5", make_tokenizer())
    calling: Message = {**thought("hm", ""), "tool_calls": [call()]}
    turn = [USER, calling, Message(role="tool", content="2"), thought("so", "A")]
    model_input, weights = renderer.build_supervised_example(turn, TrainOnWhat.LAST_ASSISTANT_TURN)
    trained = [token for token, weight in zip(model_input.to_ints(), weights.tolist(), strict=True) if weight]
    written = f"hm\n</think>\n\n{CALLING}<|im_end|>so\n</think>\n\nA<|im_end|>"
    assert renderer.tokenizer.decode(trained) == written


@pytest.mark.parametrize(("effort", "sentence"), REASONING_EFFORT_INSTRUCTIONS.items())
def test_qwen3_8_asks_for_its_effort_first(effort: str, sentence: str) -> None:
    name, system = f"qwen3_8_{effort}_reasoning", Message(role="system", content=" S ")
    opening = f"<|im_start|>system\n{sentence}<|im_end|>\n" if sentence else ""
    assert prompt_text(name, [USER]).startswith(f"{opening}<|im_start|>user\nQ<|im_end|>")
    both = f"{sentence}\n\nS" if sentence else "S"
    assert prompt_text(name, [system, USER]).startswith(f"<|im_start|>system\n{both}<|im_end|>\n<|im_start|>user")
    nothing = Message(role="system", content="\n")
    assert prompt_text(name, [nothing, USER]) == prompt_text(name, [USER])


def test_qwen3_8_knows_three_efforts() -> None:
    with pytest.raises(RendererError, match="reasoning_effort='high' is unknown; choose one of xhigh, medium, low"):
        Qwen3_8Renderer(make_tokenizer(), reasoning_effort="high")


def test_scalars_are_those_of_python_or_of_json() -> None:
    odd = Message(role="assistant", content="", tool_calls=[call("f", '{"t": true, "n": null, "s": "x", "l": [true]}')])
    python = "<parameter=t>\nTrue\n</parameter>\n<parameter=n>\nNone\n</parameter>\n<parameter=s>\nx\n"
    assert python in example_text("qwen3_5", [USER, odd])
    assert python in example_text("nemotron3", [USER, odd])
    assert python.replace("True", "true").replace("None", "null") in example_text("qwen3_8_low_reasoning", [USER, odd])
    assert "<parameter=l>\n[true]\n" in example_text("qwen3_5", [USER, odd])


# Nemotron 3 -------------------------------------------------------------------------------------------------------------


def test_nemotron_always_has_a_system_message_and_trims_no_question() -> None:
    opening = "<|im_start|>system\n<|im_end|>\n<|im_start|>user\n Q\n<|im_end|>\n<|im_start|>assistant\n"
    assert prompt_text("nemotron3", [USER]) == f"{opening}<think>\n"
    assert prompt_text("nemotron3_ultra_disable_thinking", [USER]) == f"{opening}<think></think>"
    assert prompt_text("nemotron3", []) == "<|im_start|>system\n<|im_end|>\n<|im_start|>assistant\n<think>\n"


@pytest.mark.parametrize(
    ("name", "produced", "earlier", "kept"),
    [
        ("nemotron3", "<think>\nhm\n</think>\nA", "<think></think>\nA", "<think>\nhm\n</think>\nA"),
        ("nemotron3_ultra", "<think>\nhm</think>A", "<think></think>A", "<think>\nhm</think>A"),
    ],
)
def test_the_blocks_of_nemotron(name: str, produced: str, earlier: str, kept: str) -> None:
    assert example_text(name, [USER, thought("hm", "A")]).endswith(f"assistant\n{produced}<|im_end|>")
    assert f"assistant\n{earlier}<|im_end|>" in prompt_text(name, [USER, thought("hm", "A"), NEXT])
    assert f"assistant\n{kept}<|im_end|>" in prompt_text(f"{name}_preserve_thinking", [USER, thought("hm", "A"), NEXT])
    plain = [USER, Message(role="assistant", content="A"), NEXT]
    assert "assistant\n<think></think>A<|im_end|>" in prompt_text(name, plain)


@pytest.mark.parametrize(("name", "written"), [("nemotron3", "t"), ("nemotron3_ultra", " t ")])
def test_a_call_of_nemotron_stands_on_lines_of_its_own(name: str, written: str) -> None:
    calling: Message = {**thought("hm", " t "), "tool_calls": [call(), call()]}
    results = [Message(role="tool", content="2"), Message(role="tool", content="3")]
    text = prompt_text(name, [USER, calling, *results, NEXT])
    assert f"<think></think>{written}\n{CALLING}\n{CALLING}\n<|im_end|>" in text
    responses = "<tool_response>\n2\n</tool_response>\n<tool_response>\n3\n</tool_response>\n<|im_end|>"
    assert f"<|im_start|>user\n{responses}\n<|im_start|>user\nN" in text


@pytest.mark.parametrize(
    ("name", "effort"), [("nemotron3_low_thinking", "low"), ("nemotron3_ultra_medium_thinking", "efficient")]
)
def test_the_last_question_asks_for_less(name: str, effort: str) -> None:
    messages = [USER, Message(role="assistant", content="A"), NEXT]
    assert f"user\nN\n\n{{reasoning effort: {effort}}}<|im_end|>" in prompt_text(name, messages)
    assert prompt_text(name, messages).count("reasoning effort") == 1


# Reading calls ----------------------------------------------------------------------------------------------------------


def test_values_are_json_where_they_read_as_json() -> None:
    body = "\n<function=f>\n" + "".join(
        f"<parameter={name}>\n{value}\n</parameter>\n"
        for name, value in {"i": "1", "t": "True", "o": '{"k": null}', "s": "two\nlines", "q": '"1"', "e": ""}.items()
    )
    parsed = read_call(f"{body}</function>\n")
    assert isinstance(parsed, ToolCall)
    expected = {"i": 1, "t": True, "o": {"k": None}, "s": "two\nlines", "q": "1", "e": ""}
    assert (parsed.function.name, json.loads(parsed.function.arguments)) == ("f", expected)


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ("\nf(1)\n", "expected <function=name>"),
        ("\n<function=>\n</function>\n", "expected <function=name>"),
        ("\n<function=f>\nword\n</function>\n", "not 'word'"),
        ("\n<function=f>\n<parameter=a>\n1\n</function>\n", "expected <parameter=name>"),
        (
            "\n<function=f>\n<parameter=a>\n1\n</parameter>\n<parameter=a>\n2\n</parameter>\n</function>\n",
            "'a' is given twice",
        ),
        ('\n<function=f>\n<parameter=a>\n["\\ud800"]\n</parameter>\n</function>\n', "half a character"),
    ],
)
def test_what_is_no_call_says_why(body: str, error: str) -> None:
    parsed = read_call(body)
    assert isinstance(parsed, UnparsedToolCall)
    assert parsed.raw_text == f"<tool_call>{body}</tool_call>"
    assert error in parsed.error


@pytest.mark.parametrize("name", ["qwen3_5", "nemotron3"])
@pytest.mark.parametrize("arguments", ["[1]", "{"])
def test_arguments_must_be_an_object_to_be_written(name: str, arguments: str) -> None:
    message = Message(role="assistant", content="", tool_calls=[call("f", arguments)])
    with pytest.raises(RendererError, match=r"message 1: in its call of 'f' the arguments are no"):
        get_renderer(name, make_tokenizer()).build_supervised_example([USER, message])


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_8_low_reasoning", "nemotron3"])
def test_reasoning_that_would_end_itself_is_refused(name: str) -> None:
    with pytest.raises(RendererError, match="message 1: its reasoning holds '</think>', which would end it"):
        example_text(name, [USER, thought("a</think>b", "A")])
