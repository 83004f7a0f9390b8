"""Mistral's own rules: where tools and system prompts are written, and how calls are read."""

import json
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.drawn import examples
from tests.renderers.families import TOOLS, family_tokenizer, make
from tests.renderers.synthetic import failure_kind, text
from tinker_cookbook.exceptions import RendererError
from tinker_cookbook.renderers import (
    Message,
    ParseFailureKind,
    ParseTermination,
    StreamingTextDelta,
    ToolCall,
    UnparsedToolCall,
)
from tinker_cookbook.renderers.mistral import parse_tool_calls

ID = "abcDEF123"
VERSIONS = ("mistral", "mistral_v3")
every_version = pytest.mark.parametrize("name", VERSIONS)
USER = Message(role="user", content="U")


def call(arguments: str = "{}", call_id: str | None = ID, name: str = "add") -> ToolCall:
    return ToolCall(id=call_id, function=ToolCall.FunctionBody(name=name, arguments=arguments))


def prompt_text(name: str, messages: list[Message]) -> str:
    return cast(str, family_tokenizer(name).decode(make(name).build_generation_prompt(messages).to_ints()))


def encode(name: str, written: str) -> list[int]:
    return family_tokenizer(name).encode(written, add_special_tokens=False)


@pytest.mark.parametrize(
    ("name", "before_tools", "before_question", "result"),
    [
        ("mistral", "[SYSTEM_PROMPT]S[/SYSTEM_PROMPT]", "", f"{ID}[TOOL_CONTENT]4 é"),
        ("mistral_v3", "", "S\n\n", f'{{"content": "4 é", "call_id": "{ID}"}}'),
    ],
)
def test_a_turn_with_tools(name: str, before_tools: str, before_question: str, result: str) -> None:
    messages = [
        *make(name).create_conversation_prefix_with_tools(TOOLS[1:], "S"),
        USER,
        Message(role="assistant", content="so", tool_calls=[call('{"a":1}'), call()]),
        Message(role="tool", content="4 é", tool_call_id=ID),
    ]
    declared = '[{"type": "function", "function": {"name": "search", "description": "", "parameters": {}}}]'
    calls = (
        f'{{"name": "add", "arguments": {{"a":1}}, "id": "{ID}"}}, {{"name": "add", "arguments": {{}}, "id": "{ID}"}}'
    )
    assert prompt_text(name, messages) == (
        f"<s>{before_tools}[AVAILABLE_TOOLS]{declared}[/AVAILABLE_TOOLS][INST]{before_question}U[/INST]"
        f"so[TOOL_CALLS][{calls}]</s>[TOOL_RESULTS]{result}[/TOOL_RESULTS]"
    )


def test_version_3_writes_a_result_that_is_json_as_json() -> None:
    for content, written in [("4", "4"), ('{"a":[1]}', '{"a": [1]}'), ("1" * 5000, json.dumps("1" * 5000)), ("", '""')]:
        messages = [USER, Message(role="tool", content=content, tool_call_id=ID)]
        assert prompt_text("mistral_v3", messages).endswith(
            f'[TOOL_RESULTS]{{"content": {written}, "call_id": "{ID}"}}[/TOOL_RESULTS]'
        )


def test_a_system_message_may_come_later_in_version_7_only() -> None:
    messages = [USER, Message(role="system", content="S"), USER]
    assert prompt_text("mistral", messages) == "<s>[INST]U[/INST][SYSTEM_PROMPT]S[/SYSTEM_PROMPT][INST]U[/INST]"
    with pytest.raises(RendererError, match="message 1: in this format only the first message can have role 'system'"):
        make("mistral_v3").build_generation_prompt(messages)


# Reading calls -------------------------------------------------------------------------------------------------------


@every_version
@given(
    content=text(),
    calls=st.lists(
        st.builds(
            lambda name, arguments, indent, call_id: call(
                json.dumps(arguments, ensure_ascii=False, indent=indent), call_id, name
            ),
            text(),
            st.dictionaries(text(), st.none() | st.integers() | text() | st.lists(text(), max_size=2), max_size=2),
            st.sampled_from([None, 1]),
            st.text(alphabet="abcXYZ019", min_size=9, max_size=9),
        ),
        min_size=1,
        max_size=3,
    ),
)
@examples(60)
def test_calls_parse_back_as_they_were_spelled(name: str, content: str, calls: list[ToolCall]) -> None:
    renderer, message = make(name), Message(role="assistant", content=content, tool_calls=calls)
    prompt = renderer.build_generation_prompt([USER]).to_ints()
    answer = renderer.build_supervised_example([USER, message])[0].to_ints()[len(prompt) :]
    assert renderer.parse_response(answer) == (message, ParseTermination.STOP_SEQUENCE)
    _, *deltas, last = renderer.parse_response_streaming(answer)
    assert "".join(delta.text for delta in deltas if isinstance(delta, StreamingTextDelta)) == content
    assert last == message


@pytest.mark.parametrize(
    "block",
    [
        f'[ {{"name":"add","arguments":{{"a": 1}},"id":"{ID}"}} ]',
        f'[{{"id": "{ID}", "name": "add", "arguments": {{"a": 1}}}}]',
        f'[{{"name": "\\u0061dd", "arguments": {{"a": 1}}, "id": "{ID}"}}]',
        f'[{{"name": "add", "arguments":  {{"a": 1}}, "id": "{ID}"}}]\n',
    ],
)
def test_another_shape_of_the_same_call(block: str) -> None:
    assert parse_tool_calls(block) == [call('{"a": 1}')]


@every_version
@pytest.mark.parametrize(
    ("block", "error"),
    [
        ("", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        (f"[{'1' * 5000}]", "not valid JSON"),
        ("[]", "expected a JSON array"),
        ('{"name": "add"}', "expected a JSON array"),
        ("[1]", 'string key "name"'),
        (f'[{{"name": 1, "arguments": {{}}, "id": "{ID}"}}]', 'string key "name"'),
        (f'[{{"name": "add", "arguments": "{{}}", "id": "{ID}"}}]', 'key "arguments"'),
        ('[{"name": "add", "arguments": {}}]', 'key "id"'),
        ('[{"name": "add", "arguments": {}, "id": "short"}]', 'key "id"'),
        (f'[{{"name": "add", "arguments": {{}}, "id": "{ID}", "x": 1}}]', "unexpected keys"),
        (f'[{{"name": "\\ud800", "arguments": {{}}, "id": "{ID}"}}]', "not valid text"),
        (f'[{{"name": "add", "arguments": {{"a":"\\ud800"}}, "id":"{ID}"}}]', "not valid text"),
        (f'[{{"name": "add", "arguments": {{}}, "id": "{ID}"}}][TOOL_CALLS]x', "not valid JSON"),
    ],
)
def test_an_unreadable_block_keeps_its_text_and_renders_back(name: str, block: str, error: str) -> None:
    renderer, answer = make(name), encode(name, f"text[TOOL_CALLS]{block}</s>")
    message, termination = renderer.parse_response(answer)
    assert message["content"] == "text"
    assert "tool_calls" not in message
    (bad,) = message.get("unparsed_tool_calls", [])
    assert bad.raw_text == f"[TOOL_CALLS]{block}"
    assert error in bad.error
    assert failure_kind(message, termination) is ParseFailureKind.CONTENT
    prompt = renderer.build_generation_prompt([USER]).to_ints()
    assert renderer.build_supervised_example([USER, message])[0].to_ints() == prompt + answer


def test_a_call_cut_off_is_structural() -> None:
    message, termination = make("mistral").parse_response(encode("mistral", '[TOOL_CALLS][{"name": "add"'))
    assert isinstance(message.get("unparsed_tool_calls", [None])[0], UnparsedToolCall)
    assert failure_kind(message, termination) is ParseFailureKind.STRUCTURAL


# Refusals ------------------------------------------------------------------------------------------------------------


@every_version
def test_what_cannot_be_written(name: str) -> None:
    renderer = make(name)
    prefix = renderer.create_conversation_prefix_with_tools(TOOLS)
    for messages, error in [
        (prefix, "has no user message, and tools are declared just before the last user message"),
        ([*prefix, *prefix, USER], "2 messages have role 'tool_declare'; declare all tools in one"),
        (
            [USER, Message(role="tool", content="4")],
            r"message 1 \(tool\): tool_call_id is None.*nine letters and digits",
        ),
        ([USER, Message(role="tool", content="4", tool_call_id="call_1")], "tool_call_id is 'call_1'"),
        ([USER, Message(role="assistant", content="", tool_calls=[call(call_id=None)])], "id of a tool call is None"),
        ([Message(role="user", content="U", tool_calls=[call()])], "only an assistant message can call tools"),
    ]:
        with pytest.raises(RendererError, match=error):
            renderer.build_generation_prompt(messages)
    with pytest.raises(RendererError, match="tools is empty"):
        renderer.create_conversation_prefix_with_tools([])


def test_version_3_refuses_what_its_one_user_message_cannot_say() -> None:
    with pytest.raises(RendererError, match="no user message, and the system prompt opens the last user message"):
        make("mistral_v3").build_generation_prompt([Message(role="system", content="S")])
    messages = [
        Message(role="system", content="S", trainable=True),
        Message(role="user", content="U", trainable=False),
        Message(role="assistant", content="A", trainable=True),
    ]
    with pytest.raises(RendererError, match="their key 'trainable' differs"):
        make("mistral_v3").build_supervised_example(messages, train_on_what="customized")  # type: ignore[arg-type]


def test_the_given_messages_are_left_as_they_were() -> None:
    messages = [Message(role="system", content="S"), USER, Message(role="assistant", content="A")]
    make("mistral_v3").build_supervised_example(messages)
    assert [message["content"] for message in messages] == ["S", "U", "A"]
