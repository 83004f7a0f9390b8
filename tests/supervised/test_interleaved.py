"""Datasets of the hub in one order: their shares, and that no row that is held out is trained on."""

from pathlib import Path
from typing import Any

import chz
import pytest

from tests.supervised.test_datasets import all_datums, chat, common, text, workplace, write  # noqa: F401
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.supervised.data import HFDatasetSource, InterleavedChatDatasetBuilder
from tinker_cookbook.supervised.types import SupervisedDataset


def make_source(folder: Path, name: str, count: int, **options: Any) -> HFDatasetSource:
    column = options.get("message_field", "messages")
    rows = [{"id": n, column: chat(f"{name}{n}", "A")} for n in range(count)]
    write(folder / name / "train.jsonl", rows)
    return HFDatasetSource(path=str(folder / name), **options)


def asked(dataset: SupervisedDataset | None) -> list[str]:
    assert dataset is not None
    return [text(d).split("user\n")[1].split("<")[0] for d in all_datums(dataset)]


def test_every_row_comes_once_where_sources_weigh_what_they_have(tmp_path: Path) -> None:
    sources = [make_source(tmp_path, "a", 8), make_source(tmp_path, "b", 4, message_field="talk")]
    builder = InterleavedChatDatasetBuilder(
        common_config=common(), sources=sources, stopping_strategy="all_exhausted_without_replacement"
    )
    train, test = builder()
    assert sorted(asked(train)) == sorted([f"a{i}" for i in range(8)] + [f"b{i}" for i in range(4)]) and test is None
    assert asked(train) == asked(builder()[0]) != asked(chz.replace(builder, shuffle_seed=1)()[0])


def test_what_is_held_out_is_never_trained_on_however_often_rows_repeat(tmp_path: Path) -> None:
    sources = [make_source(tmp_path, "a", 20, weight=1.0), make_source(tmp_path, "b", 4, weight=3.0)]
    train, test = InterleavedChatDatasetBuilder(common_config=common(), sources=sources, test_size=9)()
    trained, held_out = asked(train), asked(test)
    assert len(held_out) == len(set(held_out)) == 9 and not set(trained) & set(held_out)
    assert {*trained, *held_out} == {*(f"a{i}" for i in range(20)), *(f"b{i}" for i in range(4))}
    assert sum(row[0] == "b" for row in held_out) == 3, "three times as likely, until it has one left to train on"
    assert len(trained) > len(set(trained)), "the one row of b comes again and again"


def test_a_source_of_weight_0_is_left_out(tmp_path: Path) -> None:
    sources = [make_source(tmp_path, "a", 5, weight=2.0), make_source(tmp_path, "b", 5, weight=0.0)]
    train, _ = InterleavedChatDatasetBuilder(common_config=common(), sources=sources)()
    assert {row[0] for row in asked(train)} == {"a"}


def test_reasoning_that_is_not_trained_is_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    said = [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "A"}]
    replies: list[Any] = [said, said[1:], said[1:]]
    for name in "ab":
        rows = [{"messages": chat(f"{name}{n}", reply)} for n, reply in enumerate(replies)]
        write(tmp_path / name / "train.jsonl", rows)
    sources = [HFDatasetSource(path=str(tmp_path / name)) for name in "ab"]
    for renderer, counted in (("qwen3", False), ("qwen3_disable_thinking", True)):
        caplog.clear()
        config = chz.replace(common(), renderer_name=renderer)
        mixed = {"sources": sources, "stopping_strategy": "all_exhausted_without_replacement"}
        InterleavedChatDatasetBuilder(common_config=config, **mixed)()
        assert ("reasoning stripped from 2 messages of 6" in caplog.text) is counted


def test_what_cannot_be_mixed_is_refused(tmp_path: Path) -> None:
    one, other = make_source(tmp_path, "a", 3), make_source(tmp_path, "b", 3, weight=1.0)
    for sources, message in (
        ([], "0 of 0 have a weight; give at least one source"),
        ([one, other], "1 of 2 have a weight"),
        ([chz.replace(other, weight=-1.0)], "must be finite and not negative"),
        ([chz.replace(other, weight=0.0)], "one of them above 0"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            InterleavedChatDatasetBuilder(common_config=common(), sources=sources)
    builder = InterleavedChatDatasetBuilder(common_config=common(), sources=[one], test_size=3)
    with pytest.raises(ConfigurationError, match="test_size=3: 2 rows can be held out"):
        builder()
    with pytest.raises(ConfigurationError, match=r"message_field=.talk.: .* has the columns"):
        chz.replace(builder, sources=[chz.replace(one, message_field="talk")])()
