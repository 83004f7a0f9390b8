"""gpt-oss: the Harmony format's channels, system and developer messages, tools, and what is forgotten when."""

import pickle
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.drawn import examples
from tests.renderers.reasoning_families import (
    EFFORTS,
    HARMONY_TOKENS,
    call,
    harmony_tokenizer,
    one_call_at_a_time,
    reference,
)
from tests.renderers.synthetic import failure_kind, make_tokenizer
from tinker_cookbook.exceptions import ConfigurationError, RendererError
from tinker_cookbook.renderers import (
    ContentPart,
    ImagePart,
    Message,
    ParseFailureKind,
    ParseTermination,
    TextPart,
    ThinkingPart,
    ToolSpec,
    TrainOnWhat,
    UnparsedToolCall,
    get_renderer,
)
from tinker_cookbook.renderers.gpt_oss import CONVERSATION_DATE, GptOssRenderer

USER = Message(role="user", content="U")
RESULT = Message(role="tool", content="2")
ADD = ToolSpec(
    name="add",
    description="Adds: é\nTwo numbers.",
    parameters={
        "type": "object",
        "properties": {"a": {"type": "integer", "description": "first"}, "b": {"type": "number", "default": 1.5}},
        "required": ["a"],
    },
)
TOOLS = [ADD, ToolSpec(name="now", description="", parameters={"type": "object", "properties": {}})]


def make(effort: str | None = None) -> GptOssRenderer:
    return GptOssRenderer(harmony_tokenizer(), reasoning_effort=effort, current_date=CONVERSATION_DATE)


def ids(text: str) -> list[int]:
    return harmony_tokenizer().encode(text, add_special_tokens=False)


def words(tokens: list[int]) -> str:
    return str(harmony_tokenizer().decode(tokens))


def think(reasoning: str) -> ThinkingPart:
    return ThinkingPart(type="thinking", thinking=reasoning)


def say(text: str) -> TextPart:
    return TextPart(type="text", text=text)


def answer(*parts: ContentPart) -> Message:
    return Message(role="assistant", content=[*parts])


def calling(*parts: ContentPart) -> Message:
    return Message(role="assistant", content=[*parts], tool_calls=[call()])


# Writing -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("effort", EFFORTS)
@given(messages=one_call_at_a_time())
@examples(20)
def test_prompts_and_whole_conversations_equal_the_template(effort: str | None, messages: list[Message]) -> None:
    renderer = make(effort)
    for end in range(1, len(messages) + 1):
        prompt = renderer.build_generation_prompt(messages[:end]).to_ints()
        assert prompt == reference(renderer, messages[:end], prompt=True)
    whole, weights = renderer.build_supervised_example(messages, TrainOnWhat.ALL_TOKENS)
    assert whole.to_ints() == reference(renderer, messages, prompt=False)
    assert weights.tolist() == [1.0] * whole.length


def test_prompt_text() -> None:
    (opening,) = make().create_conversation_prefix_with_tools(TOOLS, "Be brief.")
    prompt = make("high").build_generation_prompt([opening, USER], prefill="So")
    assert words(prompt.to_ints()) == (
        "<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.\n"
        "Knowledge cutoff: 2024-06\nCurrent date: 2025-08-05\n\nReasoning: high\n\n"
        "# Valid channels: analysis, commentary, final. Channel must be included for every message.\n"
        "Calls to these tools must go to the commentary channel: 'functions'.<|end|>"
        "<|start|>developer<|message|># Instructions\n\nBe brief.\n\n# Tools\n\n## functions\n\n"
        "namespace functions {\n\n// Adds: é\n// Two numbers.\n"
        "type add = (_: {\n// first\na: number,\nb?: number, // default: 1.5\n}) => any;\n\n"
        "type now = () => any;\n\n} // namespace functions<|end|>"
        "<|start|>user<|message|>U<|end|><|start|>assistant<|channel|>final<|message|>So"
    )
    assert prompt.to_ints()[-len(ids("<|message|>So")) :] == ids("<|message|>So")


def test_tools_without_instructions_and_the_system_message_left_out() -> None:
    opening = make().create_conversation_prefix_with_tools(TOOLS[1:])
    assert words(make().build_generation_prompt(opening).to_ints()) == (
        "<|start|>developer<|message|># Tools\n\n## functions\n\nnamespace functions {\n\n"
        "type now = () => any;\n\n} // namespace functions<|end|><|start|>assistant"
    )
    for messages in ([], [Message(role="system", content="")], [Message(role="developer", content="")]):
        assert words(make().build_generation_prompt(messages).to_ints()) == "<|start|>assistant"


def test_the_date_is_what_the_constructor_was_given() -> None:
    renderer = GptOssRenderer(harmony_tokenizer(), reasoning_effort="low", current_date="2031-02-03")
    assert "Current date: 2031-02-03\n" in words(renderer.build_generation_prompt([USER]).to_ints())


@pytest.mark.parametrize("effort", EFFORTS)
def test_the_name_says_the_effort(effort: str | None) -> None:
    name = f"gpt_oss_{effort}_reasoning" if effort else "gpt_oss_no_sysprompt"
    assert get_renderer(name, harmony_tokenizer()).build_generation_prompt([USER]) == make(
        effort
    ).build_generation_prompt([USER])


def test_channels_of_a_turn() -> None:
    messages = [USER, calling(think("r1"), say("t1")), RESULT, answer(think("r2"), say("p"), think("r3"), say("t2"))]
    model_input, _ = make().build_supervised_example(messages)
    assert words(model_input.to_ints()) == (
        "<|start|>user<|message|>U<|end|>"
        "<|start|>assistant<|channel|>analysis<|message|>r1<|end|>"
        "<|start|>assistant<|channel|>commentary<|message|>t1<|end|>"
        '<|start|>assistant to=functions.add<|channel|>commentary <|constrain|>json<|message|>{"a": 1}<|call|>'
        "<|start|>functions.add to=assistant<|channel|>commentary<|message|>2<|end|>"
        "<|start|>assistant<|channel|>analysis<|message|>r2<|end|>"
        "<|start|>assistant<|channel|>commentary<|message|>p<|end|>"
        "<|start|>assistant<|channel|>analysis<|message|>r3<|end|>"
        "<|start|>assistant<|channel|>final<|message|>t2<|return|>"
    )


@pytest.mark.parametrize(
    ("later", "kept"),
    [
        ([], ["r1"]),
        ([RESULT], ["r1"]),
        # A question in the middle of a row of calls ends nothing.
        ([RESULT, USER], ["r1"]),
        ([RESULT, calling(think("r2"))], ["r1", "r2"]),
        ([RESULT, answer(think("r2"), say("A"))], []),
        ([RESULT, answer(think("r2"), say("A")), USER], []),
        ([RESULT, answer(say("A")), USER, calling(think("r2")), RESULT], ["r2"]),
    ],
)
def test_reasoning_is_forgotten_once_an_answer_follows(later: list[Message], kept: list[str]) -> None:
    prompt = words(make().build_generation_prompt([USER, calling(think("r1")), *later]).to_ints())
    assert [name for name in ("r1", "r2") if name in prompt] == kept
    assert "<|return|>" not in prompt


@given(text=st.lists(st.sampled_from([*HARMONY_TOKENS, "a", " ", "!", "<|", "start|>", "\n"]), max_size=6).map("".join))
@examples(50)
def test_text_that_spells_special_tokens_stays_text(text: str) -> None:
    messages = [Message(role="user", content=text), answer(think(f"r{text}"), say(f"a{text}"))]
    model_input, _ = make().build_supervised_example(messages)
    tokens = model_input.to_ints()
    special = {token for token in ids("".join(HARMONY_TOKENS[1:]))}
    plain = make().build_supervised_example([USER, answer(think("r"), say("a"))])[0].to_ints()
    assert [token for token in tokens if token in special] == [token for token in plain if token in special]
    prompt = make().build_generation_prompt(messages[:1]).to_ints()
    assert words(prompt) == f"<|start|>user<|message|>{text}<|end|><|start|>assistant"
    assert make().parse_response(tokens[len(prompt) :]) == (messages[1], ParseTermination.STOP_SEQUENCE)


# Prompt, answer, history ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("effort", [None, "low"])
@given(data=st.data())
@examples(40)
def test_example_is_prompt_plus_answer_and_the_answer_parses_back(effort: str | None, data: st.DataObject) -> None:
    renderer, messages = make(effort), data.draw(one_call_at_a_time())
    ends = [i + 1 for i, message in enumerate(messages) if message["role"] == "assistant"]
    messages = messages[: data.draw(st.sampled_from(ends))]
    model_input, weights = renderer.build_supervised_example(messages)
    tokens, prompt = model_input.to_ints(), renderer.build_generation_prompt(messages[:-1]).to_ints()
    assert tokens[: len(prompt)] == prompt
    assert weights.dtype == torch.float32
    assert weights.tolist() == [0.0] * len(prompt) + [1.0] * (len(tokens) - len(prompt))
    stop = "<|call|>" if messages[-1].get("tool_calls") else "<|return|>"
    assert tokens[-1:] == ids(stop)
    assert sorted(renderer.get_stop_sequences()) == sorted(ids("<|return|><|call|>"))
    reply = tokens[len(prompt) :]
    assert renderer.parse_response(reply) == (messages[-1], ParseTermination.STOP_SEQUENCE)
    cut_off, termination = renderer.parse_response(reply[:-1])
    assert termination is ParseTermination.MALFORMED
    assert "tool_calls" not in cut_off


def test_no_extension_where_reasoning_is_forgotten_and_one_example_for_each_answer() -> None:
    messages = [USER, calling(think("r1")), RESULT, answer(think("r2"), say("A")), USER, answer(think("r3"), say("B"))]
    renderer = make()
    assert not renderer.has_extension_property
    so_far = renderer.build_supervised_example(messages[:4])[0].to_ints()
    assert renderer.build_generation_prompt(messages[:5]).to_ints()[: len(so_far)] != so_far
    examples = renderer.build_supervised_examples(messages, TrainOnWhat.ALL_ASSISTANT_MESSAGES)
    # The call and the answer of one turn share an example, because reasoning lasts as long as the turn.
    assert [[name in words(m.to_ints()) for name in ("r1", "r2", "r3")] for m, _ in examples] == [
        [True, True, False],
        [False, False, True],
    ]
    trained = [words([t for t, w in zip(m.to_ints(), ws.tolist(), strict=True) if w]) for m, ws in examples]
    assert trained[0].startswith("<|channel|>analysis<|message|>r1<|end|><|start|>assistant to=functions.add")
    assert trained[0].endswith("<|end|><|start|>assistant<|channel|>final<|message|>A<|return|>")
    assert trained[1].count("<|return|>") == 1


def test_every_selection() -> None:
    messages = [
        Message(role="system", content="S"),
        Message(role="user", content="U1"),
        Message(role="assistant", content="A1"),
        Message(role="user", content="U2"),
        Message(role="assistant", content="", tool_calls=[call()]),
        Message(role="tool", content="T"),
        Message(role="assistant", content="A3"),
    ]
    a1, a3 = "<|channel|>final<|message|>A1<|end|>", "<|channel|>final<|message|>A3<|return|>"
    a2 = ' to=functions.add<|channel|>commentary <|constrain|>json<|message|>{"a": 1}<|call|>'
    asked = ["# Instructions\n\nS\n\n<|end|>", "U1<|end|>", "U2<|end|>"]
    expected = {
        TrainOnWhat.LAST_ASSISTANT_MESSAGE: [a3],
        TrainOnWhat.LAST_ASSISTANT_TURN: [a2, a3],
        TrainOnWhat.ALL_ASSISTANT_MESSAGES: [a1, a2, a3],
        TrainOnWhat.ALL_USER_AND_SYSTEM_MESSAGES: asked,
        TrainOnWhat.ALL_MESSAGES: [*asked[:2], a1, asked[2], a2, "T<|end|>", a3],
    }
    assert {selection: trained_text(messages, selection) for selection in expected} == expected
    chosen = [message.copy() for message in messages]
    for i, message in enumerate(chosen):
        message["trainable"] = i in (1, 4)
    assert trained_text(chosen, TrainOnWhat.CUSTOMIZED) == ["U1<|end|>", a2]
    model_input, weights = make("low").build_supervised_example(messages, TrainOnWhat.ALL_TOKENS)
    assert weights.tolist() == [1.0] * model_input.length
    assert {*expected, TrainOnWhat.ALL_TOKENS, TrainOnWhat.CUSTOMIZED} == set(TrainOnWhat)


def trained_text(messages: list[Message], selection: TrainOnWhat) -> list[str]:
    """The runs of weight 1, as text."""
    model_input, weights = make("low").build_supervised_example(messages, selection)
    runs, previous = [], 0.0
    for token, weight in zip(model_input.to_ints(), weights.tolist(), strict=True):
        if weight and not previous:
            runs.append([])
        if weight:
            runs[-1].append(token)
        previous = weight
    return [words(run) for run in runs]


# Reading -------------------------------------------------------------------------------------------------------------

FINAL = "<|channel|>final<|message|>"
ANALYSIS = "<|channel|>analysis<|message|>"
NEXT = "<|end|><|start|>assistant"


@pytest.mark.parametrize(
    ("reply", "content", "clean"),
    [
        (f"{FINAL}yes<|return|>", "yes", True),
        (f"{ANALYSIS}hm{NEXT}{FINAL}yes<|return|>", [think("hm"), say("yes")], True),
        (f"{ANALYSIS}{NEXT}{FINAL}<|return|>", "", True),
        (f"<|channel|>commentary<|message|>plan{NEXT}{FINAL}yes<|return|>", [say("plan"), say("yes")], True),
        (f"{ANALYSIS}hm<|return|>", [think("hm")], True),
        (f"{ANALYSIS}the answer is 4", [think("the answer is 4")], False),
        (f"{ANALYSIS}hm{NEXT}{FINAL}ye", [think("hm"), say("ye")], False),
        (f"{ANALYSIS}hm{NEXT}", [think("hm")], False),
        (f"{ANALYSIS}hm<|end|>", [think("hm")], False),
        (f"{ANALYSIS}hm<|end|>{FINAL}yes<|return|>", [think("hm")], False),
        (f"{FINAL}yes<|return|><|return|>", "yes", False),
        (f"{FINAL}yes<|start|>", "yes", False),
        (f"{FINAL}yes<|end|><|start|>user<|message|>U<|return|>", [say("yes"), say("U")], False),
        (f"{FINAL}yes<|end|><|start|>user{FINAL}U<|return|>", [say("yes"), say("U")], False),
        ("<|message|>yes<|return|>", "yes", False),
        ("<|channel|>rumour<|message|>yes<|return|>", "yes", False),
        ("yes<|return|>", "", False),
        ("", "", False),
    ],
)
def test_replies(reply: str, content: object, clean: bool) -> None:
    message, termination = make().parse_response(ids(reply))
    assert message == {"role": "assistant", "content": content}
    assert termination is (ParseTermination.STOP_SEQUENCE if clean else ParseTermination.MALFORMED)
    assert failure_kind(message, termination) is (None if clean else ParseFailureKind.STRUCTURAL)


@pytest.mark.parametrize(
    "header",
    [
        " to=functions.add<|channel|>commentary <|constrain|>json",
        " to=functions.add<|channel|>commentary json",
        "<|channel|>commentary to=functions.add <|constrain|>json",
        "<|channel|>commentary to=functions.add<|constrain|>json",
        "<|channel|>commentary to=functions.add",
        "<|channel|>analysis to=functions.add code",
    ],
)
def test_a_call_may_name_its_recipient_in_two_places(header: str) -> None:
    message, termination = make().parse_response(ids(f'{ANALYSIS}hm{NEXT}{header}<|message|>{{"a": 1}}<|call|>'))
    assert message == Message(role="assistant", content=[think("hm")], tool_calls=[call()])
    assert termination is ParseTermination.STOP_SEQUENCE


@pytest.mark.parametrize(
    ("reply", "error", "clean"),
    [
        (" to=functions.add<|channel|>commentary json<|message|>{<|call|>", "not valid JSON", True),
        (" to=functions.add<|channel|>commentary json<|message|>[1]<|call|>", "not a JSON object", True),
        (f" to=functions.add<|channel|>commentary json<|message|>{'[' * 100_000}<|call|>", "not valid JSON", True),
        (f' to=functions.add<|channel|>final<|message|>{{"a": {"1" * 5000}}}<|call|>', "not valid JSON", True),
        ("<|channel|>commentary to=browser.open<|message|>{}<|call|>", "recipient is 'browser.open'", True),
        ("<|channel|>commentary to=functions.<|message|>{}<|call|>", "recipient is 'functions.'", True),
        ("<|channel|>commentary<|message|>{}<|call|>", "recipient is ''", True),
        ("<|channel|>commentary to=functions.add<|message|>{}<|return|>", r"<\|call\|> is missing", True),
        ("<|channel|>commentary to=functions.add<|message|>{}", r"<\|call\|> is missing", False),
    ],
)
def test_an_unreadable_call_keeps_its_text_and_renders_back(reply: str, error: str, clean: bool) -> None:
    message, termination = make().parse_response(ids(f"{ANALYSIS}hm{NEXT}{reply}"))
    (bad,) = message.get("unparsed_tool_calls", [])
    assert bad.raw_text == reply
    with pytest.raises(ValueError, match=error):
        raise ValueError(bad.error)
    assert termination.is_clean == clean
    assert failure_kind(message, termination) is (ParseFailureKind.CONTENT if clean else ParseFailureKind.STRUCTURAL)
    prompt = make().build_generation_prompt([USER]).to_ints()
    written = make().build_supervised_example([USER, message])[0].to_ints()
    assert words(written[len(prompt) :]) == f"{ANALYSIS}hm{NEXT}{reply}" + ("" if clean else "<|end|>")


PIECES = [
    *HARMONY_TOKENS,
    *("assistant", "user", "analysis", "final", "commentary", " to=functions.add", "json", "{}", "{", "a", "\n", "漢"),
]


@given(pieces=st.lists(st.sampled_from(PIECES), max_size=16), framed=st.booleans())
@examples(150)
def test_parsing_never_raises(pieces: list[str], framed: bool) -> None:
    reply = [token for piece in [*([FINAL] if framed else []), *pieces] for token in ids(piece)]
    message, termination = make().parse_response(reply)
    assert message["role"] == "assistant"
    stops = ids("<|return|><|call|>")
    if termination.is_clean:
        assert sum(token in stops for token in reply) == 1
        assert reply[-1] in stops
    # What was read can be written again, as history and as an example.
    make().build_generation_prompt([USER, message, USER])
    make().build_supervised_example([USER, message])


# Refusals, pickling ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("messages", "error"),
    [
        ([USER, RESULT], "a tool result must name its tool"),
        ([answer(ImagePart(type="image", image="a.png"))], "cannot hold image"),
        ([Message(role="user", content="", tool_calls=[call()])], "only an assistant message can call"),
        ([USER, *make().create_conversation_prefix_with_tools(TOOLS)], "message 1 declares tools"),
    ],
)
def test_what_cannot_be_written(messages: list[Message], error: str) -> None:
    with pytest.raises(RendererError, match=error):
        make().build_supervised_example(messages, TrainOnWhat.ALL_TOKENS)


def test_a_result_names_its_tool_itself_or_by_the_call_before_it() -> None:
    bad = Message(role="assistant", content="", unparsed_tool_calls=[UnparsedToolCall(raw_text="x", error="e")])
    named = Message(role="tool", content="2", name="sub")
    for before in (bad, Message(role="assistant", content="", tool_calls=[call()])):
        assert "<|start|>functions.sub to=assistant" in words(make().build_generation_prompt([before, named]).to_ints())


@pytest.mark.parametrize(
    ("make_renderer", "error"),
    [
        (lambda: GptOssRenderer(harmony_tokenizer(), reasoning_effort="none"), "reasoning_effort='none' is unknown"),
        (
            lambda: GptOssRenderer(harmony_tokenizer(), True),
            "use_system_prompt=True and reasoning_effort=None do not agree",
        ),
        (lambda: GptOssRenderer(harmony_tokenizer(), False, "low"), "do not agree"),
        (lambda: GptOssRenderer(harmony_tokenizer(), current_date="today"), "current_date='today' is not a date"),
        (lambda: GptOssRenderer(harmony_tokenizer(), current_date="20250805"), "write it as YYYY-MM-DD"),
    ],
)
def test_wrong_options(make_renderer: Callable[[], GptOssRenderer], error: str) -> None:
    with pytest.raises(ConfigurationError, match=error):
        make_renderer()


def test_tools_must_be_declared_to_declare_them() -> None:
    with pytest.raises(RendererError, match="tools is empty"):
        make().create_conversation_prefix_with_tools([])


@pytest.mark.parametrize("missing", HARMONY_TOKENS[1:])
def test_a_tokenizer_without_the_special_tokens_is_refused(missing: str) -> None:
    tokenizer = make_tokenizer(markers=tuple(token for token in HARMONY_TOKENS if token != missing))
    with pytest.raises(RendererError, match="no single id for the special token"):
        get_renderer("gpt_oss_no_sysprompt", tokenizer)


def test_pickle_by_value_keeps_the_options() -> None:
    renderer = GptOssRenderer(harmony_tokenizer(), True, "low", "2031-02-03")
    restored = pickle.loads(pickle.dumps(renderer))
    assert restored.build_generation_prompt([USER]) == renderer.build_generation_prompt([USER])
