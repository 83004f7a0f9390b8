"""A renderer behind a server's chat: the same prompts as in training, and replies read as there."""

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.drawn import examples
from tests.renderers.reasoning_families import call
from tests.renderers.test_all_families import ENTRIES, make, replies
from tests.renderers.test_control_tokens import control_ids
from tinker_cookbook.renderers import Message, ToolSpec, ensure_list, ensure_text
from tinker_cookbook.renderers.content import text_of, thinking_of
from tinker_cookbook.renderers.gpt_oss import GptOssRenderer
from tinker_cookbook.serving.chat_format import RendererFormat

every_name = pytest.mark.parametrize("name", ENTRIES)
with_tools = pytest.mark.parametrize("name", [name for name, entry in ENTRIES.items() if entry.tools])
ADD = ToolSpec(
    name="add_2",
    description="Adds.",
    parameters={"type": "object", "properties": {"a": {"type": "integer"}, "s": {"type": "string"}}},
)
SEARCH = ToolSpec(name="search", description="", parameters={"type": "object", "properties": {}})
TOOLS = [{"type": "function", "function": {**tool, "strict": True}} for tool in (ADD, SEARCH)]


def format_of(name: str, tools: list[dict[str, Any]] | None = None) -> RendererFormat:
    # As for one model: with tools a request would choose llama3_tools itself, where it fits the model.
    return RendererFormat.of(name, ENTRIES[name].tokenizer(), "m", (name,)).for_request(tools, None, {})


def as_openai(name: str, message: Message) -> dict[str, Any]:
    return make(name).to_openai_message(message)


# Prompts -----------------------------------------------------------------------------------------------------------------


@every_name
@given(data=st.data())
@examples(15)
def test_a_prompt_is_that_of_training(name: str, data: st.DataObject) -> None:
    messages = data.draw(ENTRIES[name].conversations())
    expected = make(name).build_generation_prompt(messages).to_ints() if name != "gemma" else None
    if name != "gemma":  # there the assistant does not follow itself
        assert format_of(name).prompt([as_openai(name, message) for message in messages]) == expected
    asking = messages[:-1]
    expected = make(name).build_generation_prompt(asking).to_ints()
    assert format_of(name).prompt([as_openai(name, message) for message in asking]) == expected


@with_tools
@given(data=st.data())
@examples(15)
def test_a_prompt_with_tools_is_that_of_training(name: str, data: st.DataObject) -> None:
    renderer, messages = make(name), data.draw(ENTRIES[name].conversations())[:-1]
    has_system = messages[0]["role"] == "system"
    system = ensure_text(messages[0]["content"]) if has_system else ""
    opening = renderer.create_conversation_prefix_with_tools([ADD, SEARCH], system)
    expected = renderer.build_generation_prompt([*opening, *messages[has_system:]]).to_ints()
    assert format_of(name, TOOLS).prompt([as_openai(name, message) for message in messages]) == expected


OPENED = re.compile(
    r"role_colon|gpt_oss.*|kimi_k31.*|deepseekv3_thinking|"
    r"(qwen3_5|qwen3_8|nemotron3|kimi_k2[56]|deepseekv4_1|glm5_3).*(?<!disable_thinking)"
)
"""Renderers that cannot tell what a reply is that begins within a message."""


@every_name
def test_a_reply_goes_on_with_the_last_message(name: str) -> None:
    user, begun = Message(role="user", content="U"), Message(role="assistant", content="So")
    history = [as_openai(name, message) for message in (user, begun)]
    example = make(name).build_supervised_example([user, begun])[0].to_ints()
    whole = format_of(name).prompt(history, add_generation_prompt=False)
    assert whole == example
    if not OPENED.fullmatch(name):
        assert format_of(name).prompt(history, False, True) == example[:-1]
        return
    with pytest.raises(ValueError, match=f"continue_final_message: the renderer '{name}' cannot continue"):
        format_of(name).prompt(history, False, True)


@with_tools
@given(data=st.data())
@examples(10)
def test_the_prompt_after_a_reply_is_that_of_training_on_it(name: str, data: st.DataObject) -> None:
    """A client sends back what it was told."""
    messages = data.draw(ENTRIES[name].conversations())
    ends = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    at = data.draw(st.sampled_from(ends))
    before, answer = messages[:at], messages[at]
    renderer, served = make(name), format_of(name, TOOLS)
    asked = renderer.build_generation_prompt(before).length
    said = served.read(renderer.build_supervised_example([*before, answer])[0].to_ints()[asked:])
    history = [as_openai(name, message) for message in before]
    opening = renderer.create_conversation_prefix_with_tools(
        [ADD, SEARCH], ensure_text(before[0]["content"]) if before[0]["role"] == "system" else ""
    )
    rest = before[before[0]["role"] == "system" :]
    later = Message(role="user", content="N")
    expected = renderer.build_generation_prompt([*opening, *rest, answer, later]).to_ints()
    assert served.prompt([*history, said, as_openai(name, later)]) == expected


@with_tools
def test_a_call_that_was_not_read_is_sent_back_as_it_was_written(name: str) -> None:
    renderer, served = make(name), format_of(name, TOOLS)
    user = Message(role="user", content="U")
    asked = renderer.build_generation_prompt([user]).length
    good = call("add_2", '{"a": 1}').model_copy(update={"id": "abcdefgh1"})
    calling = Message(role="assistant", content="", tool_calls=[good])
    reply = renderer.build_supervised_example([user, calling])[0].to_ints()[asked:]
    read = ((reply[:-n], renderer.parse_response(reply[:-n])[0]) for n in range(2, len(reply)))
    cut, parsed = next((cut, parsed) for cut, parsed in read if "unparsed_tool_calls" in parsed)
    said = served.read(cut)
    assert [unparsed["raw_text"] for unparsed in said["unparsed_tool_calls"]] == [
        unparsed.raw_text for unparsed in parsed.get("unparsed_tool_calls", [])
    ]
    assert said["content"].endswith(said["unparsed_tool_calls"][-1]["raw_text"]) and "tool_calls" not in said
    opening = renderer.create_conversation_prefix_with_tools([ADD, SEARCH])
    expected = renderer.build_generation_prompt([*opening, user, parsed, user]).to_ints()
    openai_user = {"role": "user", "content": "U"}
    assert served.prompt([openai_user, said, openai_user]) == expected
    changed = {**said, "content": "other text"}
    plain = {"role": "assistant", "content": "other text"}
    assert served.prompt([openai_user, changed, openai_user]) == served.prompt([openai_user, plain, openai_user])


@with_tools
def test_a_past_call_that_spells_a_control_token_is_content(name: str) -> None:
    spelled = json.dumps({"a": "".join(make(name).control_tokens)}, ensure_ascii=False)
    counts = set()
    for arguments in (spelled, '{"a": "b"}'):
        asking = {"id": "abcdefgh1", "type": "function", "function": {"name": "add_2", "arguments": arguments}}
        history = [
            {"role": "user", "content": "U"},
            {"role": "assistant", "content": None, "tool_calls": [asking]},
            {"role": "tool", "content": "2", "tool_call_id": "abcdefgh1"},
        ]
        tokens = format_of(name, TOOLS).prompt(history)
        counts.add(sum(token in control_ids(name) for token in tokens))
    assert len(counts) == 1


# Replies -----------------------------------------------------------------------------------------------------------------


def check_read(name: str, tokens: list[int]) -> dict[str, Any]:
    """Read a reply, whole and streamed, and compare it with what the renderer reads."""
    served = format_of(name, TOOLS if ENTRIES[name].tools else None)
    message, _ = make(name).parse_response(tokens)
    said = served.read(tokens)
    text, reasoning = text_of(message["content"]), thinking_of(message["content"])
    calls, unparsed = message.get("tool_calls", []), message.get("unparsed_tool_calls", [])
    assert said["content"] == "\n".join(filter(None, [text, *(bad.raw_text for bad in unparsed)]))
    assert said.get("reasoning_content", "") == reasoning
    assert [one.model_dump(exclude_none=True) for one in calls] == said.get("tool_calls", [])
    assert [one.model_dump() for one in unparsed] == said.get("unparsed_tool_calls", [])
    stream = served.stream()
    fed = [stream.feed(tokens[i : i + 2]) for i in range(0, len(tokens), 2)]
    streamed, thought = ("".join(parts) for parts in zip(*fed, strict=True)) if fed else ("", "")
    assert text.startswith(streamed)
    begins_with_text = not any(part["type"] == "thinking" for part in ensure_list(message["content"])[:1])
    if not (ENTRIES[name].provisional and begins_with_text):  # what turned out to be text is no reasoning in the end
        # Blocks that hold line breaks only may count as empty once the message is whole.
        assert reasoning.startswith(thought) or reasoning.replace("\n", "").startswith(thought.replace("\n", ""))
    return said


@every_name
@given(data=st.data())
@examples(15)
def test_a_reply_is_read_as_in_training(name: str, data: st.DataObject) -> None:
    renderer, messages = make(name), data.draw(ENTRIES[name].conversations())
    asked = renderer.build_generation_prompt(messages[:-1]).length
    reply = renderer.build_supervised_example(messages)[0].to_ints()[asked:]
    said = check_read(name, reply)
    # Ended by a token that the format does not know, which the server takes off.
    assert format_of(name).read(reply[:-1], ended=True) == said or name == "role_colon"


@every_name
@given(data=st.data())
@examples(40)
def test_reading_never_raises_and_streams_agree(name: str, data: st.DataObject) -> None:
    reply = data.draw(replies(name))
    said = check_read(name, reply)
    undeclared = format_of(name).read(reply)
    assert "tool_calls" not in undeclared
    told = len(undeclared.get("unparsed_tool_calls", []))
    assert told == len(said.get("tool_calls", [])) + len(said.get("unparsed_tool_calls", []))


def test_a_streamed_message_that_ends_as_a_call_was_not_text() -> None:
    renderer = make("gpt_oss_no_sysprompt")
    assert isinstance(renderer, GptOssRenderer)
    body = renderer.tokenizer.encode("U", add_special_tokens=False)
    said = check_read("gpt_oss_no_sysprompt", [renderer.ids["<|message|>"], *body, renderer.ids["<|call|>"]])
    assert said["unparsed_tool_calls"]


@with_tools
def test_a_call_is_read_and_its_arguments_are_checked(name: str) -> None:
    def read(function: str, arguments: str, tools: list[dict[str, Any]] | None = TOOLS) -> dict[str, Any]:
        renderer, user = make(name), Message(role="user", content="U")
        asking = call(function, arguments).model_copy(update={"id": "abcdefgh1"})
        if name.startswith("kimi_k2"):
            asking = asking.model_copy(update={"id": f"functions.{function}:0"})
        answer = Message(role="assistant", content="", tool_calls=[asking])
        asked = renderer.build_generation_prompt([user]).length
        return format_of(name, tools).read(renderer.build_supervised_example([user, answer])[0].to_ints()[asked:])

    # A text that reads like a number is one where the schema says so, in formats without types too.
    said = read("add_2", '{"a": 1, "s": "12"}')
    assert [json.loads(one["function"]["arguments"]) for one in said["tool_calls"]] == [{"a": 1, "s": "12"}]
    assert said["content"] == "" and said.keys() == {"role", "content", "tool_calls"}
    wrong = read("add_2", '{"a": "x"}')
    assert wrong["tool_argument_errors"] == [{"index": 0, "error": "'a' is \"x\", not of type integer"}]
    assert json.loads(wrong["tool_calls"][0]["function"]["arguments"]) == {"a": "x"}
    assert read("other", "{}")["tool_argument_errors"] == [{"index": 0, "error": "there is no tool 'other'"}]
    undeclared = read("add_2", '{"a": 1}', None)
    assert "tool_calls" not in undeclared
    (told,) = undeclared["unparsed_tool_calls"]
    assert told["error"] == "the request declares no tools" and "add_2" in told["raw_text"]
    assert undeclared["content"] == told["raw_text"] and "</think>" not in told["raw_text"]


# Calls that are made certain ----------------------------------------------------------------------------------------------

JSON_CALLS = re.compile(
    r"qwen3(_vl|_instruct|_disable_thinking|_vl_instruct)?|qwen2_5|llama3_tools|mistral.*|deepseekv3.*|kimi_k2.*"
)


@with_tools
def test_a_forced_call_is_read_as_that_call(name: str) -> None:
    served = format_of(name, TOOLS)
    if not JSON_CALLS.fullmatch(name):
        with pytest.raises(ValueError, match=f"renderer '{name}'"):
            served.forced_call("add_2")
        return
    row = served.forced_call("add_2")
    assert row.count(None) == 1
    slots = {"[A-Za-z0-9]{9}": "abcdefgh1", "[0-9]{1,3}": "12"}
    tokens: list[int] = []
    for piece in row:
        if isinstance(piece, int):
            tokens.append(piece)
            continue
        text = '{"a": 1, "s": "é"}' if piece is None else piece if isinstance(piece, str) else slots[piece.pattern]
        tokens += served.tokenizer.encode(text, add_special_tokens=False)
    said = check_read(name, [*tokens, int(served.stops[0])])
    (made,) = said["tool_calls"]
    assert made["function"] == {"name": "add_2", "arguments": '{"a": 1, "s": "é"}'}
    assert said["content"] == "" and "reasoning_content" not in said


def test_a_name_that_the_format_cannot_write_is_not_forced() -> None:
    with pytest.raises(ValueError, match="does not read back a call of 'say \"hi\"'"):
        format_of("qwen3", TOOLS).forced_call('say "hi"')


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ({}, r"tools\[1\].function.name must be a JSON text"),
        ({"name": "f", "description": 1}, r"tools\[1\].function.description must be a JSON text"),
        ({"name": "f", "parameters": []}, r"tools\[1\].function.parameters must be a JSON object"),
    ],
)
def test_a_tool_without_the_form_of_one_is_refused(function: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        format_of("qwen3", [TOOLS[0], {"type": "function", "function": function}])


def test_a_harmony_reply_is_streamed_message_by_message() -> None:
    """Reasoning and answer as they come, in whole characters; nothing of a call, and nothing behind the end."""
    served = format_of("gpt_oss_low_reasoning", TOOLS)
    channel = "<|channel|>{}<|message|>{}"
    said = channel.format("analysis", "Hm é🙂") + "<|end|><|start|>assistant" + channel.format("final", "So 漢")
    call = "<|end|><|start|>assistant to=functions.add_2" + channel.format("commentary <|constrain|>json", "{}")
    for rest, end in (("", "<|return|>"), (call, "<|call|>")):
        stream, given = served.stream(), []
        for token in served.tokenizer.encode(said + rest + end + said, add_special_tokens=False):
            given.append(stream.feed([token]))
        text, reasoning = ("".join(parts) for parts in zip(*given, strict=True))
        assert (text, reasoning) == ("So 漢", "Hm é🙂")
        assert sum(bool(part) for part, _ in given) > 2 and "\ufffd" not in "".join(text for text, _ in given)
