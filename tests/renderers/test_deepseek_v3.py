"""DeepSeek-V3.1: equal to the chat template, reasoning in its place, tool calls between special tokens."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.drawn import examples
from tests.renderers.reasoning_families import (
    DEEPSEEK,
    DEEPSEEK_END,
    DEEPSEEK_TOKENS,
    call,
    deepseek_tokenizer,
    reference,
)
from tests.renderers.synthetic import conversation, failure_kind, make_tokenizer
from tinker_cookbook.exceptions import RendererError
from tinker_cookbook.renderers import (
    ContentPart,
    ImagePart,
    Message,
    ParseFailureKind,
    ParseTermination,
    StreamingTextDelta,
    StreamingThinkingDelta,
    TextPart,
    ThinkingPart,
    ToolSpec,
    TrainOnWhat,
    UnparsedToolCall,
    ensure_list,
    get_renderer,
    get_text_content,
)

BEGIN, END, CALL, CALL_END, SEP = (
    *(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁sep｜>",
    ),
)
USER = Message(role="user", content="U")
every_mode = pytest.mark.parametrize("mode", DEEPSEEK)


def ids(text: str) -> list[int]:
    return deepseek_tokenizer().encode(text, add_special_tokens=False)


def words(tokens: list[int]) -> str:
    return str(deepseek_tokenizer().decode(tokens))


def drawn(mode: str) -> st.SearchStrategy[list[Message]]:
    return conversation(thinking=mode != "disable_thinking")


def think(reasoning: str) -> ThinkingPart:
    return ThinkingPart(type="thinking", thinking=reasoning)


def say(text: str) -> TextPart:
    return TextPart(type="text", text=text)


def answer(*parts: ContentPart) -> Message:
    return Message(role="assistant", content=[*parts])


# Writing -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["disable_thinking", "thinking"])
@given(data=st.data())
@examples(30)
def test_prompts_equal_the_template(mode: str, data: st.DataObject) -> None:
    messages, renderer = data.draw(drawn(mode)), DEEPSEEK[mode]()
    for end in range(1, len(messages) + 1):
        prompt = renderer.build_generation_prompt(messages[:end]).to_ints()
        assert prompt == reference(renderer, messages[:end], prompt=True)


@given(messages=drawn("disable_thinking"))
@examples(30)
def test_whole_conversations_equal_the_template(messages: list[Message]) -> None:
    renderer = DEEPSEEK["disable_thinking"]()
    whole, _ = renderer.build_supervised_example(messages, TrainOnWhat.ALL_TOKENS)
    assert whole.to_ints() == reference(renderer, messages, prompt=False)


@pytest.mark.parametrize(
    ("mode", "text"),
    [
        ("disable_thinking", "</think>T1<E><｜User｜>U<｜Assistant｜></think>So"),
        ("thinking", "</think>T1<E><｜User｜>U<｜Assistant｜><think>So"),
        ("thinking_kept", "<think></think>T1<E><｜User｜>U<｜Assistant｜><think>So"),
    ],
)
def test_prompt_text(mode: str, text: str) -> None:
    messages = [Message(role="system", content="S"), USER, Message(role="assistant", content="T1"), USER]
    prompt = DEEPSEEK[mode]().build_generation_prompt(messages, prefill="So")
    opening = "<｜begin▁of▁sentence｜>S<｜User｜>U<｜Assistant｜>"
    assert words(prompt.to_ints()) == opening + text.replace("<E>", DEEPSEEK_END)


def test_reasoning_of_a_tool_turn_as_each_mode_writes_it() -> None:
    calling = answer(think("r1"), say("t1"))
    calling["tool_calls"] = [call(), call("sub", "{}")]
    messages = [USER, calling, Message(role="tool", content="2"), answer(think("r2"), say("t2"))]
    opening = "<｜begin▁of▁sentence｜><｜User｜>U<｜Assistant｜>"
    calls = f'{BEGIN}{CALL}add{SEP}{{"a": 1}}{CALL_END}{CALL}sub{SEP}{{}}{CALL_END}{END}{DEEPSEEK_END}'
    result = "<｜tool▁output▁begin｜>2<｜tool▁output▁end｜>"
    for mode, first in (("thinking", "</think>t1"), ("thinking_kept", "<think>r1</think>t1")):
        model_input, _ = DEEPSEEK[mode]().build_supervised_example(messages)
        ending = f"{result}<think>r2</think>t2{DEEPSEEK_END}"
        assert words(model_input.to_ints()) == opening + first + calls + ending


def test_reasoning_inside_a_string_is_cut_as_the_template_cuts_it() -> None:
    messages = [USER, Message(role="assistant", content="<think>because</think>A</think>")]
    renderer = DEEPSEEK["thinking"]()
    prompt = renderer.build_generation_prompt([*messages, USER]).to_ints()
    assert prompt == reference(renderer, [*messages, USER], prompt=True)
    assert "because" not in words(prompt)
    model_input, _ = renderer.build_supervised_example(messages)
    assert words(model_input.to_ints()).endswith(f"<think>because</think>A</think>{DEEPSEEK_END}")


def test_tool_declarations() -> None:
    tools = [
        ToolSpec(name="add", description="Adds: é", parameters={"type": "object", "properties": {}}),
        ToolSpec(name="find", description="", parameters={}),
    ]
    renderer = DEEPSEEK["disable_thinking"]()
    (message,) = renderer.create_conversation_prefix_with_tools(tools, "Be brief.")
    text = get_text_content(message)
    assert message["role"] == "system"
    assert text.startswith(
        "Be brief.\n\n## Tools\nYou have access to the following tools:\n\n"
        '### add\nDescription: Adds: é\n\nParameters: {"type": "object", "properties": {}}\n\n'
        "### find\nDescription: \n\nParameters: {}\n\nIMPORTANT: ALWAYS adhere"
    )
    shown = f"{CALL}tool_call_name{SEP}tool_call_arguments{CALL_END}"
    assert f"\n{BEGIN}{shown}{{additional_tool_calls}}{END}\n\nWhere:\n- `tool_call_name` must" in text
    assert text.endswith("chain them directly without separators or spaces")
    assert get_text_content(renderer.create_conversation_prefix_with_tools(tools)[0]).startswith("\n\n## Tools\n")
    with pytest.raises(RendererError, match="tools is empty"):
        renderer.create_conversation_prefix_with_tools([])


# Prompt, answer, history ---------------------------------------------------------------------------------------------


@every_mode
@given(data=st.data())
@examples(30)
def test_example_is_prompt_plus_answer_and_the_answer_parses_back(mode: str, data: st.DataObject) -> None:
    renderer, messages = DEEPSEEK[mode](), data.draw(drawn(mode))
    messages = messages[
        : data.draw(st.sampled_from([i + 1 for i, m in enumerate(messages) if m["role"] == "assistant"]))
    ]
    model_input, weights = renderer.build_supervised_example(messages)
    tokens, prompt = model_input.to_ints(), renderer.build_generation_prompt(messages[:-1]).to_ints()
    assert tokens[: len(prompt)] == prompt
    assert weights.dtype == torch.float32
    assert weights.tolist() == [0.0] * len(prompt) + [1.0] * (len(tokens) - len(prompt))
    assert [tokens[-1]] == renderer.get_stop_sequences() == ids(DEEPSEEK_END)
    reply = tokens[len(prompt) :]
    assert renderer.parse_response(reply) == (messages[-1], ParseTermination.STOP_SEQUENCE)
    cut_off, termination = renderer.parse_response(reply[:-1])
    assert termination is ParseTermination.MALFORMED
    assert cut_off.get("tool_calls") == messages[-1].get("tool_calls")


@every_mode
@given(data=st.data())
@examples(20)
def test_extension_property_where_claimed(mode: str, data: st.DataObject) -> None:
    renderer, messages = DEEPSEEK[mode](), data.draw(drawn(mode))
    assert renderer.has_extension_property == (mode != "thinking")
    if not renderer.has_extension_property:
        return
    assert len(renderer.build_supervised_examples(messages, TrainOnWhat.ALL_ASSISTANT_MESSAGES)) == 1
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    for i, j in zip(answers, [*answers[1:], len(messages)], strict=True):
        so_far = renderer.build_supervised_example(messages[: i + 1])[0].to_ints()
        assert renderer.build_generation_prompt(messages[:j]).to_ints()[: len(so_far)] == so_far


def test_no_extension_where_reasoning_is_forgotten() -> None:
    messages = [USER, answer(think("because"), say("A")), USER, answer(think("so"), say("B"))]
    renderer = DEEPSEEK["thinking"]()
    so_far = renderer.build_supervised_example(messages[:2])[0].to_ints()
    assert renderer.build_generation_prompt(messages[:3]).to_ints()[: len(so_far)] != so_far
    examples = renderer.build_supervised_examples(messages, TrainOnWhat.ALL_ASSISTANT_MESSAGES)
    trained = [words([t for t, w in zip(m.to_ints(), ws.tolist(), strict=True) if w]) for m, ws in examples]
    assert trained == [f"because</think>A{DEEPSEEK_END}", f"so</think>B{DEEPSEEK_END}"]


def test_a_prompt_for_another_role_treats_the_answer_as_history() -> None:
    messages = [USER, answer(think("because"), say("A"))]
    prompt = DEEPSEEK["thinking"]().build_generation_prompt(messages, role="user")
    assert words(prompt.to_ints()).endswith(f"<｜Assistant｜></think>A{DEEPSEEK_END}<｜User｜>")


def test_every_selection() -> None:
    messages = [
        Message(role="system", content="S"),
        Message(role="user", content="U1"),
        Message(role="assistant", content="A1"),
        Message(role="user", content="U2"),
        Message(role="assistant", content="A2"),
        Message(role="tool", content="T"),
        Message(role="assistant", content="A3"),
    ]
    a1, a2, a3 = (f"A{i}{DEEPSEEK_END}" for i in (1, 2, 3))
    expected = {
        TrainOnWhat.LAST_ASSISTANT_MESSAGE: [a3],
        TrainOnWhat.LAST_ASSISTANT_TURN: [a2, a3],
        TrainOnWhat.ALL_ASSISTANT_MESSAGES: [a1, a2, a3],
        TrainOnWhat.ALL_USER_AND_SYSTEM_MESSAGES: ["S", "U1", "U2"],
        TrainOnWhat.ALL_MESSAGES: ["S", "U1", a1, "U2", a2, f"T<｜tool▁output▁end｜>{a3}"],
    }
    assert {selection: trained(messages, selection) for selection in expected} == expected
    assert len(trained(messages, TrainOnWhat.ALL_TOKENS)) == 1
    chosen = [Message(role=m["role"], content=m["content"], trainable=i == 2) for i, m in enumerate(messages)]
    assert trained(chosen, TrainOnWhat.CUSTOMIZED) == [a1]
    assert {*expected, TrainOnWhat.ALL_TOKENS, TrainOnWhat.CUSTOMIZED} == set(TrainOnWhat)


def trained(messages: list[Message], selection: TrainOnWhat) -> list[str]:
    """The runs of weight 1, as text."""
    model_input, weights = DEEPSEEK["disable_thinking"]().build_supervised_example(messages, selection)
    tokens, runs, previous = model_input.to_ints(), [], 0.0
    for token, weight in zip(tokens, weights.tolist(), strict=True):
        if weight and not previous:
            runs.append([])
        if weight:
            runs[-1].append(token)
        previous = weight
    assert selection is not TrainOnWhat.ALL_TOKENS or runs == [tokens]
    return [words(run) for run in runs]


# Reading -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "reply", "content", "clean"),
    [
        ("thinking", "hm</think>yes<E>", [think("hm"), say("yes")], True),
        ("thinking", "<think>hm</think>yes<E>", [think("hm"), say("yes")], True),
        ("thinking", "</think>yes<E>", "yes", True),
        ("thinking", "a <think> b</think>yes<E>", [think("a <think> b"), say("yes")], True),
        ("thinking", "hm</think>a</think>b<E>", [think("hm"), say("a</think>b")], True),
        ("thinking", "hm</think>a<think>b</think>c<E>", [think("hm"), say("a"), think("b"), say("c")], True),
        # After a tool result nothing opens a think block, so an answer may come without one ...
        ("thinking", "yes<E>", "yes", True),
        # ... but reasoning that was cut off is no answer.
        ("thinking", "the answer is 4", [think("the answer is 4")], False),
        ("thinking", "<think>hm<E>", [think("hm")], True),
        ("thinking", "<thi", [think("<thi")], False),
        ("disable_thinking", "yes<E>", "yes", True),
        ("disable_thinking", "yes", "yes", False),
        ("disable_thinking", "<think>hm</think>yes<E>", [say("<think>hm</think>yes")], True),
        ("disable_thinking", "yes<E><E>", "yes", False),
        ("disable_thinking", "", "", False),
    ],
)
def test_replies(mode: str, reply: str, content: object, clean: bool) -> None:
    message, termination = DEEPSEEK[mode]().parse_response(ids(reply.replace("<E>", DEEPSEEK_END)))
    assert message == {"role": "assistant", "content": content}
    assert termination is (ParseTermination.STOP_SEQUENCE if clean else ParseTermination.MALFORMED)


@every_mode
@pytest.mark.parametrize(
    ("written", "raw", "error"),
    [
        (f"{BEGIN}{CALL}add{SEP}{{{CALL_END}{END}", f"{CALL}add{SEP}{{{CALL_END}", "not valid JSON"),
        (f"{BEGIN}{CALL}add{SEP}[]{CALL_END}{END}", f"{CALL}add{SEP}[]{CALL_END}", "not a JSON object"),
        (f"{BEGIN}{CALL}add{CALL_END}{END}", f"{CALL}add{CALL_END}", "between name and arguments"),
        (f"{BEGIN}{CALL}{SEP}{{}}{CALL_END}{END}", f"{CALL}{SEP}{{}}{CALL_END}", "is empty"),
        (f"{BEGIN}{CALL} add{SEP}{{}}{CALL_END}{END}", f"{CALL} add{SEP}{{}}{CALL_END}", "spaces around"),
        (f"{BEGIN}{CALL}add{SEP}{{}}{END}", f"{CALL}add{SEP}{{}}", f"{CALL_END} is missing"),
        (f"{BEGIN}{CALL}{CALL}add{SEP}{{}}{CALL_END}{END}", f"{CALL}{CALL}add{SEP}{{}}{CALL_END}", "is missing"),
        (f"{BEGIN}add{END}", "add", "expected"),
        (f"{BEGIN}{CALL}add{SEP}{{}}{CALL_END}", f"{BEGIN}{CALL}add{SEP}{{}}{CALL_END}", f"{END} is missing"),
        (f"{BEGIN}{CALL}add{SEP}{'[' * 100_000}{CALL_END}{END}", None, "not valid JSON"),
        (f'{BEGIN}{CALL}add{SEP}{{"a": {"1" * 5000}}}{CALL_END}{END}', None, "not valid JSON"),
    ],
)
def test_an_unreadable_call_keeps_its_text_and_renders_back(
    mode: str, written: str, raw: str | None, error: str
) -> None:
    renderer = DEEPSEEK[mode]()
    reply = ids(("hm</think>" if mode != "disable_thinking" else "") + written + DEEPSEEK_END)
    message, termination = renderer.parse_response(reply)
    (bad,) = message["unparsed_tool_calls"]
    assert raw is None or bad.raw_text == raw
    assert error in bad.error
    assert failure_kind(message, termination) is ParseFailureKind.CONTENT
    prompt = renderer.build_generation_prompt([USER]).to_ints()
    assert renderer.build_supervised_example([USER, message])[0].to_ints() == prompt + reply


def test_a_call_without_a_think_block_is_past_its_reasoning() -> None:
    # After a tool result a model in thinking mode may call again at once; being cut off then makes no reasoning of it.
    good = f"plan{BEGIN}{CALL}add{SEP}{{}}{CALL_END}{END}"
    for ending in ("", DEEPSEEK_END):
        message, termination = DEEPSEEK["thinking"]().parse_response(ids(good + ending))
        assert message == Message(role="assistant", content="plan", tool_calls=[call("add", "{}")])
        assert termination.is_clean == bool(ending)


def test_a_good_call_beside_a_bad_one_and_text_around_them() -> None:
    good, bad = f"{CALL}add{SEP}{{}}{CALL_END}", f"{CALL}add{SEP}x{CALL_END}"
    message, _ = DEEPSEEK["disable_thinking"]().parse_response(ids(f"a{BEGIN}{good}\n{bad}{END}b{DEEPSEEK_END}"))
    assert message["content"] == "ab"
    assert message["tool_calls"] == [call("add", "{}")]
    assert [unparsed.raw_text for unparsed in message["unparsed_tool_calls"]] == [bad]
    assert all(isinstance(unparsed, UnparsedToolCall) for unparsed in message["unparsed_tool_calls"])


def get_part_text(part: ContentPart) -> str:
    return part["text"] if part["type"] == "text" else part["thinking"] if part["type"] == "thinking" else ""


PIECES = [
    *DEEPSEEK_TOKENS[4:9],
    "<think>",
    "</think>",
    "<thi",
    "</",
    "<",
    "\n",
    "a",
    " b",
    "漢",
    "🙂",
    "{}",
    DEEPSEEK_END,
]


@every_mode
@given(pieces=st.lists(st.sampled_from(PIECES), max_size=14))
@examples(100)
def test_parsing_never_raises_and_streams_agree(mode: str, pieces: list[str]) -> None:
    renderer = DEEPSEEK[mode]()
    reply = [token for piece in pieces for token in ids(piece)]
    message, termination = renderer.parse_response(reply)
    assert termination.is_clean == (pieces.count(DEEPSEEK_END) == 1 and pieces[-1] == DEEPSEEK_END)
    _, *deltas, last = renderer.parse_response_streaming(iter(reply))
    assert last == message
    parts = ensure_list(message["content"])
    streamed = [(type(d).__name__, getattr(d, "text", "") + getattr(d, "thinking", "")) for d in deltas]
    parsed = [(part["type"], get_part_text(part)) for part in parts]
    assert "".join(text for _, text in streamed) == "".join(text for _, text in parsed)
    # What streams as reasoning may turn out to be the answer, where no </think> has come.
    if mode == "disable_thinking" or (parts and parts[0]["type"] == "thinking"):
        thinking = "".join(text for kind, text in streamed if kind == "StreamingThinkingDelta")
        assert thinking == "".join(text for kind, text in parsed if kind == "thinking")
    # What was read can be written again, as history and as an example.
    renderer.build_generation_prompt([USER, message, USER])
    renderer.build_supervised_example([USER, message])


def test_a_stream_gives_reasoning_before_its_end() -> None:
    tokens, seen = ids("hello world</think>yes"), 0

    def arriving():
        nonlocal seen
        for token in tokens:
            seen += 1
            yield token

    stream = DEEPSEEK["thinking"]().parse_response_streaming(arriving())
    assert isinstance(next(item for item in stream if isinstance(item, StreamingThinkingDelta)), StreamingThinkingDelta)
    assert seen < len(tokens) // 2


def test_a_tag_that_arrives_in_parts_is_one_tag() -> None:
    pieces = ["<thi", "nk>", "hm</th", "ink>", f"yes{BEGIN[:6]}", BEGIN[6:]]
    tokens = [token for piece in pieces for token in ids(piece)]
    _, *deltas, _ = DEEPSEEK["thinking"]().parse_response_streaming(tokens)
    thinking = "".join(delta.thinking for delta in deltas if isinstance(delta, StreamingThinkingDelta))
    text = "".join(delta.text for delta in deltas if isinstance(delta, StreamingTextDelta))
    assert (thinking, text) == ("hm", "yes")


# Refusals ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "messages", "error"),
    [
        ("thinking", [USER, Message(role="system", content="S")], "one system text, at the very beginning"),
        ("thinking", [answer(ImagePart(type="image", image="a.png"))], "cannot hold image"),
        ("thinking", [USER, answer(think("a</think>b"))], "its reasoning holds '</think>'"),
        ("thinking", [Message(role="user", content="", tool_calls=[call()])], "only an assistant message can call"),
    ],
)
def test_what_cannot_be_written(mode: str, messages: list[Message], error: str) -> None:
    with pytest.raises(RendererError, match=error):
        DEEPSEEK[mode]().build_supervised_example(messages, TrainOnWhat.ALL_TOKENS)


def test_empty_reasoning_is_no_reasoning() -> None:
    plain = DEEPSEEK["disable_thinking"]().build_supervised_example([USER, Message(role="assistant", content="A")])
    for content in ([think(""), say("A")], "<think></think>A", "</think>A"):
        same = DEEPSEEK["disable_thinking"]().build_supervised_example(
            [USER, Message(role="assistant", content=content)]
        )
        assert same[0] == plain[0]


@pytest.mark.parametrize("missing", DEEPSEEK_TOKENS)
def test_a_tokenizer_without_the_special_tokens_is_refused(missing: str) -> None:
    tokenizer = make_tokenizer(markers=tuple(token for token in DEEPSEEK_TOKENS if token != missing))
    with pytest.raises(RendererError, match="no single id for the special token"):
        get_renderer("deepseekv3", tokenizer)
