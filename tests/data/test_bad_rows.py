"""Rows that cannot be used: the first ends the run, or all are left out, counted in the metrics, and the first ones logged."""

import asyncio
import json
import logging
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import pytest

from tinker_cookbook import backends
from tinker_cookbook.data.rows import BadRows, OnBadRow
from tinker_cookbook.data.shipped import EXAMPLE_DATA
from tinker_cookbook.exceptions import (
    ConfigurationError,
    DataError,
    DataFormatError,
    DataValidationError,
    UntrainedRunError,
)
from tinker_cookbook.preference import train_dpo
from tinker_cookbook.preference.dpo_datasets import DPODatasetBuilderFromComparisons
from tinker_cookbook.preference.preference_datasets import (
    ChatDatasetBuilderFromComparisons,
    ComparisonBuilderFromJsonl,
    read_comparisons,
)
from tinker_cookbook.supervised import train
from tinker_cookbook.supervised.conversations import read_conversations
from tinker_cookbook.supervised.data import FromConversationFileBuilder
from tinker_cookbook.supervised.mixture import InterleavedDatasetBuilder
from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig, SupervisedDatasetBuilder
from tinker_cookbook.utils.files import read_jsonl

TINY = str(EXAMPLE_DATA / "tiny_chat")
GOOD = {"prompt": "How much is 2 + 2?", "completion": "4"}
MALFORMED = {"prompt": "How much is 2 + 2?"}
UNTRAINED = {"prompt": "word " * 100, "completion": "4"}
"""Cut to max_length, nothing of the reply is left."""
PAIR = {"prompt": "How much is 2 + 2?", "chosen": "4", "rejected": "5"}
SAME = {"prompt": "How much is 2 + 2?", "chosen": "4", "rejected": "4"}


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def common(on_bad_row: OnBadRow, **changes: Any) -> ChatDatasetBuilderCommonConfig:
    settings = {"model_name_for_tokenizer": TINY, "renderer_name": "qwen3_instruct", "max_length": 40, "batch_size": 2}
    return ChatDatasetBuilderCommonConfig(**{**settings, "on_bad_row": on_bad_row, **changes})


def conversations(path: str, on_bad_row: OnBadRow, **changes: Any) -> FromConversationFileBuilder:
    return FromConversationFileBuilder(common_config=common(on_bad_row, **changes), file_path=path, shuffle_seed=None)


def run_settings(folder: Path, builder: SupervisedDatasetBuilder) -> dict[str, Any]:
    return {
        "log_path": str(folder / "log"),
        "model_name": TINY,
        "recipe_name": "test",
        "dataset_builder": builder,
        "lora_rank": 2,
        "eval_every": 2,
        "save_every": 0,
    }


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TINKER_BACKEND", raising=False)
    monkeypatch.setenv("TINKER_LOCAL_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(backends, "_local_clients", WeakValueDictionary())


def test_malformed_lines_are_left_out_and_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path / "a.jsonl", [GOOD, MALFORMED, GOOD])
    with open(path, "ab") as file:
        file.write(b"{torn\n" + b'{"messages": []}\n' * 5)
    with pytest.raises(DataFormatError, match=r"a\.jsonl:2: "):
        read_conversations(path)
    bad = BadRows("skip")
    with caplog.at_level(logging.WARNING):
        assert [row.place.rpartition(":")[2] for row in read_conversations(path, bad)] == ["1", "3"]
    assert bad.count == 7
    assert "7 of 9 rows cannot be read and are skipped" in caplog.text
    told = [record.getMessage() for record in caplog.records if "a row is skipped" in record.getMessage()]
    assert len(told) == 3 and "a.jsonl:2: " in told[0] and "a.jsonl:4: not valid JSON" in told[1]


def test_a_file_without_a_usable_row_is_an_error_all_the_same(tmp_path: Path) -> None:
    with pytest.raises(DataFormatError, match="none of its 2 rows can be read"):
        read_conversations(write(tmp_path / "a.jsonl", [MALFORMED, MALFORMED]), BadRows("skip"))


def test_supervised_training_goes_on_without_them_and_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Batches in the order of the epoch: it is the file's here, so that the third has nothing but rows to leave out.
    monkeypatch.setattr(
        "tinker_cookbook.supervised.data.SupervisedDatasetFromList.set_epoch", lambda self, seed=0: None
    )
    rows = [GOOD, GOOD, GOOD, UNTRAINED, UNTRAINED, UNTRAINED, GOOD]
    path = write(tmp_path / "a.jsonl", rows)
    with pytest.raises(DataValidationError, match=r"a\.jsonl:4: no trained token is left"):
        train.check_config(train.Config(**run_settings(tmp_path, conversations(path, "raise"))))
    path = write(tmp_path / "a.jsonl", [*rows, MALFORMED])
    asyncio.run(train.main(train.Config(**run_settings(tmp_path, conversations(path, "skip")))))
    rows = read_jsonl(tmp_path / "log" / "metrics.jsonl")
    assert [row["data/bad_rows"] for row in rows] == [0, 1, 2, 0]
    assert [row["data/bad_rows_at_start"] for row in rows] == [1] * 4
    assert [row.get("num_sequences") for row in rows] == [2, 1, None, 1]
    log = (tmp_path / "log" / "logs.log").read_text()
    assert "step 2: every row of its batch is left out" in log and "a.jsonl:4: no trained token is left" in log


def test_a_run_whose_every_row_is_left_out_has_trained_nothing(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [UNTRAINED, UNTRAINED])
    for _ in range(2):  # nor has it when it is resumed
        with pytest.raises(UntrainedRunError, match="is over and trained nothing: none of its 1 batches"):
            asyncio.run(train.main(train.Config(**run_settings(tmp_path, conversations(path, "skip")))))
    assert [row["progress/trained_tokens"] for row in read_jsonl(tmp_path / "log" / "metrics.jsonl")] == [0]


def test_the_metrics_are_as_they_were_where_bad_rows_raise(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [GOOD, GOOD])
    asyncio.run(train.main(train.Config(**run_settings(tmp_path, conversations(path, "raise")))))
    assert "data/bad_rows" not in read_jsonl(tmp_path / "log" / "metrics.jsonl")[0]


def test_an_example_beyond_the_context_is_a_bad_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tinker_cookbook.models.info.get_context_length", lambda name: 30)
    path = write(tmp_path / "a.jsonl", [GOOD, {**GOOD, "completion": "word " * 40}])
    with pytest.raises(
        DataValidationError, match=r"a\.jsonl:2: an example of \d+ tokens, but the model has a context of 30"
    ):
        conversations(path, "raise", max_length=None)()[0].get_batch(0)
    dataset, _ = conversations(path, "skip", max_length=None)()
    assert len(dataset.get_batch(0)) == 1 and [bad.count for bad in dataset.bad_rows] == [1]


def test_a_mixture_counts_those_of_its_sources(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [GOOD, UNTRAINED, GOOD])
    mixed, _ = InterleavedDatasetBuilder(sources=[conversations(path, "skip")] * 2, batch_size=6)()
    assert len(mixed.get_batch(0)) == 4 and [bad.count for bad in mixed.bad_rows] == [1, 1]


class TestComparisons:
    def source(self, tmp_path: Path, rows: list[dict[str, Any]]) -> ComparisonBuilderFromJsonl:
        return ComparisonBuilderFromJsonl(train_path=write(tmp_path / "c.jsonl", rows), shuffle_seed=None)

    def test_identical_and_malformed_pairs_are_left_out_of_dpo(self, tmp_path: Path) -> None:
        source = self.source(tmp_path, [PAIR, SAME, {"prompt": "x"}, PAIR])

        def builder(on_bad_row: OnBadRow) -> DPODatasetBuilderFromComparisons:
            return DPODatasetBuilderFromComparisons(common_config=common(on_bad_row), comparison_builder=source)

        with pytest.raises(DataError, match=r"c\.jsonl:3: "):
            builder("raise")()
        train_dpo.main(train_dpo.Config(**run_settings(tmp_path, builder("skip"))))
        rows = read_jsonl(tmp_path / "log" / "metrics.jsonl")
        assert sum(row.get("num_pairs", 0) for row in rows) == 2
        assert sum(row.get("data/bad_rows", 0) for row in rows) == 1
        assert {row["data/bad_rows_at_start"] for row in rows if "data/bad_rows" in row} == {1}

    def test_those_whose_label_would_be_cut_off_are_left_out_of_a_preference_model(self, tmp_path: Path) -> None:
        source = self.source(tmp_path, [PAIR, {**PAIR, "chosen": "word " * 100}])
        settings = common("skip", max_length=80)
        dataset, _ = ChatDatasetBuilderFromComparisons(common_config=settings, comparison_builder=source, swap=True)()
        data = [datum for i in range(len(dataset)) for datum in dataset.get_batch(i)]
        assert len(data) == 2 and [bad.count for bad in dataset.bad_rows] == [2]  # in both orders

    def test_reading_says_what_it_expects(self, tmp_path: Path) -> None:
        with pytest.raises(DataFormatError, match=r'expected .*"prompt": ..., "chosen": ..., "rejected"'):
            read_comparisons(write(tmp_path / "c.jsonl", [{"prompt": "x"}]))
        with pytest.raises(DataFormatError, match="the key 'rejected' is missing; the row has prompt, chosen"):
            read_comparisons(write(tmp_path / "c.jsonl", [{"prompt": "x", "chosen": "y"}]))


def test_another_policy_is_refused(tmp_path: Path) -> None:
    with pytest.raises((ConfigurationError, TypeError)):
        common("ignore")  # pyright: ignore[reportArgumentType]
