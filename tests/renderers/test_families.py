"""What holds for Qwen2.5, Llama 3, Gemma and Mistral alike: equal to the template, prompt before answer, parse after
render, extension where claimed, equal streams, weights spelled out."""

import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.drawn import examples
from tests.renderers.families import FAMILIES, TOOLS, conversation, edited, family_tokenizer, make, reference, token
from tests.renderers.synthetic import text
from tinker_cookbook.exceptions import RendererError
from tinker_cookbook.renderers import (
    Message,
    ParseTermination,
    Renderer,
    StreamingMessageHeader,
    StreamingTextDelta,
    TextPart,
    ThinkingPart,
    ToolCall,
    TrainOnWhat,
    get_renderer,
)
from tinker_cookbook.tokenizer_utils import register_tokenizer, unregister_tokenizer

every_family = pytest.mark.parametrize("name", FAMILIES)
EXTENDING = ("qwen2_5", "llama3", "llama3_tools", "gemma")

# The template ------------------------------------------------------------------------------------------------------


@every_family
@given(data=st.data())
@examples(60)
def test_prompt_and_whole_conversation_equal_the_template(name: str, data: st.DataObject) -> None:
    messages, renderer = data.draw(conversation(name)), make(name)
    if FAMILIES[name].trims:  # what a model wrote is kept, where these templates trim it
        messages = edited(messages, "assistant", str.strip)
    asking = messages[:-1]
    assert renderer.build_generation_prompt(asking).to_ints() == reference(name, asking, prompt=True)
    whole, _ = renderer.build_supervised_example(messages, TrainOnWhat.ALL_TOKENS)
    closing = family_tokenizer(name).encode(FAMILIES[name].closing, add_special_tokens=False)
    assert whole.to_ints() + closing == reference(name, messages, prompt=False)


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.trims])
def test_white_space_of_an_answer_is_kept_where_the_template_trims_it(name: str) -> None:
    messages = [Message(role="user", content="q"), Message(role="assistant", content=" a\n")]
    tokenizer, prompt = family_tokenizer(name), make(name).build_generation_prompt(messages[:1]).to_ints()
    written = make(name).build_supervised_example(messages)[0].to_ints()
    assert tokenizer.decode(written[len(prompt) :]) == " a\n" + FAMILIES[name].end
    trimmed = edited(messages, "assistant", str.strip)
    assert reference(name, messages, prompt=False) == reference(name, trimmed, prompt=False)


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.tools])
@pytest.mark.parametrize("system_prompt", ["", "Be brief."])
@given(data=st.data())
@examples(25)
def test_tool_declarations_equal_the_template(name: str, system_prompt: str, data: st.DataObject) -> None:
    drawn, renderer = data.draw(conversation(name)), make(name)
    if FAMILIES[name].trims:
        drawn = edited(drawn, "assistant", str.strip)
    said = [message for message in drawn[:-1] if message["role"] != "system"]
    ours = [*renderer.create_conversation_prefix_with_tools(TOOLS, system_prompt), *said]
    plain = [Message(role="system", content=system_prompt), *said] if system_prompt else said
    assert renderer.build_generation_prompt(ours).to_ints() == reference(name, plain, prompt=True, tools=TOOLS)


PROMPTS = {
    "qwen2_5": "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\nSo",
    "llama3": (
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nS<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nU<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nSo"
    ),
    "gemma": "<bos><start_of_turn>user\nS\n\nU<end_of_turn>\n<start_of_turn>model\nSo",
    "llama3_tools": (
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nS<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nU<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nSo"
    ),
    "mistral": "<s>[SYSTEM_PROMPT]S[/SYSTEM_PROMPT][INST]U[/INST]So",
    "mistral_v3": "<s>[INST]S\n\nU[/INST]So",
}


@every_family
def test_prompt_text(name: str) -> None:
    messages = [Message(role="system", content="S"), Message(role="user", content="U")]
    prompt = make(name).build_generation_prompt(messages, prefill="So")
    assert family_tokenizer(name).decode(prompt.to_ints()) == PROMPTS[name]
    assert all(chunk.length for chunk in prompt.chunks)


@pytest.mark.parametrize(
    ("name", "header"),
    [
        ("qwen2_5", "\n<|im_start|>user\n"),
        ("llama3", "<|start_header_id|>user<|end_header_id|>\n\n"),
        ("llama3_tools", "<|start_header_id|>user<|end_header_id|>\n\n"),
        ("gemma", "\n<start_of_turn>user\n"),
        ("mistral", "[INST]"),
        ("mistral_v3", "[INST]"),
    ],
)
def test_another_role_can_be_asked_to_speak(name: str, header: str) -> None:
    messages = [Message(role="user", content="U"), Message(role="assistant", content="A")]
    so_far = make(name).build_supervised_example(messages)[0].to_ints()
    prompt = make(name).build_generation_prompt(messages, role="user").to_ints()
    assert prompt[: len(so_far)] == so_far
    assert family_tokenizer(name).decode(prompt[len(so_far) :]) == header


# Prompt, answer, history ---------------------------------------------------------------------------------------------


@every_family
@given(data=st.data(), answer=text())
@examples(40)
def test_example_is_prompt_plus_answer_and_the_answer_parses_back(name: str, data: st.DataObject, answer: str) -> None:
    renderer, messages = make(name), data.draw(conversation(name))
    if data.draw(st.booleans()) and name != "qwen2_5":  # there a line break may belong to a block
        messages[-1]["content"] = answer
    model_input, weights = renderer.build_supervised_example(messages)
    tokens, prompt = model_input.to_ints(), renderer.build_generation_prompt(messages[:-1]).to_ints()
    assert tokens[: len(prompt)] == prompt
    assert weights.dtype == torch.float32
    # All of the answer is trained, its stop token included.
    assert weights.tolist() == [0.0] * len(prompt) + [1.0] * (len(tokens) - len(prompt))
    assert [tokens[-1]] == renderer.get_stop_sequences() == [token(name, FAMILIES[name].end)]
    assert renderer.parse_response(tokens[len(prompt) :]) == (messages[-1], ParseTermination.STOP_SEQUENCE)
    cut_off, termination = renderer.parse_response(tokens[len(prompt) : -1])
    assert (cut_off, termination) == (messages[-1], ParseTermination.MALFORMED)


@every_family
@given(data=st.data())
@examples(40)
def test_extension_property_where_claimed(name: str, data: st.DataObject) -> None:
    renderer, messages = make(name), data.draw(conversation(name))
    assert renderer.has_extension_property == (name in EXTENDING)
    # Mistral's version 7 rewrites nothing either as long as no tools are declared.
    if name != "mistral_v3":
        assert_prompts_extend(renderer, messages)
        assert len(renderer.build_supervised_examples(messages, TrainOnWhat.ALL_ASSISTANT_MESSAGES)) == 1


def assert_prompts_extend(renderer: Renderer, messages: list[Message]) -> None:
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    for i, j in zip(answers, [*answers[1:], len(messages)], strict=True):
        so_far = renderer.build_supervised_example(messages[: i + 1])[0].to_ints()
        later = renderer.build_generation_prompt(messages[:j]).to_ints()
        assert later[: len(so_far)] == so_far


@pytest.mark.parametrize(
    ("name", "opening"),
    [
        ("mistral", make("mistral").create_conversation_prefix_with_tools(TOOLS)),
        ("mistral_v3", make("mistral_v3").create_conversation_prefix_with_tools(TOOLS)),
        ("mistral_v3", [Message(role="system", content="S")]),
    ],
)
def test_no_extension_where_the_opening_moves_to_the_last_question(name: str, opening: list[Message]) -> None:
    first = [*opening, Message(role="user", content="U1"), Message(role="assistant", content="A1")]
    both = [*first, Message(role="user", content="U2"), Message(role="assistant", content="A2")]
    so_far = make(name).build_supervised_example(first)[0].to_ints()
    later = make(name).build_generation_prompt(both[:-1]).to_ints()
    assert later[: len(so_far)] != so_far
    examples = make(name).build_supervised_examples(both, TrainOnWhat.ALL_ASSISTANT_MESSAGES)
    assert [example[0].to_ints() for example in examples] == [
        so_far,
        make(name).build_supervised_example(both)[0].to_ints(),
    ]


@every_family
@given(data=st.data())
@examples(25)
def test_split_examples_train_each_answer_on_its_own_prompt(name: str, data: st.DataObject) -> None:
    renderer, messages = make(name), data.draw(conversation(name))
    examples = renderer.build_supervised_examples(messages, TrainOnWhat.ALL_ASSISTANT_MESSAGES)
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        alone, alone_weights = renderer.build_supervised_example(messages[: i + 1])
        n, trained = alone.length, alone_weights > 0
        assert any(
            model_input.to_ints()[:n] == alone.to_ints() and bool((weights[:n][trained] == 1).all())
            for model_input, weights in examples
        )


# Weights -------------------------------------------------------------------------------------------------------------

CONVERSATION = [
    Message(role="system", content="S"),
    Message(role="user", content="U1"),
    Message(role="assistant", content="A1"),
    Message(role="user", content="U2"),
    Message(role="assistant", content="A2"),
]
# Runs of weight 1: (all user and system messages, all messages). Where no header stands between two, they are one run.
RUNS = {
    "qwen2_5": (
        ["\nS<|im_end|>", "\nU1<|im_end|>", "\nU2<|im_end|>"],
        ["\nS<|im_end|>", "\nU1<|im_end|>", "A1<|im_end|>", "\nU2<|im_end|>", "A2<|im_end|>"],
    ),
    "llama3": (
        ["S<|eot_id|>", "U1<|eot_id|>", "U2<|eot_id|>"],
        ["S<|eot_id|>", "U1<|eot_id|>", "A1<|eot_id|>", "U2<|eot_id|>", "A2<|eot_id|>"],
    ),
    "gemma": (
        ["\nS\n\nU1<end_of_turn>", "U2<end_of_turn>"],
        ["\nS\n\nU1<end_of_turn>", "A1<end_of_turn>", "U2<end_of_turn>", "A2<end_of_turn>"],
    ),
    "mistral": (
        ["S[/SYSTEM_PROMPT]", "U1[/INST]", "U2[/INST]"],
        ["S[/SYSTEM_PROMPT]", "U1[/INST]A1</s>", "U2[/INST]A2</s>"],
    ),
    "mistral_v3": (["U1[/INST]", "S\n\nU2[/INST]"], ["U1[/INST]A1</s>", "S\n\nU2[/INST]A2</s>"]),
}


RUNS["llama3_tools"] = RUNS["llama3"]


def trained_text(name: str, messages: list[Message], train_on_what: TrainOnWhat) -> list[str]:
    """The runs of weight 1, as text."""
    model_input, weights = make(name).build_supervised_example(messages, train_on_what)
    runs, previous = [], 0.0
    for token_id, weight in zip(model_input.to_ints(), weights.tolist(), strict=True):
        if weight and not previous:
            runs.append([])
        if weight:
            runs[-1].append(token_id)
        previous = weight
    return [str(family_tokenizer(name).decode(run)) for run in runs]


@every_family
def test_every_selection(name: str) -> None:
    end = FAMILIES[name].end
    users_and_system, all_messages = RUNS[name]
    expected = {
        TrainOnWhat.LAST_ASSISTANT_MESSAGE: [f"A2{end}"],
        TrainOnWhat.LAST_ASSISTANT_TURN: [f"A2{end}"],
        TrainOnWhat.ALL_ASSISTANT_MESSAGES: [f"A1{end}", f"A2{end}"],
        TrainOnWhat.ALL_USER_AND_SYSTEM_MESSAGES: users_and_system,
        TrainOnWhat.ALL_MESSAGES: all_messages,
    }
    assert {selection: trained_text(name, CONVERSATION, selection) for selection in expected} == expected
    model_input, weights = make(name).build_supervised_example(CONVERSATION, TrainOnWhat.ALL_TOKENS)
    assert weights.tolist() == [1.0] * model_input.length
    chosen = [Message(role=m["role"], content=m["content"], trainable=i == 2) for i, m in enumerate(CONVERSATION)]
    assert trained_text(name, chosen, TrainOnWhat.CUSTOMIZED) == [f"A1{end}"]
    assert {*expected, TrainOnWhat.ALL_TOKENS, TrainOnWhat.CUSTOMIZED} == set(TrainOnWhat)


@pytest.mark.parametrize("name", ["qwen2_5", "mistral", "mistral_v3"])
def test_last_turn_holds_the_calls_before_the_last_answer(name: str) -> None:
    turn = [
        Message(role="user", content="U3"),
        Message(role="assistant", content="calling"),
        Message(role="tool", content="T", tool_call_id="abcdefgh1"),
        Message(role="assistant", content="A3"),
    ]
    end = FAMILIES[name].end
    texts = trained_text(name, [*CONVERSATION, *turn], TrainOnWhat.LAST_ASSISTANT_TURN)
    assert texts == [f"calling{end}", f"A3{end}"]


# Reading -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama3", "gemma"])
def test_an_end_of_text_token_ends_too(name: str) -> None:
    eos, end = token(name, FAMILIES[name].eos), token(name, FAMILIES[name].end)
    body = family_tokenizer(name).encode("hello", add_special_tokens=False)
    message = Message(role="assistant", content="hello")
    assert make(name).parse_response([*body, eos]) == (message, ParseTermination.EOS)
    assert make(name).parse_response([*body, end, eos]) == (message, ParseTermination.MALFORMED)


@every_family
@given(ids=st.lists(st.integers(0, 310), max_size=30))
@examples(80)
def test_parsing_never_raises_and_streams_agree(name: str, ids: list[int]) -> None:
    renderer = make(name)
    ids = [i for i in ids if i < len(family_tokenizer(name))]
    message, termination = renderer.parse_response(ids)
    endings = {token(name, FAMILIES[name].end), token(name, FAMILIES[name].eos)}
    assert termination.is_clean == (sum(i in endings for i in ids) == 1 and ids[-1] in endings)

    assert renderer.supports_streaming
    header, *deltas, last = renderer.parse_response_streaming(iter(ids))
    assert header == StreamingMessageHeader(role="assistant")
    assert last == message
    if isinstance(message["content"], str):
        assert "".join(d.text for d in deltas if isinstance(d, StreamingTextDelta)) == message["content"]


# Refusals ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama3", "llama3_tools", "gemma", "mistral", "mistral_v3"])
def test_reasoning_cannot_be_written(name: str) -> None:
    parts = [ThinkingPart(type="thinking", thinking="hm"), TextPart(type="text", text="A")]
    messages = [Message(role="user", content="U"), Message(role="assistant", content=[*parts])]
    with pytest.raises(RendererError, match="parts of type thinking"):
        make(name).build_supervised_example(messages)


_ADD = '{"name": "add", "parameters": {"a": 1}}'


@pytest.mark.parametrize(
    ("said", "arguments", "error"),
    [
        (_ADD, '{"a": 1}', None),
        (' {"parameters" : {}, "name": "add"}', None, None),  # text: a call begins with its name
        ('\n{ "name": "add", "parameters": {"a":1} }', '{"a": 1}', None),
        ('{"name": "add", "arguments": {}}', None, 'the keys "name" and "parameters"'),
        ('{"name": "add", "parameters": []}', None, '"parameters" to be an object'),
        ('{"name": 1, "parameters": {}}', None, '"name" to be a string'),
        ('{"name": "add", "parameters": {"a"', None, "not valid JSON"),
        (f"{_ADD}; {_ADD}", None, "not valid JSON"),
        (f"I call {_ADD}", None, None),
        ('{"n": 1}', None, None),
    ],
)
def test_llama3_reads_a_call_where_a_reply_begins_as_one(said: str, arguments: str | None, error: str | None) -> None:
    renderer = make("llama3_tools")
    reply = [*renderer.encode_text(said), token("llama3_tools", "<|eot_id|>")]
    message, _ = renderer.parse_response(reply)
    assert [call.function.arguments for call in message.get("tool_calls", [])] == ([arguments] if arguments else [])
    assert [error in call.error for call in message.get("unparsed_tool_calls", []) if error] == (
        [True] if error else []
    )
    assert message["content"] == ("" if arguments or error else said)
    *deltas, _ = renderer.parse_response_streaming(reply)
    assert "".join(d.text for d in deltas if isinstance(d, StreamingTextDelta)) == message["content"]
    assert make("llama3").parse_response(reply)[0] == Message(role="assistant", content=said)


def test_llama3_writes_a_call_by_itself() -> None:
    user, call = Message(role="user", content="U"), ToolCall(function=ToolCall.FunctionBody(name="f", arguments="{}"))
    for calling in (
        Message(role="assistant", content="so", tool_calls=[call]),
        Message(role="assistant", content="", tool_calls=[call, call]),
    ):
        with pytest.raises(RendererError, match="message 1: in the Llama 3 format a call is a separate message"):
            make("llama3_tools").build_supervised_example([user, calling])
    opening = make("llama3_tools").create_conversation_prefix_with_tools(TOOLS)
    with pytest.raises(RendererError, match="the conversation has none; add one"):
        make("llama3_tools").build_generation_prompt(opening)


@pytest.mark.parametrize("name", ["llama3", "gemma"])
def test_no_tools(name: str) -> None:
    with pytest.raises(RendererError, match="has no tool format"):
        make(name).create_conversation_prefix_with_tools(TOOLS)
    call = ToolCall(function=ToolCall.FunctionBody(name="add", arguments="{}"))
    calling = Message(role="assistant", content="", tool_calls=[call])
    with pytest.raises(
        RendererError, match=r"message 1 \(assistant\) calls tools, and the .* format has no tool calls"
    ):
        make(name).build_supervised_example([Message(role="user", content="U"), calling])


@every_family
def test_a_tokenizer_of_another_family_is_refused(name: str) -> None:
    other = "gemma" if name.startswith("llama3") else "llama3"
    with pytest.raises(RendererError, match="no single id for the special token"):
        get_renderer(name, family_tokenizer(other))


# Pickling ------------------------------------------------------------------------------------------------------------


@every_family
def test_pickle_by_name(name: str) -> None:
    register_tokenizer("tests/family", lambda: family_tokenizer(name))
    try:
        renderer = get_renderer(name, family_tokenizer(name), model_name="tests/family")
        frozen = pickle.dumps(renderer)
        restored = pickle.loads(frozen)
    finally:
        unregister_tokenizer("tests/family")
    assert len(frozen) < 300
    assert type(restored) is type(renderer)
    assert restored.tokenizer is family_tokenizer(name)
    by_value = pickle.loads(pickle.dumps(type(renderer)(family_tokenizer(name))))
    assert by_value.build_generation_prompt(CONVERSATION) == renderer.build_generation_prompt(CONVERSATION)
