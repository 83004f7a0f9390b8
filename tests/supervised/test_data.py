"""Supervised data: datums of conversations, file reading, epochs, the LR schedule."""

import json
import logging
from pathlib import Path

import pytest
import tinker
from hypothesis import given
from hypothesis import strategies as st

from tests.drawn import examples
from tests.renderers.synthetic import conversation, make_tokenizer
from tinker_cookbook.exceptions import (
    ConfigurationError,
    DataFormatError,
    DataValidationError,
    RendererError,
)
from tinker_cookbook.renderers import Message, Renderer, TrainOnWhat, get_renderer
from tinker_cookbook.supervised.data import (
    FromConversationFileBuilder,
    conversation_to_datum,
    read_conversations,
)
from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig
from tinker_cookbook.tokenizer_utils import register_tokenizer, unregister_tokenizer

MODEL = "tests/supervised"


@pytest.fixture(autouse=True)
def registered_tokenizer():
    register_tokenizer(MODEL, make_tokenizer)
    yield
    unregister_tokenizer(MODEL)


def instruct() -> Renderer:
    return get_renderer("qwen3_instruct", make_tokenizer())


def config(batch_size: int = 2, max_length: int | None = None, **more: object) -> ChatDatasetBuilderCommonConfig:
    fields: dict[str, object] = {"renderer_name": "qwen3_instruct", **more}
    return ChatDatasetBuilderCommonConfig(
        model_name_for_tokenizer=MODEL,
        batch_size=batch_size,
        max_length=max_length,
        **fields,  # type: ignore[arg-type]
    )


@given(data=st.data())
@examples(50)
def test_datum_of_a_conversation(data: st.DataObject) -> None:
    messages = data.draw(conversation())
    model_input, weights = instruct().build_supervised_example(messages, TrainOnWhat.ALL_ASSISTANT_MESSAGES)
    tokens = model_input.to_ints()
    max_length = data.draw(st.integers(2, len(tokens) + 5))
    if not weights[1:max_length].any():
        with pytest.raises(DataValidationError, match=f"max_length={max_length}"):
            conversation_to_datum(messages, instruct(), max_length)
        return
    datum = conversation_to_datum(messages, instruct(), max_length)
    n = min(max_length, len(tokens)) - 1
    assert datum.model_input.to_ints() == tokens[:n]
    assert datum.loss_fn_inputs["target_tokens"].tolist() == tokens[1 : n + 1]
    got = datum.loss_fn_inputs["weights"].to_torch()
    assert got.sum().item() == pytest.approx(1.0, abs=1e-5)
    assert bool(((got > 0) == (weights[1 : n + 1] > 0)).all())


# Files ----------------------------------------------------------------------------------------------------------------


def write_lines(path: Path, lines: list[str]) -> str:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


def line(question: str, answer: str = "A") -> str:
    return json.dumps({"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]})


@pytest.fixture
def file_path(tmp_path: Path) -> str:
    return write_lines(tmp_path / "data.jsonl", [line(f"Q{i}", f"A{i}") for i in range(7)])


def shown(batches: list[list[tinker.Datum]]) -> list[str]:
    return [str(make_tokenizer().decode(datum.model_input.to_ints())) for batch in batches for datum in batch]


def test_file_builder_splits_and_loses_nothing(file_path: str) -> None:
    train, test = FromConversationFileBuilder(common_config=config(), file_path=file_path, test_size=3)()
    assert test is not None
    assert (len(train), len(test)) == (2, 2)
    assert [len(test.get_batch(i)) for i in range(2)] == [2, 1]
    texts = shown([d.get_batch(i) for d in (train, test) for i in range(2)])
    assert sorted(texts) == [f"<|im_start|>user\nQ{i}<|im_end|>\n<|im_start|>assistant\nA{i}" for i in range(7)]
    assert texts != sorted(texts)
    again = FromConversationFileBuilder(common_config=config(), file_path=file_path, test_size=3)()
    assert shown([again[0].get_batch(0)]) == texts[:2]
    in_order, none = FromConversationFileBuilder(common_config=config(), file_path=file_path, shuffle_seed=None)()
    assert none is None
    assert shown([in_order.get_batch(i) for i in range(4)]) == sorted(texts)


def test_default_selection_and_its_override(tmp_path: Path) -> None:
    messages = [
        Message(role="user", content="Q"),
        Message(role="assistant", content="A"),
        Message(role="user", content="R"),
        Message(role="assistant", content="B"),
    ]
    path = write_lines(tmp_path / "two.jsonl", [json.dumps({"messages": messages})])
    counts = {}
    for chosen in (None, TrainOnWhat.LAST_ASSISTANT_MESSAGE):
        dataset, _ = FromConversationFileBuilder(common_config=config(train_on_what=chosen), file_path=path)()
        (datum,) = dataset.get_batch(0)
        counts[chosen] = sum(w > 0 for w in datum.loss_fn_inputs["weights"].tolist())
    assert counts == {None: 4, TrainOnWhat.LAST_ASSISTANT_MESSAGE: 2}


def test_a_rewritten_history_is_pointed_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    turn = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]
    path = write_lines(tmp_path / "t.jsonl", [json.dumps({"messages": turn * 2}), json.dumps({"messages": turn})])
    with caplog.at_level(logging.WARNING):
        FromConversationFileBuilder(common_config=config(), file_path=path)()
        assert not caplog.records
        FromConversationFileBuilder(common_config=config(renderer_name="qwen3"), file_path=path)()
    assert "1 of 2 conversations have several assistant messages" in caplog.text


def test_reasoning_that_is_not_trained_is_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    thought = [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "A"}]
    turns = [[{"role": "user", "content": "Q"}, {"role": "assistant", "content": said}] for said in (thought, "A", "B")]
    path = write_lines(tmp_path / "t.jsonl", [json.dumps({"messages": turn}) for turn in turns])
    with caplog.at_level(logging.WARNING):
        FromConversationFileBuilder(common_config=config(renderer_name="qwen3"), file_path=path)()
        assert not caplog.records
        told = config(renderer_name="qwen3_disable_thinking")
        dataset, _ = FromConversationFileBuilder(common_config=told, file_path=path, shuffle_seed=None)()
    assert "reasoning stripped from 1 messages of 3: Qwen3DisableThinkingRenderer trains none" in caplog.text
    with_reasoning, without = dataset.get_batch(0)[:2]
    assert with_reasoning.model_input == without.model_input


@pytest.mark.parametrize(
    ("bad", "what"),
    [
        ('{"text": "x"}', "there is no 'messages' (there are ['text'])"),
        ('{"messages": []}', "at least one message"),
        ('{"messages": {}}', "must be a list"),
        ('{"messages": ["x"]}', "messages[0]: a str and not an object"),
        ('{"messages": [{"role": "user"}]}', "messages[0]: the key 'content' is missing"),
        ('{"messages": [{"content": "x"}]}', "messages[0]: the key 'role' is missing"),
        ('{"messages": [{"role": 1, "content": "x"}]}', "'role' must be a string"),
        ('{"messages": [{"role": "user", "content": 1}]}', "'content' must be a string or a list of parts"),
        ('{"messages": [{"role": "user", "content": [{"type": "image", "audio": "x"}]}]}', "content[0] must be"),
        (
            '{"messages": [{"role": "user", "content": [{"type": "image", "image": "x"}]}]}',
            "/x': there is no such file",
        ),
        (
            '{"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image", "image": 3}]}]}',
            "messages[0]: content[1]: image must be an image of Pillow or a text, got int",
        ),
        (
            '{"messages": [{"role": "user", "content": [{"type": "image", "image": "https://a/b.png"}]}]}',
            "messages[0]: content[0]: image='https://a/b.png': this library does not fetch remote image URLs",
        ),
        ('{"messages": [{"role": "user", "content": "x", "weight": 0}]}', "unknown keys ['weight']"),
        ('{"messages": [{"role": "user", "content": "x", "trainable": 1}]}', "'trainable' must be true or false"),
        ('{"messages": [{"role": "user", "content": "x", "tool_calls": {}}]}', "'tool_calls' must be a list"),
        (
            '{"messages": [{"role": "user", "content": "x", "tool_calls": [{}]}]}',
            "tool_calls: function: Field required",
        ),
    ],
)
def test_malformed_line(tmp_path: Path, bad: str, what: str) -> None:
    path = write_lines(tmp_path / "bad.jsonl", [line("Q"), "", bad])
    with pytest.raises(DataFormatError) as caught:
        read_conversations(path)
    message = str(caught.value)
    assert message.startswith(f"{path}:3: ")
    assert what in message
    assert '; expected {"messages": [{"role": "user", "content": "..."}, ...]}' in message


def test_nothing_left_to_train_on(file_path: str) -> None:
    with pytest.raises(ConfigurationError, match="test_size=7 leaves nothing to train on"):
        FromConversationFileBuilder(common_config=config(), file_path=file_path, test_size=7)()


def test_rendering_errors_name_the_line(tmp_path: Path) -> None:
    only_user = json.dumps({"messages": [{"role": "user", "content": "Q"}]})
    path = write_lines(tmp_path / "user.jsonl", [only_user])
    dataset, _ = FromConversationFileBuilder(common_config=config(), file_path=path)()
    with pytest.raises(RendererError, match=r"user.jsonl:1: .*selects nothing"):
        dataset.get_batch(0)
    long = write_lines(tmp_path / "long.jsonl", [line("Q" * 50)])
    dataset, _ = FromConversationFileBuilder(common_config=config(max_length=10), file_path=long)()
    with pytest.raises(DataValidationError, match=r"long.jsonl:1: no trained token is left.*max_length=10"):
        dataset.get_batch(0)


@pytest.mark.parametrize(
    ("fields", "error"),
    [({"batch_size": 0}, "batch_size=0"), ({"max_length": 1}, "max_length=1")],
)
def test_config_is_checked_when_made(fields: dict[str, int], error: str) -> None:
    with pytest.raises(ConfigurationError, match=error):
        config(**fields)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="test_size=-1"):
        FromConversationFileBuilder(common_config=config(), file_path="x", test_size=-1)


def test_tool_calls_and_thinking_from_a_file_are_rendered(tmp_path: Path) -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "user", "content": "Q"},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm"}], "tool_calls": [call]},
    ]
    path = write_lines(tmp_path / "t.jsonl", [json.dumps({"messages": messages})])
    dataset, _ = FromConversationFileBuilder(common_config=config(renderer_name="qwen3"), file_path=path)()
    (text,) = shown([dataset.get_batch(0)])
    written = '<think>\nhm\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    assert text.endswith("assistant\n" + written)
