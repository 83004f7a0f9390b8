"""Kimi K2: the default system message, reasoning in history, ids of tool calls, and declarations as TypeScript."""

import pytest

from tests.renderers.reasoning_families import call, kimi_tokenizer
from tinker_cookbook.exceptions import RendererError
from tinker_cookbook.renderers import Message, TextPart, ThinkingPart, ToolSpec, get_renderer
from tinker_cookbook.renderers.kimi_k2_5_tool_declaration_ts import encode_tools_to_typescript_style

USER = Message(role="user", content="Q")
DEFAULT = "<|im_system|>system<|im_middle|>You are Kimi, an AI assistant created by Moonshot AI.<|im_end|>"
ASKED = "<|im_user|>user<|im_middle|>Q<|im_end|>"


def thought(thinking: str, text: str) -> Message:
    parts: list[TextPart | ThinkingPart] = [ThinkingPart(type="thinking", thinking=thinking)]
    return Message(role="assistant", content=[*parts, TextPart(type="text", text=text)])


def prompt_text(name: str, messages: list[Message]) -> str:
    renderer = get_renderer(name, kimi_tokenizer())
    return str(renderer.tokenizer.decode(renderer.build_generation_prompt(messages).to_ints()))


@pytest.mark.parametrize(
    ("name", "block"), [("kimi_k2", ""), ("kimi_k25", "<think>"), ("kimi_k26_disable_thinking", "<think></think>")]
)
def test_prompts_begin_with_a_system_message_and_end_in_the_block(name: str, block: str) -> None:
    ending = f"<|im_assistant|>assistant<|im_middle|>{block}"
    assert prompt_text(name, [USER]) == DEFAULT + ASKED + ending
    assert prompt_text(name, []) == DEFAULT + ending
    own = Message(role="system", content="S")
    assert prompt_text(name, [own, USER]) == f"<|im_system|>system<|im_middle|>S<|im_end|>{ASKED}{ending}"


def test_the_default_comes_after_a_declaration_too() -> None:
    declared = Message(role="tool_declare", content="[]")
    expected = f"<|im_system|>tool_declare<|im_middle|>[]<|im_end|>{DEFAULT}{ASKED}"
    assert prompt_text("kimi_k2", [declared, USER]).startswith(expected)


def test_reasoning_is_kept_until_an_answer_without_a_call() -> None:
    calling: Message = {**thought("hm", ""), "tool_calls": [call().model_copy(update={"id": "functions.add:0"})]}
    result = Message(role="tool", content="2", tool_call_id="functions.add:0", name="add")
    within = prompt_text("kimi_k25", [USER, calling, result])
    section = (
        '<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{"a": 1}'
        "<|tool_call_end|><|tool_calls_section_end|>"
    )
    returned = "<|im_system|>add<|im_middle|>## Return of functions.add:0\n2<|im_end|>"
    assert f"<think>hm</think>{section}<|im_end|>{returned}" in within
    later = [USER, calling, result, thought("so", "A"), USER]
    assert f"<think></think>{section}" in prompt_text("kimi_k25", later)
    assert "<think></think>A<|im_end|>" in prompt_text("kimi_k25", later)
    kept = prompt_text("kimi_k26_preserve_thinking", later)
    assert f"<think>hm</think>{section}" in kept
    assert "<think>so</think>A<|im_end|>" in kept


def test_a_call_without_an_id_gets_the_one_of_its_place() -> None:
    calling = Message(role="assistant", content="", tool_calls=[call(), call("look", "{}")])
    text = prompt_text("kimi_k2", [USER, calling])
    assert "<|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>" in text
    assert "<|tool_call_begin|>functions.look:1<|tool_call_argument_begin|>{}" in text


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ("<|tool_call_begin|>functions.add:0{}<|tool_call_end|>", "between id and arguments is missing"),
        (
            "<|tool_call_begin|>add<|tool_call_argument_begin|>{}<|tool_call_end|>",
            "not of the form functions.NAME:NUMBER",
        ),
        ("<|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>[]<|tool_call_end|>", "not a JSON object"),
        ("<|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{}", "<|tool_call_end|> is missing"),
        ("word", "expected <|tool_call_begin|>"),
    ],
)
def test_a_broken_call_says_why_and_goes_back_into_its_section(body: str, error: str) -> None:
    renderer = get_renderer("kimi_k2", kimi_tokenizer())
    reply = f"<think></think><|tool_calls_section_begin|>{body}<|tool_calls_section_end|><|im_end|>"
    message, termination = renderer.parse_response(renderer.tokenizer.encode(reply, add_special_tokens=False))
    assert termination.is_clean
    (unparsed,) = message.get("unparsed_tool_calls", [])
    assert unparsed.raw_text == body
    assert error in unparsed.error
    assert (
        prompt_text("kimi_k2", [USER, message]).count(f"<|tool_calls_section_begin|>{body}<|tool_calls_section_end|>")
        == 1
    )


def declared(parameters: dict[str, object]) -> str:
    tool = ToolSpec(name="f", description="", parameters=parameters)
    return encode_tools_to_typescript_style([{"type": "function", "function": tool}])


@pytest.mark.parametrize(
    ("parameters", "written"),
    [
        ({}, "type f = (_: {}) => any;"),
        (
            {"properties": {"b": {"type": "null"}, "a": {"type": ["integer", "null"]}}, "required": ["b"]},
            "  b: null,\n  a?: number | null\n",
        ),
        ({"properties": {"a": {"enum": ["x", 1], "description": "D"}}}, '  // D\n  a?: "x" | 1\n'),
        (
            {"properties": {"a": {"type": "string", "pattern": "p", "maxLength": 2}}},
            "  // maxLength: 2, pattern: p\n  a?: string\n",
        ),
        ({"properties": {"a": {"type": "boolean", "default": False}}}, "  // Default: False\n  a?: boolean\n"),
        ({"properties": {"a": {"type": "string", "default": "é"}}}, '  // Default: "é"\n  a?: string\n'),
        (
            {"properties": {"a": {"type": "array", "items": {"type": "number", "minimum": 1}}}},
            "  a?: Array<\n    // minimum: 1\n    number\n  >\n",
        ),
        (
            {"properties": {"a": {"type": "object", "additionalProperties": {"type": "string"}}}},
            "  a?: {\n    [k: string]: string\n  }\n",
        ),
        ({"properties": {"a": True, "b": False, "c": {}}}, "  a?: any,\n  b?: null,\n  c?: any\n"),
        (
            {"properties": {"a": {"$ref": "#/$defs/P"}}, "$defs": {"P": {"type": "object", "description": "A p."}}},
            "// A p.\ninterface P {}\ntype f = (_: {\n  a?: P\n}) => any;",
        ),
        (
            {"properties": {"a": {"$ref": "#"}}},
            "interface parameters {\n  a?: parameters\n}\ntype f = (_: parameters) => any;",
        ),
    ],
)
def test_types(parameters: dict[str, object], written: str) -> None:
    assert written in declared(parameters)


@pytest.mark.parametrize(
    ("schema", "error"),
    [
        ({"description": "D"}, "cannot be declared"),
        ({"$ref": "x.json"}, r"\$ref 'x.json' cannot be followed"),
        (1, "cannot be declared"),
    ],
)
def test_a_schema_that_cannot_be_said(schema: object, error: str) -> None:
    with pytest.raises(RendererError, match=error):
        declared({"properties": {"a": schema}})


def test_a_result_without_an_id_is_written_without() -> None:
    renderer = get_renderer("kimi_k2", kimi_tokenizer())
    asking = [Message(role="user", content="U"), Message(role="tool", content="3", name="add")]
    text = str(renderer.tokenizer.decode(renderer.build_generation_prompt(asking).to_ints()))
    assert "<|im_system|>add<|im_middle|>## Return of \n3<|im_end|>" in text
