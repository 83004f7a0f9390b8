"""What holds for every renderer: prompt before answer, parse after render, extension where claimed, equal streams."""

import pickle
from collections.abc import Callable

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.drawn import examples
from tests.renderers.reasoning_families import trimmed
from tests.renderers.synthetic import conversation, make_tokenizer
from tinker_cookbook.renderers import (
    Message,
    ParseTermination,
    Renderer,
    StreamingMessageHeader,
    StreamingTextDelta,
    StreamingThinkingDelta,
    TextPart,
    ThinkingPart,
    TrainOnWhat,
    Utf8TokenDecoder,
    ensure_list,
    get_renderer,
)
from tinker_cookbook.renderers.content import has_thinking
from tinker_cookbook.renderers.qwen3 import Qwen3DisableThinkingRenderer, Qwen3Renderer
from tinker_cookbook.tokenizer_utils import register_tokenizer, unregister_tokenizer

CLOSED = ("qwen3_5_disable_thinking", "nemotron3_disable_thinking", "nemotron3_ultra_disable_thinking")
MAKERS: dict[str, Callable[[], Renderer]] = {
    "role_colon": lambda: get_renderer("role_colon", make_tokenizer()),
    "qwen3": lambda: get_renderer("qwen3", make_tokenizer()),
    "qwen3_keep": lambda: Qwen3Renderer(make_tokenizer(), strip_thinking_from_history=False),
    "qwen3_disable_thinking": lambda: get_renderer("qwen3_disable_thinking", make_tokenizer()),
    "qwen3_disable_thinking_keep": lambda: Qwen3DisableThinkingRenderer(
        make_tokenizer(), strip_thinking_from_history=False
    ),
    "qwen3_instruct": lambda: get_renderer("qwen3_instruct", make_tokenizer()),
    **{
        name: lambda name=name: get_renderer(name, make_tokenizer())
        for name in ("qwen3_5", "qwen3_5_preserve_thinking", "qwen3_8_low_reasoning", "nemotron3", "nemotron3_ultra")
    },
    **{name: lambda name=name: get_renderer(name, make_tokenizer()) for name in CLOSED},
}
every_renderer = pytest.mark.parametrize("name", MAKERS)


def draw_conversation(data: st.DataObject, name: str) -> list[Message]:
    if name.startswith(("qwen3_5", "qwen3_8", "nemotron3")):
        return data.draw(trimmed(thinking=name not in CLOSED))
    thinking = name in ("qwen3", "qwen3_keep")
    messages = data.draw(conversation(thinking=thinking, tools=name != "role_colon"))
    if name == "role_colon":  # its text may hold angle brackets, but not its own labels
        messages = [m for m in messages if m["role"] != "tool"]
    return messages


@every_renderer
@given(data=st.data())
@examples(40)
def test_example_is_prompt_plus_answer_and_the_answer_parses_back(name: str, data: st.DataObject) -> None:
    renderer, messages = MAKERS[name](), draw_conversation(data, name)
    # An answer without reasoning closes the block at once, where the prompt opens it on a line of its own (the template too).
    assume(name not in ("nemotron3", "nemotron3_ultra") or has_thinking(messages[-1]["content"]))
    model_input, weights = renderer.build_supervised_example(messages)
    tokens, prompt = model_input.to_ints(), renderer.build_generation_prompt(messages[:-1]).to_ints()
    assert tokens[: len(prompt)] == prompt
    assert weights.dtype == torch.float32
    assert weights.tolist() == [0.0] * len(prompt) + [1.0] * (len(tokens) - len(prompt))
    assert all(chunk.length for chunk in model_input.chunks)

    answer = tokens[len(prompt) :]
    assert renderer.parse_response(answer) == (messages[-1], ParseTermination.STOP_SEQUENCE)
    assert renderer.parse_response(answer[:-1])[1] is ParseTermination.MALFORMED


@every_renderer
@given(data=st.data())
@examples(40)
def test_extension_property_where_claimed(name: str, data: st.DataObject) -> None:
    renderer, messages = MAKERS[name](), draw_conversation(data, name)
    if not renderer.has_extension_property:
        return
    for i, message in enumerate(messages[:-1]):
        if message["role"] != "assistant":
            continue
        so_far = renderer.build_supervised_example(messages[: i + 1])[0].to_ints()
        j = next((j for j in range(i + 1, len(messages)) if messages[j]["role"] == "assistant"), len(messages))
        later = renderer.build_generation_prompt(messages[:j]).to_ints()
        assert later[: len(so_far)] == so_far


@pytest.mark.parametrize("name", ["qwen3", "qwen3_disable_thinking"])
def test_no_extension_where_history_is_rewritten(name: str) -> None:
    renderer = MAKERS[name]()
    first = [Message(role="user", content="q"), answer_with("because" if name == "qwen3" else "", "a")]
    so_far = renderer.build_supervised_example(first)[0].to_ints()
    later = renderer.build_generation_prompt([*first, Message(role="user", content="next")]).to_ints()
    assert not renderer.has_extension_property
    assert later[: len(so_far)] != so_far


def answer_with(thinking: str, text: str) -> Message:
    if not thinking:
        return Message(role="assistant", content=text)
    parts: list[TextPart | ThinkingPart] = [
        ThinkingPart(type="thinking", thinking=thinking),
        TextPart(type="text", text=text),
    ]
    return Message(role="assistant", content=[*parts])


@every_renderer
@given(data=st.data())
@examples(25)
def test_split_examples_train_each_answer_on_its_own_prompt(name: str, data: st.DataObject) -> None:
    renderer, messages = MAKERS[name](), draw_conversation(data, name)
    examples = renderer.build_supervised_examples(messages, TrainOnWhat.ALL_ASSISTANT_MESSAGES)
    if renderer.has_extension_property:
        assert len(examples) == 1
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        alone, alone_weights = renderer.build_supervised_example(messages[: i + 1])
        n, trained = alone.length, alone_weights > 0
        assert any(
            model_input.to_ints()[:n] == alone.to_ints() and bool((weights[:n][trained] == 1).all())
            for model_input, weights in examples
        )


@every_renderer
@given(ids=st.lists(st.integers(0, 300), max_size=30))
@examples(60)
def test_parsing_never_raises(name: str, ids: list[int]) -> None:
    renderer = MAKERS[name]()
    ids = [i for i in ids if i < len(make_tokenizer())]
    message, termination = renderer.parse_response(ids)
    assert message["role"] == "assistant"
    if renderer.get_stop_sequences() != ["\n\nUser:"]:
        assert termination.is_clean == (ids.count(stop_id()) == 1 and ids[-1] == stop_id())


def stop_id() -> int:
    return make_tokenizer().encode("<|im_end|>", add_special_tokens=False)[0]


BITS = [
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<think",
    "</",
    "<",
    "\n",
    "\n\n",
    "a",
    " b",
    "漢",
    "🙂",
    "{}",
]


@pytest.mark.parametrize("name", ["qwen3", "qwen3_keep", "qwen3_instruct", *CLOSED])
@given(bits=st.lists(st.sampled_from(BITS), max_size=14), ends=st.booleans())
@examples(150)
def test_stream_agrees_with_the_whole(name: str, bits: list[str], ends: bool) -> None:
    renderer = MAKERS[name]()
    # Cut at every byte or so: ids of single pieces, not of the joined text.
    tokens = [t for bit in bits for t in make_tokenizer().encode(bit, add_special_tokens=False)]
    tokens += [stop_id()] if ends else []
    header, *deltas, last = renderer.parse_response_streaming(iter(tokens))
    whole, _ = renderer.parse_response(tokens)
    assert header == StreamingMessageHeader(role="assistant")
    assert last == whole
    parts = ensure_list(whole["content"])
    assert "".join(d.text for d in deltas if isinstance(d, StreamingTextDelta)) == "".join(
        p["text"] for p in parts if p["type"] == "text"
    )
    streamed = "".join(d.thinking for d in deltas if isinstance(d, StreamingThinkingDelta))
    parsed = "".join(p["thinking"] for p in parts if p["type"] == "thinking")
    # Blocks of line breaks only count as empty once the message is whole.
    assert streamed == parsed or streamed.replace("\n", "") == parsed.replace("\n", "")


def test_stream_gives_text_before_the_end() -> None:
    tokens = make_tokenizer().encode("<think>\nhm\n</think>\n\nhello world", add_special_tokens=False)
    seen = 0

    def arriving():
        nonlocal seen
        for token in tokens:
            seen += 1
            yield token

    stream = MAKERS["qwen3"]().parse_response_streaming(arriving())
    thinking = next(item for item in stream if isinstance(item, StreamingThinkingDelta))
    assert thinking.thinking == "h"
    assert seen < len(tokens)


@given(ids=st.lists(st.integers(0, 299), max_size=20), cuts=st.integers(1, 4))
@examples(100)
def test_incremental_decoding_equals_whole_decoding(ids: list[int], cuts: int) -> None:
    tokenizer = make_tokenizer()
    decoder = Utf8TokenDecoder(tokenizer)
    pieces = [decoder.decode(ids[i : i + cuts]) for i in range(0, len(ids), cuts)]
    assert "".join(pieces) + decoder.flush() == tokenizer.decode(ids)


def test_a_character_in_parts_is_held_back() -> None:
    tokenizer = make_tokenizer()
    ids = tokenizer.encode("🙂", add_special_tokens=False)
    assert len(ids) == 4
    decoder = Utf8TokenDecoder(tokenizer)
    assert [decoder.decode([i]) for i in ids] == ["", "", "", "🙂"]


@every_renderer
def test_pickle_by_value_when_nothing_names_it(name: str) -> None:
    restored = pickle.loads(pickle.dumps(MAKERS[name]()))
    messages = [Message(role="user", content="Hi")]
    assert restored.build_generation_prompt(messages) == MAKERS[name]().build_generation_prompt(messages)


def test_pickle_by_name_loads_the_tokenizer_from_the_registry() -> None:
    register_tokenizer("tests/synthetic", make_tokenizer)
    try:
        renderer = get_renderer("qwen3_instruct", make_tokenizer(), model_name="tests/synthetic")
        frozen = pickle.dumps(renderer)
        restored = pickle.loads(frozen)
    finally:
        unregister_tokenizer("tests/synthetic")
    assert len(frozen) < 300
    assert type(restored) is type(renderer)
    assert restored.tokenizer is make_tokenizer()
    assert restored._model_name == "tests/synthetic"
