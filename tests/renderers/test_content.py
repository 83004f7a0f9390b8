"""Reading what a model wrote: thinking, tool calls, and what goes wrong with them."""

import json

import pytest
from PIL import Image

from tests.renderers.synthetic import failure_kind, make_tokenizer
from tinker_cookbook.exceptions import RendererError
from tinker_cookbook.renderers import (
    ImagePart,
    Message,
    ParseFailureKind,
    ParseTermination,
    StreamingMessageHeader,
    StreamingTextDelta,
    StreamingThinkingDelta,
    TextPart,
    ThinkingPart,
    ToolCall,
    UnparsedToolCall,
    classify_parse_failure,
    ensure_list,
    ensure_text,
    format_content_as_string,
    get_renderer,
    get_text_content,
    parse_content_blocks,
    parse_think_blocks,
)
from tinker_cookbook.renderers.content import (
    content_to_jsonable,
    detect_unterminated_tool_block,
    has_thinking,
    message_to_jsonable,
    remove_thinking,
    shown_text,
)
from tinker_cookbook.renderers.decoding import tokens_weights_from_strings_weights
from tinker_cookbook.renderers.replies import parse_response_for_stop_token
from tinker_cookbook.renderers.streaming import ReasoningStreamingParser, StreamingParser

THINK = ThinkingPart(type="thinking", thinking="hm")
TEXT = TextPart(type="text", text="yes")
IMAGE = ImagePart(type="image", image="file.png")


def call(name: str, arguments: str) -> ToolCall:
    return ToolCall(function=ToolCall.FunctionBody(name=name, arguments=arguments))


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", []),
        ("plain", [TextPart(type="text", text="plain")]),
        ("<think>\nhm\n</think>\n\nyes", [THINK, TEXT]),
        ("<think>hm</think>yes", [THINK, TEXT]),
        (
            "<think>\n\nhm\n\n</think>\n\n\nyes",
            [ThinkingPart(type="thinking", thinking="\nhm\n"), TextPart(type="text", text="\nyes")],
        ),
        ("yes<think>hm</think>", [TEXT, THINK]),
        ("<think>hm", [THINK]),
        ("a </think> b", [TextPart(type="text", text="a </think> b")]),
        ("<think>\n\n</think>\n\nyes", [ThinkingPart(type="thinking", thinking=""), TEXT]),
    ],
)
def test_think_blocks(text: str, parts: list[object]) -> None:
    assert parse_think_blocks(text) == parts
    assert parse_content_blocks(text) == (parts, [])


def test_think_blocks_leave_tool_calls_in_the_text() -> None:
    assert parse_think_blocks("<tool_call>\n{}\n</tool_call>") == [
        TextPart(type="text", text="<tool_call>\n{}\n</tool_call>")
    ]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ('\n{"name": "add", "arguments": {"a":1}}\n', call("add", '{"a":1}')),
        ('{"arguments": {"a":1}, "name": "add"}', call("add", '{"a": 1}')),
        ('\n{"name": "a", "arguments": {"x": "}\\n"}}\n', call("a", '{"x": "}\\n"}')),
    ],
)
def test_tool_call(body: str, expected: ToolCall) -> None:
    parts, calls = parse_content_blocks(f"text\n<tool_call>{body}</tool_call>\n")
    assert parts == [TextPart(type="text", text="text")]
    assert calls == [expected]


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ("{", "not valid JSON"),
        ("[]", 'string key "name"'),
        ('{"name": 1, "arguments": {}}', 'string key "name"'),
        ('{"name": "a"}', 'key "arguments"'),
        ('{"name": "a", "arguments": "{}"}', 'key "arguments"'),
        ('{"name": "a", "arguments": {}, "id": 1}', "unexpected keys"),
        ("[" * 100_000, "not valid JSON"),
        (f'{{"name": "a", "arguments": {{"x": {"1" * 5000}}}}}', "not valid JSON"),
        ('{"name": "\\ud800", "arguments": {}}', "not valid text"),
        ('{"arguments": {"x": "\\ud800"}, "name": "a"}', "not valid text"),
    ],
)
def test_unreadable_tool_call_keeps_its_text(body: str, error: str) -> None:
    _, (bad,) = parse_content_blocks(f"<tool_call>{body}</tool_call>")
    assert isinstance(bad, UnparsedToolCall)
    assert bad.raw_text == f"<tool_call>{body}</tool_call>"
    assert error in bad.error


def test_unreadable_and_unclosed_calls_reach_the_message_and_render_back() -> None:
    renderer = get_renderer("qwen3_instruct", make_tokenizer())
    written = '<tool_call>\n{"name": "a", "arguments": {}}\n</tool_call>\n<tool_call>\n{"name'
    tokens = make_tokenizer().encode(written + "<|im_end|>", add_special_tokens=False)
    message, termination = renderer.parse_response(tokens)
    assert message.get("tool_calls") == [call("a", "{}")]
    assert message.get("unparsed_tool_calls") == [
        UnparsedToolCall(raw_text='<tool_call>\n{"name', error="unterminated tool block: </tool_call> is missing")
    ]
    assert termination is ParseTermination.STOP_SEQUENCE
    assert failure_kind(message, termination) is ParseFailureKind.CONTENT
    prompt = renderer.build_generation_prompt([]).to_ints()
    model_input, _ = renderer.build_supervised_example([message])
    assert model_input.to_ints() == prompt + tokens


def test_how_a_response_ended() -> None:
    tokenizer = make_tokenizer()
    renderer = get_renderer("qwen3", tokenizer)
    end = tokenizer.encode("<|im_end|>", add_special_tokens=False)
    for tokens, expected, failure in [
        (end, ParseTermination.STOP_SEQUENCE, None),
        ([], ParseTermination.MALFORMED, ParseFailureKind.STRUCTURAL),
        (end + end, ParseTermination.MALFORMED, ParseFailureKind.STRUCTURAL),
    ]:
        message, termination = renderer.parse_response(tokens)
        assert (termination, failure_kind(message, termination)) == (expected, failure)
    assert ParseTermination.EOS.is_clean
    assert not ParseTermination.EOS.is_stop_sequence
    assert not ParseTermination.MALFORMED.is_clean


def test_truncated_reasoning_is_no_answer() -> None:
    renderer = get_renderer("qwen3", make_tokenizer())
    tokens = make_tokenizer().encode("<think>\nthe answer is 4", add_special_tokens=False)
    message, termination = renderer.parse_response(tokens)
    assert get_text_content(message) == ""
    assert termination is ParseTermination.MALFORMED


def test_content_helpers() -> None:
    assert ensure_list("a") == [TextPart(type="text", text="a")]
    assert ensure_list("") == []
    assert ensure_text([TEXT, TEXT]) == "yesyes"
    with pytest.raises(RendererError, match="parts of type image, thinking"):
        ensure_text([THINK, IMAGE])
    assert get_text_content(Message(role="assistant", content=[THINK, TEXT])) == "yes"
    assert shown_text([THINK, TEXT, IMAGE, TEXT]) == "yes[image]yes"
    assert format_content_as_string([THINK, TEXT, IMAGE]) == "<think>hm</think>\nyes\n<image>file.png</image>"
    drawn = ImagePart(type="image", image=Image.new("L", (3, 2)))
    data = ImagePart(type="image", image="data:image/png;base64," + "A" * 5000)
    shown = format_content_as_string([drawn, data], separator=" ")
    assert shown.startswith("<image>Image(3x2, L)</image> <image>data:image/png;base64,AAA")
    assert shown.endswith("... (5022 characters)</image>") and len(shown) < 120


def test_openai_form() -> None:
    renderer = get_renderer("qwen3", make_tokenizer())
    message = Message(role="assistant", content=[THINK, TEXT], tool_calls=[call("a", "{}")])
    assert renderer.to_openai_message(message) == {
        "role": "assistant",
        "content": "yes",
        "reasoning_content": "hm",
        "tool_calls": [{"type": "function", "function": {"name": "a", "arguments": "{}"}}],
    }
    tool = Message(role="tool", content="4", tool_call_id="c1", name="a")
    assert renderer.to_openai_message(tool) == {"role": "tool", "content": "4", "tool_call_id": "c1", "name": "a"}


@pytest.mark.parametrize(
    ("name", "message", "error"),
    [
        ("qwen3", Message(role="assistant", content=[IMAGE]), "cannot hold image"),
        ("qwen3", Message(role="user", content=[IMAGE]), "text only"),
        ("qwen3", Message(role="user", content="", tool_calls=[call("a", "{}")]), "only an assistant message"),
        ("role_colon", Message(role="assistant", content="", tool_calls=[call("a", "{}")]), "no tool calls"),
        ("role_colon", Message(role="assistant", content=[THINK]), "text only"),
        ("role_colon", Message(role="assistant", content="a\n\nUser: b"), "stop sequence"),
    ],
)
def test_what_a_format_cannot_write(name: str, message: Message, error: str) -> None:
    with pytest.raises(RendererError, match=error):
        get_renderer(name, make_tokenizer()).build_generation_prompt([message])


def test_tools_need_a_format_and_a_declaration() -> None:
    with pytest.raises(RendererError, match="no tool format"):
        get_renderer("role_colon", make_tokenizer()).create_conversation_prefix_with_tools([])
    with pytest.raises(RendererError, match="tools is empty"):
        get_renderer("qwen3", make_tokenizer()).create_conversation_prefix_with_tools([])
    with pytest.raises(RendererError, match="cannot parse a stream"):
        get_renderer("role_colon", make_tokenizer()).parse_response_streaming([1])


def test_a_failure_says_what_is_wrong() -> None:
    message = Message(
        role="assistant", content="", unparsed_tool_calls=[UnparsedToolCall(raw_text="x", error="e" * 20000)]
    )
    assert classify_parse_failure(message, ParseTermination.EOS) == (ParseFailureKind.CONTENT, "e" * 16384)
    kind, detail = classify_parse_failure(message, ParseTermination.MALFORMED) or (None, "")
    assert kind is ParseFailureKind.STRUCTURAL and "did not terminate cleanly" in detail
    assert detect_unterminated_tool_block("a<c>b</c>", "<c>", "</c>") is None
    found = detect_unterminated_tool_block("<c>a</c><c>b", "<c>", "</c>")
    assert found is not None and found.raw_text == "<c>b" and found.error.startswith("unterminated tool block")


def test_messages_as_json() -> None:
    parts = [ThinkingPart(type="thinking", thinking="hm"), TextPart(type="text", text="A")]
    message = Message(role="assistant", content=[*parts], tool_calls=[call("a", "{}")], trainable=True)
    written = json.loads(json.dumps(message_to_jsonable(message)))
    assert (written["content"], written["trainable"]) == (parts, True)
    assert written["tool_calls"][0]["function"] == {"name": "a", "arguments": "{}"}
    assert has_thinking(parts) and not has_thinking(remove_thinking(parts)) and has_thinking("<think>x")
    with pytest.raises(RendererError, match="a part of type 'film' is unknown"):
        content_to_jsonable([{"type": "film"}])  # type: ignore[list-item]


def test_a_stream_of_text_and_reasoning_takes_one_token_at_a_time() -> None:
    tokenizer = make_tokenizer()
    end = tokenizer.eos_token_id
    assert isinstance(end, int)
    reply = [*tokenizer.encode("<think>hm 漢</think>A🙂", add_special_tokens=False), end]
    for kind, text in ((StreamingParser, "<think>hm 漢</think>A🙂"), (ReasoningStreamingParser, "A🙂")):
        parser = kind(tokenizer, end, lambda tokens: parse_response_for_stop_token(tokens, tokenizer, end))
        for _ in range(2):
            header, *deltas, last = [*(delta for token in reply for delta in parser.feed(token)), *parser.finish()]
            assert header == StreamingMessageHeader(role="assistant")
            assert last == Message(role="assistant", content="<think>hm 漢</think>A🙂")
            assert "".join(delta.text for delta in deltas if isinstance(delta, StreamingTextDelta)) == text
            thought = "".join(delta.thinking for delta in deltas if isinstance(delta, StreamingThinkingDelta))
            assert thought == ("hm 漢" if kind is ReasoningStreamingParser else "")
            parser.reset()
    with pytest.raises(RendererError, match="is in the response 2 times"):
        parse_response_for_stop_token([*reply, end], tokenizer, end)


def test_texts_with_weights() -> None:
    tokenizer = make_tokenizer()
    tokens, weights = tokens_weights_from_strings_weights([("hello", 0.0), (" world", 1.0)], tokenizer)
    first, second = (tokenizer.encode(text, add_special_tokens=False) for text in ("hello", " world"))
    assert tokens.tolist() == [*first, *second]
    assert weights.tolist() == [0.0] * len(first) + [1.0] * len(second)
