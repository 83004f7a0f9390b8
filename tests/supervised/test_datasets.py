"""Datasets from Hugging Face tables and streams, mixtures of several, and what each train_on_what selects."""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import pytest
import tinker
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.drawn import examples
from tests.renderers.synthetic import make_tokenizer
from tinker_cookbook.exceptions import ConfigurationError, DataError, DataFormatError, DataValidationError
from tinker_cookbook.renderers import TrainOnWhat, get_renderer
from tinker_cookbook.supervised.conversations import messages_of_row
from tinker_cookbook.supervised.data import (
    FromConversationFileBuilder,
    StreamingSupervisedDatasetFromHFDataset,
    SupervisedDatasetFromHFDataset,
    SupervisedDatasetFromList,
    conversation_to_datums,
)
from tinker_cookbook.supervised.hub import FromHFConversationsBuilder, HubOptions, chat_dataset_builder
from tinker_cookbook.supervised.mixture import (
    InterleavedDatasetBuilder,
    InterleavedSupervisedDataset,
)
from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig, SupervisedDataset
from tinker_cookbook.tokenizer_utils import register_tokenizer, unregister_tokenizer

MODEL = "tests/supervised-datasets"


@pytest.fixture(autouse=True)
def workplace(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    register_tokenizer(MODEL, make_tokenizer)
    yield
    unregister_tokenizer(MODEL)


def datum(number: int) -> tinker.Datum:
    return tinker.Datum(model_input=tinker.ModelInput.from_ints([number]), loss_fn_inputs={})


def one(row: dict[str, Any]) -> tinker.Datum:
    return datum(row["n"])


def table(count: int) -> datasets.Dataset:
    return datasets.Dataset.from_list([{"n": n} for n in range(count)])


def stream(count: int, shards: int = 1) -> datasets.IterableDataset:
    return table(count).to_iterable_dataset(num_shards=shards)


def numbers(batch: Sequence[tinker.Datum]) -> list[int]:
    return [datum.model_input.to_ints()[0] for datum in batch]


def epoch(dataset: SupervisedDataset, seed: int | None = None) -> list[list[int]]:
    if seed is not None:
        dataset.set_epoch(seed)
    return [numbers(dataset.get_batch(i)) for i in range(len(dataset))]


def flat(batches: list[list[int]]) -> list[int]:
    return [number for batch in batches for number in batch]


class TestTables:
    def test_batches_hold_every_row_once_and_shuffle_by_seed_alone(self) -> None:
        dataset = SupervisedDatasetFromHFDataset(table(10), 4, map_fn=one)
        assert epoch(dataset) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
        first, second = epoch(dataset, 1), epoch(dataset, 2)
        assert first != second and sorted(flat(first)) == sorted(flat(second)) == list(range(10))
        assert epoch(SupervisedDatasetFromHFDataset(table(10), 4, map_fn=one), 1) == first

    def test_an_empty_dataset_is_refused(self) -> None:
        with pytest.raises(ConfigurationError, match="rows is empty"):
            SupervisedDatasetFromList([], 3, datum)

    def test_a_row_may_give_several_datums_and_batch_size_counts_rows(self) -> None:
        dataset = SupervisedDatasetFromHFDataset(table(3), 2, flatmap_fn=lambda row: [one(row)] * (row["n"] + 1))
        assert epoch(dataset) == [[0, 1, 1], [2, 2, 2]]
        assert (dataset.batch_size, dataset.num_rows) == (2, 3)

    def test_errors_name_the_row(self) -> None:
        def fussy(row: dict[str, Any]) -> list[tinker.Datum]:
            if row["n"] == 2:
                raise DataValidationError("no trained token is left")
            return [] if row["n"] == 3 else [one(row)]

        dataset = SupervisedDatasetFromHFDataset(table(4), 1, flatmap_fn=fussy)
        with pytest.raises(DataValidationError, match="row 2: no trained token is left"):
            dataset.get_batch(2)
        with pytest.raises(DataValidationError, match="row 3: flatmap_fn gave no datum"):
            dataset.get_batch(3)
        with pytest.raises(IndexError):
            dataset.get_batch(4)

    @pytest.mark.parametrize("functions", [{}, {"map_fn": one, "flatmap_fn": lambda row: [one(row)]}])
    def test_exactly_one_function_is_given(self, functions: dict[str, Any]) -> None:
        with pytest.raises(ConfigurationError, match="exactly one"):
            SupervisedDatasetFromHFDataset(table(2), 1, **functions)
        with pytest.raises(ConfigurationError, match="exactly one"):
            StreamingSupervisedDatasetFromHFDataset(stream(2), 1, 2, **functions)


class TestStreams:
    @pytest.mark.parametrize("shards", [1, 3])
    def test_an_epoch_is_the_stream_shuffled_within_its_buffer(self, shards: int) -> None:
        dataset = StreamingSupervisedDatasetFromHFDataset(stream(20, shards), 6, 20, map_fn=one, buffer_size=8)
        assert flat(epoch(dataset)) == list(range(20))
        first, second = epoch(dataset, 1), epoch(dataset, 2)
        assert [len(batch) for batch in first] == [6, 6, 6, 2]
        assert flat(first) != flat(second) and sorted(flat(first)) == sorted(flat(second)) == list(range(20))
        assert epoch(dataset, 1) == first

    @given(start=st.integers(0, 4), seed=st.integers(0, 5), rows=st.integers(9, 25))
    @examples(25)
    def test_a_resumed_run_gets_the_rows_of_an_uninterrupted_one(self, start: int, seed: int, rows: int) -> None:
        def new() -> StreamingSupervisedDatasetFromHFDataset:
            return StreamingSupervisedDatasetFromHFDataset(
                stream(rows), 5, 25, map_fn=one, buffer_size=4, when_exhausted="restart"
            )

        resumed = new()
        resumed.set_epoch(seed)
        assert [numbers(resumed.get_batch(i)) for i in range(start, 5)] == epoch(new(), seed)[start:]

    def test_it_does_not_go_back(self) -> None:
        dataset = StreamingSupervisedDatasetFromHFDataset(stream(9), 3, 9, map_fn=one)
        dataset.get_batch(1)
        for index in (0, 1):
            with pytest.raises(DataError, match=f"row {index * 3} of a stream that has been read up to row 6"):
                dataset.get_batch(index)
        assert numbers(dataset.get_batch(2)) == [6, 7, 8]
        with pytest.raises(IndexError):
            dataset.get_batch(3)
        dataset.set_epoch(0)
        assert len(dataset.get_batch(0)) == 3

    def test_a_wrong_length_is_an_error_or_filled_up(self) -> None:
        short = StreamingSupervisedDatasetFromHFDataset(stream(5), 4, 8, map_fn=one)
        short.get_batch(0)
        with pytest.raises(DataValidationError, match=r"ended after 5 rows, and length=8: set length"):
            short.get_batch(1)
        filled = StreamingSupervisedDatasetFromHFDataset(stream(5), 4, 12, map_fn=one, when_exhausted="restart")
        rows = flat(epoch(filled, 3))
        assert sorted(rows[:5]) == sorted(rows[5:10]) == list(range(5)) and rows[:5] != rows[5:10]
        longer = StreamingSupervisedDatasetFromHFDataset(stream(5), 2, 3, map_fn=one)
        assert epoch(longer) == [[0, 1], [2]]
        nothing = StreamingSupervisedDatasetFromHFDataset(
            stream(5).filter(lambda row: False), 2, 3, map_fn=one, when_exhausted="restart"
        )
        for index in (0, 1):
            with pytest.raises(DataValidationError, match="no row at all"):
                nothing.get_batch(index)

    @pytest.mark.parametrize("setting", [{"length": 0}, {"buffer_size": 0}, {"batch_size": 0}, {"when_exhausted": "x"}])
    def test_settings_are_checked(self, setting: dict[str, Any]) -> None:
        with pytest.raises(ConfigurationError, match=next(iter(setting))):
            StreamingSupervisedDatasetFromHFDataset(
                stream(2), **{"batch_size": 1, "length": 2, "map_fn": one, **setting}
            )


def source(start: int, count: int, batch_size: int = 3) -> SupervisedDatasetFromList[int]:
    return SupervisedDatasetFromList(range(start, start + count), batch_size, datum)


sizes_and_weights = st.lists(
    st.tuples(st.integers(1, 30), st.sampled_from([0.1, 0.2, 0.25, 0.3, 0.5, 0.7, 1.0, 2.0, 3.0])),
    min_size=1,
    max_size=4,
)


class TestMixtures:
    @given(sizes_and_weights, st.integers(1, 9), st.integers(0, 3), st.data())
    @examples(50)
    def test_a_batch_is_the_same_whatever_was_asked_for_before(
        self, drawn: list[tuple[int, float]], batch_size: int, seed: int, data: st.DataObject
    ) -> None:
        def new() -> InterleavedSupervisedDataset:
            sources = [source(100 * i, size) for i, (size, _) in enumerate(drawn)]
            return InterleavedSupervisedDataset(sources, batch_size, [weight for _, weight in drawn])

        expected, dataset = epoch(new(), seed), new()
        dataset.set_epoch(seed)
        for index in data.draw(st.lists(st.integers(0, len(expected) - 1), max_size=8)):
            assert numbers(dataset.get_batch(index)) == expected[index]

    def test_a_small_source_comes_round_in_another_order_each_time(self) -> None:
        dataset = InterleavedSupervisedDataset([source(0, 40), source(100, 10)], 8, [0.5, 0.5])
        rows = flat(epoch(dataset, 5))
        small = [row for row in rows if row >= 100]
        passes = [tuple(small[i : i + 10]) for i in range(0, 40, 10)]
        assert len(rows) == 80 and len(set(passes)) == 4
        assert all(sorted(one_pass) == list(range(100, 110)) for one_pass in passes)
        assert sorted(row for row in rows if row < 100) == list(range(40))
        assert flat(epoch(dataset, 6)) != rows

    def test_streams_can_be_mixed_and_resumed(self) -> None:
        def new() -> InterleavedSupervisedDataset:
            streamed = StreamingSupervisedDatasetFromHFDataset(stream(6), 1, 6, map_fn=one, buffer_size=3)
            return InterleavedSupervisedDataset([streamed, source(100, 9)], 4, [2, 1])

        expected, resumed = epoch(new(), 1), new()
        resumed.set_epoch(1)
        assert [numbers(resumed.get_batch(i)) for i in range(3, len(expected))] == expected[3:]
        assert Counter(row < 100 for row in flat(expected)) == {True: 18, False: 9}

    def test_bad_mixtures(self) -> None:
        class Batches(SupervisedDataset):
            def get_batch(self, index: int) -> list[tinker.Datum]:
                return [datum(index)]

            def __len__(self) -> int:
                return 1

        for sources, weights, message in [
            ([source(0, 2)], [0.5, 0.5], "1 sources need as many weights"),
            ([Batches()], None, "dataset 0 is a Batches, which has only batches"),
        ]:
            with pytest.raises(ConfigurationError, match=message):
                InterleavedSupervisedDataset(sources, 2, weights)


# Conversations --------------------------------------------------------------------------------------------------------


def chat(question: str, answer: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def common(**more: Any) -> ChatDatasetBuilderCommonConfig:
    base = {"renderer_name": "qwen3_instruct", "max_length": None, "batch_size": 4}
    return ChatDatasetBuilderCommonConfig(model_name_for_tokenizer=MODEL, **{**base, **more})


def write(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def text(datum: tinker.Datum) -> str:
    return str(make_tokenizer().decode(datum.model_input.to_ints()))


def trained(datum: tinker.Datum) -> str:
    targets, weights = datum.loss_fn_inputs["target_tokens"].to_torch(), datum.loss_fn_inputs["weights"].to_torch()
    return str(make_tokenizer().decode(targets[weights > 0].tolist()))


def all_datums(dataset: SupervisedDataset) -> list[tinker.Datum]:
    return [datum for i in range(len(dataset)) for datum in dataset.get_batch(i)]


class TestHub:
    """Folders of files are read by the same calls as datasets of the hub."""

    @pytest.fixture
    def folder(self, tmp_path: Path) -> str:
        for split, count in (("train", 12), ("test", 5)):
            rows = [{"id": str(n), "messages": chat(f"{split}{n}", f"A{n}")} for n in range(count)]
            write(tmp_path / "chats" / f"{split}.jsonl", rows)
        return str(tmp_path / "chats")

    def test_whole_with_its_own_test_split(self, folder: str) -> None:
        builder = FromHFConversationsBuilder(
            common_config=common(), dataset=folder, test_split="test", test_size=3, shuffle_seed=None
        )
        train, test = builder()
        assert test is not None and (len(train), len(test)) == (3, 1)
        assert [text(d).count("train") for d in all_datums(train)] == [1] * 12
        assert [text(d).split("user\n")[1][:5] for d in all_datums(test)] == ["test0", "test1", "test2"]

    @pytest.mark.parametrize("streaming", [False, True])
    def test_held_out_rows_are_not_trained(self, folder: str, streaming: bool) -> None:
        length: dict[str, Any] = {"stream_length": 8} if streaming else {}
        builder = FromHFConversationsBuilder(
            common_config=common(), dataset=folder, test_size=4, streaming=streaming, **length
        )
        train, test = builder()
        assert test is not None
        train.set_epoch(1)
        texts, held_out = (sorted(text(d) for d in all_datums(part)) for part in (train, test))
        assert (len(texts), len(held_out)) == (8, 4)
        assert len({*texts, *held_out}) == 12

    def test_a_stream_of_unknown_length_asks_for_it(self, folder: str) -> None:
        with pytest.raises(ConfigurationError, match=r"stream_length: .*chats\[train\] does not say how many rows"):
            FromHFConversationsBuilder(common_config=common(), dataset=folder, streaming=True)()

    def test_mistakes(self, folder: str, tmp_path: Path) -> None:
        for fields, message in [
            ({"dataset": str(tmp_path / "none")}, "could not be loaded"),
            ({"split": "dev"}, "could not be loaded"),
            ({"test_size": 12}, "test_size=12 leaves nothing to train on"),
            ({"messages_column": "chat"}, "there is no 'chat'"),
        ]:
            with pytest.raises((ConfigurationError, DataFormatError), match=message):
                FromHFConversationsBuilder(**{"common_config": common(), "dataset": folder, **fields})()
        with pytest.raises(ConfigurationError, match="stream_length=3 is for streams"):
            FromHFConversationsBuilder(common_config=common(), dataset=folder, stream_length=3)

    def test_names(self, folder: str, tmp_path: Path) -> None:
        file = write(tmp_path / "mine.jsonl", [{"messages": chat("Q", "A")}])
        for name, kind in [("conversations", FromConversationFileBuilder), ("library", FromConversationFileBuilder),
                           (str(file), FromConversationFileBuilder), (folder, FromHFConversationsBuilder),
                           ("tulu3", FromHFConversationsBuilder), ("owner/name", FromHFConversationsBuilder)]:  # fmt: skip
            assert isinstance(chat_dataset_builder(name, common()), kind)
        no_robots = chat_dataset_builder("no_robots", common(), test_size=9)
        assert isinstance(no_robots, FromHFConversationsBuilder)
        assert (no_robots.dataset, no_robots.test_split) == ("HuggingFaceH4/no_robots", "test")
        for name, message in [
            ("nonesuch", "dataset='nonesuch' is unknown; use a shipped name"),
            ("x.jsonl", "no such file"),
        ]:
            with pytest.raises(ConfigurationError, match=message):
                chat_dataset_builder(name, common())
        with pytest.raises(ConfigurationError, match="library is a file, which is read whole: leave out the options"):
            chat_dataset_builder("library", common(), options=HubOptions())

    def test_options_go_before_what_is_known_of_a_dataset(self) -> None:
        options = HubOptions(split="train[:10]", test_split="train[10:]", messages_column="chat")
        builder = chat_dataset_builder("no_robots", common(), test_size=9, options=options)
        assert isinstance(builder, FromHFConversationsBuilder)
        assert (builder.split, builder.test_split, builder.messages_column) == ("train[:10]", "train[10:]", "chat")

    def test_a_row_that_cannot_be_read_is_named(self, tmp_path: Path) -> None:
        rows = [{"messages": chat("Q", "A")}, {"messages": []}]
        write(tmp_path / "chats" / "train.jsonl", rows)
        with pytest.raises(DataFormatError, match=r"row 1: 'messages' must be a list with at least one message"):
            FromHFConversationsBuilder(common_config=common(), dataset=str(tmp_path / "chats"), shuffle_seed=None)()

    def test_mixtures_have_the_test_sets_of_all(self, tmp_path: Path) -> None:
        files = [write(tmp_path / f"{n}.jsonl", [{"messages": chat(f"{n}-{i}", "A")} for i in range(7)]) for n in "ab"]
        builder = InterleavedDatasetBuilder(
            sources=[chat_dataset_builder(str(file), common(), test_size=5) for file in files], batch_size=2
        )
        train, test = builder()
        assert test is not None
        assert (len(train), len(test)) == (2, 4)
        assert len({text(d) for part in (train, test) for d in all_datums(part)}) == 14


def test_a_null_in_a_table_is_a_missing_key() -> None:
    rows = datasets.Dataset.from_list([
        {"messages": [{"role": "user", "content": "Q", "trainable": None}, {"role": "assistant", "content": "A", "name": "x"}]},
    ])  # fmt: skip
    assert messages_of_row(rows[0]) == [
        {"role": "user", "content": "Q"},
        {"role": "assistant", "content": "A", "name": "x"},
    ]
    with pytest.raises(DataFormatError, match=r"messages\[0\]: the key 'content' is missing"):
        messages_of_row({"messages": [{"role": "user", "content": None}]})
    with pytest.raises(DataFormatError, match=r"messages\[0\]: unknown keys \['weight'\]"):
        messages_of_row({"messages": [{"role": "user", "content": "Q", "weight": 1}]})


TWO_TURNS = [{"role": "system", "content": "S"}, *chat("Q", "A"), *chat("R", "B")]
SELECTED = {
    TrainOnWhat.LAST_ASSISTANT_MESSAGE: "B<|im_end|>",
    TrainOnWhat.LAST_ASSISTANT_TURN: "B<|im_end|>",
    TrainOnWhat.ALL_ASSISTANT_MESSAGES: "A<|im_end|>B<|im_end|>",
    TrainOnWhat.ALL_MESSAGES: "S<|im_end|>Q<|im_end|>A<|im_end|>R<|im_end|>B<|im_end|>",
    TrainOnWhat.ALL_USER_AND_SYSTEM_MESSAGES: "S<|im_end|>Q<|im_end|>R<|im_end|>",
    TrainOnWhat.CUSTOMIZED: "Q<|im_end|>B<|im_end|>",
}


@pytest.mark.parametrize("split_rewritten", [False, True])
@pytest.mark.parametrize("train_on_what", list(TrainOnWhat))
def test_every_selection_works_in_a_builder(tmp_path: Path, train_on_what: TrainOnWhat, split_rewritten: bool) -> None:
    messages: list[dict[str, Any]] = [dict(message) for message in TWO_TURNS]
    if train_on_what is TrainOnWhat.CUSTOMIZED:
        messages = [{**message, "trainable": message["content"] in "QB"} for message in messages]
    path = write(tmp_path / "two.jsonl", [{"messages": messages}])
    config = common(train_on_what=train_on_what, split_rewritten=split_rewritten)
    (datum,) = all_datums(FromConversationFileBuilder(common_config=config, file_path=str(path))()[0])
    if train_on_what is TrainOnWhat.ALL_TOKENS:
        assert bool((datum.loss_fn_inputs["weights"].to_torch() > 0).all())
    else:
        # A newline of the header may be a token of the message.
        assert trained(datum).replace("\n", "") == SELECTED[train_on_what]


def test_a_renderer_that_rewrites_history_gives_an_example_per_reply(tmp_path: Path) -> None:
    renderer = get_renderer("qwen3", make_tokenizer())
    thought = [
        {"role": "user", "content": "Q"},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "A"}]},
        *chat("R", "B"),
    ]
    examples = renderer.build_supervised_examples(thought, TrainOnWhat.ALL_ASSISTANT_MESSAGES)  # type: ignore[arg-type]
    first, second = conversation_to_datums(thought, renderer, None)  # type: ignore[arg-type]
    assert "<think>\nhm\n</think>" in trained(first) and "hm" not in text(second)
    for made, (model_input, weights) in zip((first, second), examples, strict=True):
        assert made.model_input.to_ints() == model_input.to_ints()[:-1]
        assert torch.equal(made.loss_fn_inputs["weights"].to_torch() > 0, weights[1:] > 0)
    path = write(tmp_path / "thought.jsonl", [{"messages": thought}] * 3)
    config = common(renderer_name="qwen3", split_rewritten=True, batch_size=2)
    dataset, _ = FromConversationFileBuilder(common_config=config, file_path=str(path))()
    assert [len(dataset.get_batch(i)) for i in range(2)] == [4, 2]
    # Where nothing is rewritten, one example holds all replies.
    (whole,) = conversation_to_datums(TWO_TURNS, get_renderer("qwen3_instruct", make_tokenizer()), None)  # type: ignore[arg-type]
    assert trained(whole) == "A<|im_end|>B<|im_end|>"
