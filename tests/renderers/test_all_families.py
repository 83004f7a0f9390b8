"""What holds for every renderer that get_renderer makes by itself. A family without an entry here fails the first test."""

import itertools
import pickle
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from tests.drawn import examples
from tests.renderers import families
from tests.renderers.reasoning_families import (
    call,
    deepseek_tokenizer,
    deepseek_v4_1_tokenizer,
    glm_tokenizer,
    harmony_tokenizer,
    kimi_k3_tokenizer,
    kimi_tokenizer,
    one_call_at_a_time,
    reasoned,
    tagged_call,
    trimmed,
    with_kimi_ids,
)
from tests.renderers.synthetic import conversation, make_tokenizer
from tinker_cookbook.exceptions import RendererError
from tinker_cookbook.renderers import (
    ImagePart,
    Message,
    ParseTermination,
    Renderer,
    StreamingMessageHeader,
    StreamingTextDelta,
    StreamingThinkingDelta,
    TextPart,
    ThinkingPart,
    ToolSpec,
    TrainOnWhat,
    ensure_list,
    formats,
    get_registered_renderer_names,
    get_renderer,
    known_renderer_names,
)
from tinker_cookbook.renderers.renderer import RenderContext
from tinker_cookbook.tokenizer_utils import register_tokenizer, unregister_tokenizer


class Entry(NamedTuple):
    """conversations: end with an assistant message, in the form that parsing gives back. stops: the stop sequences, as
    text. provisional: a stream may call reasoning what turns out to be text."""

    tokenizer: Callable[[], PreTrainedTokenizerFast]
    conversations: Callable[[], st.SearchStrategy[list[Message]]]
    stops: tuple[str, ...]
    tools: bool = True
    extends: bool = True
    streams: bool = True
    disables_thinking: bool = False
    provisional: bool = False


def _without_tools(thinking: bool = False) -> st.SearchStrategy[list[Message]]:
    return conversation(thinking=thinking, tools=False)


_QWEN = Entry(make_tokenizer, conversation, ("<|im_end|>",))
_QWEN_INSTRUCT = _QWEN._replace(conversations=lambda: conversation(thinking=False))  # thinking is left out
_DEEPSEEK = Entry(deepseek_tokenizer, lambda: conversation(thinking=False), ("<｜end▁of▁sentence｜>",))
_GPT_OSS = Entry(harmony_tokenizer, one_call_at_a_time, ("<|return|>", "<|call|>"), extends=False, streams=False)
_TAGGED = Entry(make_tokenizer, trimmed, ("<|im_end|>",), extends=False, provisional=True)
_TAGGED_DISABLED = _TAGGED._replace(
    conversations=lambda: trimmed(thinking=False), disables_thinking=True, provisional=False
)
_NEMOTRON = _TAGGED._replace(conversations=lambda: trimmed().map(reasoned))
_DEEPSEEK_V4_1 = Entry(
    deepseek_v4_1_tokenizer,
    lambda: conversation(calls=tagged_call()),
    ("<｜end▁of▁sentence｜>",),
    extends=False,
    provisional=True,
)
_GLM = Entry(glm_tokenizer, trimmed, ("<|user|>", "<|observation|>", "<|endoftext|>"), extends=False, provisional=True)
_KIMI_K3 = Entry(kimi_k3_tokenizer, trimmed, ("<|end_of_msg|>",), extends=False, streams=False)
_KIMI = Entry(kimi_tokenizer, with_kimi_ids, ("<|im_end|>",), extends=False, provisional=True)
_KIMI_DISABLED = _KIMI._replace(
    conversations=lambda: with_kimi_ids(thinking=False), disables_thinking=True, provisional=False
)


def _of_table(name: str, extends: bool) -> Entry:
    family = families.FAMILIES[name]
    return Entry(
        lambda: families.family_tokenizer(name),
        lambda: families.conversation(name),
        (family.end,),
        tools=family.tools,
        extends=extends,
    )


ENTRIES = {
    "role_colon": Entry(make_tokenizer, _without_tools, ("\n\nUser:",), tools=False, streams=False),
    "qwen3": _QWEN._replace(extends=False),
    "qwen3_disable_thinking": _QWEN._replace(
        conversations=lambda: conversation(thinking=False), extends=False, disables_thinking=True
    ),
    "qwen3_instruct": _QWEN_INSTRUCT,
    "qwen2_5": _of_table("qwen2_5", extends=True),
    "llama3": _of_table("llama3", extends=True),
    "llama3_tools": _of_table("llama3_tools", extends=True),
    "mistral": _of_table("mistral", extends=False),
    "mistral_v3": _of_table("mistral_v3", extends=False),
    "gemma": _of_table("gemma", extends=True),
    "qwen3_vl_instruct": _QWEN_INSTRUCT,
    "qwen3_vl": _QWEN._replace(extends=False),
    **dict.fromkeys(("qwen3_5", "qwen3_5_preserve_thinking"), _TAGGED),
    **{f"qwen3_8_{effort}_reasoning": _TAGGED for effort in ("xhigh", "medium", "low")},
    **{f"nemotron3_{kind}thinking": _NEMOTRON for kind in ("preserve_", "low_", "ultra_preserve_", "ultra_medium_")},
    **dict.fromkeys(("nemotron3", "nemotron3_ultra"), _NEMOTRON),
    "qwen3_5_disable_thinking": _TAGGED_DISABLED,
    "qwen3_8_disable_thinking": _TAGGED_DISABLED,
    "nemotron3_disable_thinking": _TAGGED_DISABLED,
    "nemotron3_ultra_disable_thinking": _TAGGED_DISABLED,
    "kimi_k2": _KIMI._replace(provisional=False),
    "kimi_k25": _KIMI,
    "kimi_k26": _KIMI,
    "kimi_k25_disable_thinking": _KIMI_DISABLED,
    "kimi_k26_disable_thinking": _KIMI_DISABLED,
    "kimi_k26_preserve_thinking": _KIMI._replace(extends=True),
    "deepseekv3": _DEEPSEEK._replace(disables_thinking=True),
    "deepseekv3_disable_thinking": _DEEPSEEK._replace(disables_thinking=True),
    "deepseekv3_thinking": _DEEPSEEK._replace(conversations=conversation, extends=False, provisional=True),
    **dict.fromkeys(("deepseekv4_1", "deepseekv4_1_low_reasoning", "deepseekv4_1_max_reasoning"), _DEEPSEEK_V4_1),
    "deepseekv4_1_preserve_thinking": _DEEPSEEK_V4_1._replace(extends=True),
    "deepseekv4_1_disable_thinking": _DEEPSEEK_V4_1._replace(
        conversations=lambda: conversation(thinking=False, calls=tagged_call()),
        extends=True,
        disables_thinking=True,
        provisional=False,
    ),
    **{f"glm5_3_{effort}_reasoning": _GLM for effort in ("max", "high", "low")},
    **{f"kimi_k31_pro_{effort}": _KIMI_K3 for effort in ("max_reasoning", "high_reasoning", "low_reasoning")},
    "kimi_k31_pro_no_reasoning_effort": _KIMI_K3,
    "kimi_k31_pro_disable_thinking": _KIMI_K3._replace(
        conversations=lambda: trimmed(thinking=False), extends=True, disables_thinking=True
    ),
    "gpt_oss_no_sysprompt": _GPT_OSS,
    "gpt_oss_low_reasoning": _GPT_OSS,
    "gpt_oss_medium_reasoning": _GPT_OSS,
    "gpt_oss_high_reasoning": _GPT_OSS,
}
every_name = pytest.mark.parametrize("name", ENTRIES)
USER = Message(role="user", content="U")


def built_in_names() -> set[str]:
    return set(known_renderer_names()) - set(get_registered_renderer_names())


def make(name: str) -> Renderer:
    return get_renderer(name, ENTRIES[name].tokenizer())


def test_every_family_is_tested() -> None:
    missing = sorted(built_in_names() - set(ENTRIES))
    assert not missing, (
        f"no test covers the renderers {missing}: add to ENTRIES in {__name__} an Entry for each, with a synthetic "
        "tokenizer that has the family's special tokens, a strategy of conversations that it can write, and its stops"
    )
    unknown = sorted(set(ENTRIES) - built_in_names())
    assert not unknown, f"ENTRIES names renderers that get_renderer does not know: {unknown}; take them out"


@every_name
def test_traits_are_those_of_the_table(name: str) -> None:
    entry, renderer = ENTRIES[name], make(name)
    assert renderer.has_extension_property == entry.extends
    assert renderer.supports_streaming == entry.streams
    assert renderer.disables_thinking == entry.disables_thinking


@every_name
def test_stops_are_single_special_tokens_or_documented_strings(name: str) -> None:
    entry, tokenizer = ENTRIES[name], ENTRIES[name].tokenizer()
    added = tokenizer.get_added_vocab()
    stops = make(name).get_stop_sequences()
    assert len(stops) == len(set(stops)) > 0
    for stop, text in zip(stops, entry.stops, strict=True):
        if isinstance(stop, int):
            assert added[text] == stop
            assert tokenizer.encode(text, add_special_tokens=False) == [stop]
        else:
            assert (name, stop) == ("role_colon", text)


@every_name
@given(data=st.data())
@examples(15)
def test_example_is_prompt_plus_answer_and_the_answer_parses_back(name: str, data: st.DataObject) -> None:
    renderer, messages = make(name), data.draw(ENTRIES[name].conversations())
    ends = [i + 1 for i, message in enumerate(messages) if message["role"] == "assistant"]
    messages = messages[: data.draw(st.sampled_from(ends))]
    model_input, weights = renderer.build_supervised_example(messages)
    prompt = renderer.build_generation_prompt(messages[:-1])
    tokens, asked = model_input.to_ints(), prompt.length
    assert tokens[:asked] == prompt.to_ints()
    assert weights.dtype == torch.float32
    assert weights.tolist() == [0.0] * asked + [1.0] * (len(tokens) - asked)
    assert all(chunk.length for chunk in [*model_input.chunks, *prompt.chunks])
    # What the model writes to stop is trained, and is not there when it was cut off.
    written = str(renderer.tokenizer.decode(tokens[asked:]))
    assert written.endswith(ENTRIES[name].stops)
    assert renderer.parse_response(tokens[asked:]) == (messages[-1], ParseTermination.STOP_SEQUENCE)
    assert renderer.parse_response(tokens[asked:-1])[1] is ParseTermination.MALFORMED


@every_name
@given(data=st.data())
@examples(15)
def test_prompts_extend_each_other_where_claimed(name: str, data: st.DataObject) -> None:
    renderer, messages = make(name), data.draw(ENTRIES[name].conversations())
    if not renderer.has_extension_property:
        return
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    for i, j in itertools.pairwise(answers):
        so_far = renderer.build_supervised_example(messages[: i + 1])[0].to_ints()
        assert renderer.build_generation_prompt(messages[:j]).to_ints()[: len(so_far)] == so_far


@every_name
@given(data=st.data())
@examples(10)
def test_split_examples_train_each_answer_on_its_own_prompt(name: str, data: st.DataObject) -> None:
    renderer, messages = make(name), data.draw(ENTRIES[name].conversations())
    examples = renderer.build_supervised_examples(messages, TrainOnWhat.ALL_ASSISTANT_MESSAGES)
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            alone, alone_weights = renderer.build_supervised_example(messages[: i + 1])
            n, trained = alone.length, alone_weights > 0
            assert any(
                model_input.to_ints()[:n] == alone.to_ints() and bool((weights[:n][trained] == 1).all())
                for model_input, weights in examples
            )


def replies(name: str) -> st.SearchStrategy[list[int]]:
    """Token ids as a model might write them: special tokens, tags, bits of text, and any id at all."""
    tokenizer = ENTRIES[name].tokenizer()
    special = [[token] for token in sorted(tokenizer.get_added_vocab().values())]
    bits = [tokenizer.encode(bit, add_special_tokens=False) for bit in ("<", "</", "\n", "a", " b", "漢", "🙂", "{}")]
    anything = st.integers(0, len(tokenizer) - 1).map(lambda token: [token])
    piece = st.sampled_from(special) | st.sampled_from(bits) | anything
    return st.lists(piece, max_size=16).map(lambda pieces: [token for piece in pieces for token in piece])


@every_name
@given(data=st.data())
@examples(40)
def test_parsing_never_raises_and_streams_agree(name: str, data: st.DataObject) -> None:
    renderer, reply = make(name), data.draw(replies(name))
    message, termination = renderer.parse_response(reply)
    assert message["role"] == "assistant"
    assert isinstance(termination, ParseTermination)
    if not ENTRIES[name].streams:
        with pytest.raises(RendererError, match="cannot parse a stream"):
            list(renderer.parse_response_streaming(reply))
        return
    header, *deltas, last = renderer.parse_response_streaming(iter(reply))
    assert header == StreamingMessageHeader(role="assistant")
    assert last == message
    parts = ensure_list(message["content"])
    text = "".join(delta.text for delta in deltas if isinstance(delta, StreamingTextDelta))
    thinking = "".join(delta.thinking for delta in deltas if isinstance(delta, StreamingThinkingDelta))
    if ENTRIES[name].provisional and not any(part["type"] == "thinking" for part in parts[:1]):
        return  # its own test says what holds there
    assert text == "".join(part["text"] for part in parts if part["type"] == "text")
    # Blocks that hold line breaks only may count as empty once the message is whole.
    parsed = "".join(part["thinking"] for part in parts if part["type"] == "thinking")
    assert thinking == parsed or thinking.replace("\n", "") == parsed.replace("\n", "")


@every_name
@given(data=st.data())
@examples(15)
def test_a_stream_of_a_real_answer_is_the_answer(name: str, data: st.DataObject) -> None:
    renderer, messages = make(name), data.draw(ENTRIES[name].conversations())
    if not renderer.supports_streaming:
        return
    asked = renderer.build_generation_prompt(messages[:-1]).length
    reply = renderer.build_supervised_example(messages)[0].to_ints()[asked:]
    streamed = list(renderer.parse_response_streaming(iter(reply)))
    assert streamed[-1] == messages[-1]
    written = "".join(
        getattr(item, "text", "") + getattr(item, "thinking", "") for item in streamed if not isinstance(item, dict)
    )
    parts = ensure_list(messages[-1]["content"])
    assert written == "".join(str(part.get("text", part.get("thinking", ""))) for part in parts)


@every_name
def test_tools_are_declared_or_refused(name: str) -> None:
    renderer = make(name)
    tools = [ToolSpec(name="add_numbers", description="Adds.", parameters={"type": "object", "properties": {}})]
    if ENTRIES[name].tools:
        opening = renderer.create_conversation_prefix_with_tools(tools, "Be brief.")
        text = str(renderer.tokenizer.decode(renderer.build_generation_prompt([*opening, USER]).to_ints()))
        assert "add_numbers" in text
        assert "Be brief." in text
        return
    with pytest.raises(RendererError, match="has no tool format"):
        renderer.create_conversation_prefix_with_tools(tools)
    calling = Message(role="assistant", content="", tool_calls=[call()])
    with pytest.raises(RendererError, match="no tool calls"):
        renderer.build_supervised_example([USER, calling])


@every_name
def test_only_the_assistant_calls_tools(name: str) -> None:
    asking = Message(role="user", content="U", tool_calls=[call()])
    with pytest.raises(RendererError, match="tool"):
        make(name).build_generation_prompt([asking])


LEAVES_OUT = [name for name, entry in ENTRIES.items() if entry.disables_thinking or name.endswith("instruct")]


@pytest.mark.parametrize("name", LEAVES_OUT)
def test_no_reasoning_is_trained_where_a_model_is_not_to_think(name: str) -> None:
    parts = [ThinkingPart(type="thinking", thinking="xyzzy"), TextPart(type="text", text="A")]
    reasoned, plain = Message(role="assistant", content=[*parts]), Message(role="assistant", content="A")
    renderer = make(name)
    assert renderer.without_reasoning(reasoned)["content"] == "A"
    assert renderer.without_reasoning(plain) == plain
    for mode in ("last_assistant_message", "all_assistant_messages", "all_tokens"):
        found, weights = renderer.build_supervised_example([USER, reasoned, USER, reasoned], mode)  # pyright: ignore[reportArgumentType]
        wanted, wanted_weights = renderer.build_supervised_example([USER, plain, USER, plain], mode)  # pyright: ignore[reportArgumentType]
        # Before the last question the templates forget reasoning, or keep it: what is trained has none.
        trained = [token for token, weight in zip(found.to_ints(), weights, strict=True) if weight]
        assert trained == [t for t, weight in zip(wanted.to_ints(), wanted_weights, strict=True) if weight]
        assert "xyzzy" not in str(renderer.tokenizer.decode(trained))


@pytest.mark.parametrize("name", sorted(set(ENTRIES) - set(LEAVES_OUT)))
def test_reasoning_is_trained_elsewhere(name: str) -> None:
    message = Message(role="assistant", content=[ThinkingPart(type="thinking", thinking="hm")])
    assert make(name).without_reasoning(message) == message


_LLAMA3_NARRATOR = "<|start_header_id|>narrator<|end_header_id|>"
NAMING = {"role_colon": "Narrator:", "llama3": _LLAMA3_NARRATOR, "llama3_tools": _LLAMA3_NARRATOR}
CHATML = ("qwen", "nemotron")


@every_name
def test_another_role_speaks_under_its_name(name: str, caplog: pytest.LogCaptureFixture) -> None:
    formats._warn_other_role.cache_clear()
    renderer, answer = make(name), Message(role="assistant", content="A")
    other = Message(role="narrator", content="Once.")
    prompts = [renderer.build_generation_prompt([USER, answer, other, answer, other]) for _ in range(2)]
    text = str(renderer.tokenizer.decode(prompts[0].to_ints()))
    naming = NAMING.get(name) or ("<|im_start|>narrator\n" if name.startswith(CHATML) else None)
    assert text.count(naming if naming is not None else "narrator: Once.") == 2
    if naming is None:
        as_user = Message(role="user", content="narrator: Once.")
        assert prompts[0] == renderer.build_generation_prompt([USER, answer, as_user, answer, as_user])
    assert text.count("Once.") == 2
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 1 and "'narrator'" in told[0]


@every_name
def test_a_role_is_a_name(name: str) -> None:
    ctx = RenderContext(idx=1, is_last=True, prev_message=USER, last_user_index=0)
    for role in ("", "a b", "user\n"):
        with pytest.raises(RendererError, match=r"message 1: role .* must be a name"):
            make(name).render_message(Message(role=role, content="x"), ctx)


@every_name
def test_a_developer_speaks_as_the_system(name: str) -> None:
    developer, system = (Message(role=role, content="Be brief.") for role in ("developer", "system"))
    prompts = [make(name).build_generation_prompt([opening, USER]) for opening in (developer, system)]
    assert prompts[0] == prompts[1]


@every_name
def test_thinking_of_others_than_the_assistant_is_text_in_tags(name: str) -> None:
    parts = [ThinkingPart(type="thinking", thinking="hm"), TextPart(type="text", text="U")]
    written = Message(role="user", content="<think>\nhm\n</think>\n\nU")
    prompts = [make(name).build_generation_prompt([m]) for m in (Message(role="user", content=[*parts]), written)]
    assert prompts[0] == prompts[1]
    with pytest.raises(RendererError, match="parts of type image"):
        make(name).build_generation_prompt([Message(role="user", content=[ImagePart(type="image", image="x.png")])])


@every_name
def test_pickling_by_name_and_by_value(name: str) -> None:
    tokenizer = ENTRIES[name].tokenizer()
    register_tokenizer("tests/any_family", lambda: tokenizer)
    try:
        renderer = get_renderer(name, tokenizer, model_name="tests/any_family")
        frozen = pickle.dumps(renderer)
        restored = pickle.loads(frozen)
    finally:
        unregister_tokenizer("tests/any_family")
    assert len(frozen) < 300
    assert type(restored) is type(renderer)
    assert restored.tokenizer is tokenizer
    assert restored.build_generation_prompt([USER]) == renderer.build_generation_prompt([USER])
    renderer._model_name = None  # nothing names it now, so the tokenizer travels along
    by_value = pickle.loads(pickle.dumps(renderer))
    assert by_value.build_generation_prompt([USER]) == renderer.build_generation_prompt([USER])
