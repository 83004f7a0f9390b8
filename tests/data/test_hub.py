"""Datasets of the hub and of folders: one way to load them, whatever is made of their rows."""

from pathlib import Path
from typing import Any

import datasets
import pytest

from tinker_cookbook.data import hub
from tinker_cookbook.distillation.datasets import load_prompts
from tinker_cookbook.env import task_data as task_datasets
from tinker_cookbook.env.task import TaskItem
from tinker_cookbook.env.task_data import load_items
from tinker_cookbook.env.tasks import get_task
from tinker_cookbook.exceptions import ConfigurationError, DataFormatError

QA, SUMMARY = get_task("qa"), get_task("summary")
ROWS = {"question": ["Two and two?"], "answer": ["2+2\n#### 4"]}


class TestLoad:
    @pytest.fixture
    def saved(self, tmp_path: Path) -> str:
        table = datasets.Dataset.from_dict({"n": [0, 1, 2]})
        datasets.DatasetDict({"train": table, "dev": table.select([2])}).save_to_disk(str(tmp_path / "saved"))
        return str(tmp_path / "saved")

    @pytest.mark.parametrize("streaming", [False, True])
    def test_what_save_to_disk_wrote(self, saved: str, streaming: bool) -> None:
        assert [row["n"] for row in hub.load(saved, "dev", streaming=streaming)] == [2]
        splits = hub.load(saved, streaming=streaming)
        assert sorted(splits) == ["dev", "train"] and [row["n"] for row in splits["train"]] == [0, 1, 2]
        # One split of it is a saved dataset, too, and has the name that a dataset without splits is given.
        assert [row["n"] for row in hub.load(f"{saved}/dev", "train", streaming=streaming)] == [2]

    @pytest.mark.parametrize("streaming", [False, True])
    def test_a_folder_of_files(self, tmp_path: Path, streaming: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
        (tmp_path / "files").mkdir()
        (tmp_path / "files" / "train.jsonl").write_text('{"n": 1}\n{"n": 2}\n')
        rows = hub.load(str(tmp_path / "files"), "train", streaming=streaming)
        assert hub.read_rows(rows, "files[train]", lambda row: (row.place, row.content["n"]), "") == [
            ("files[train][0]", 1),
            ("files[train][1]", 2),
        ]
        monkeypatch.setenv("HOME", str(tmp_path))
        assert sorted(hub.load("~/files")) == ["train"]

    def test_what_cannot_be_had(self, saved: str, tmp_path: Path) -> None:
        with pytest.raises(ConfigurationError, match=r"saved\[test\]: there is no such split; use one of dev, train"):
            hub.load(saved, "test")
        with pytest.raises(ConfigurationError, match="a saved dataset has no configuration 'main'"):
            hub.load(saved, config="main")
        with pytest.raises(ConfigurationError, match=r"none\[train\] could not be loaded.*check its name"):
            hub.load(str(tmp_path / "none"), "train")

    def test_a_folder_that_is_no_dataset_says_what_to_name(self, tmp_path: Path) -> None:
        (tmp_path / "notes.txt").mkdir()
        with pytest.raises(
            ConfigurationError, match=r"is a folder without a \.jsonl, \.csv or \.parquet file; name a file"
        ):
            hub.load(str(tmp_path))
        (tmp_path / "b.jsonl").write_text('{"question": "1"}\n')
        (tmp_path / "a.jsonl").write_text("no json\n")
        with pytest.raises(ConfigurationError, match=rf"is a folder; name a file, such as {tmp_path}/a\.jsonl"):
            hub.load(str(tmp_path))

    def test_names(self, tmp_path: Path) -> None:
        assert hub.find("gsm8k", ("gsm8k",)) == hub.HubDataset("openai/gsm8k", "main")
        assert hub.find("gsm8k", ("tulu3",)) is None
        for name in ("owner/name", str(tmp_path)):
            assert hub.find(name) == hub.HubDataset(name)


def serve(monkeypatch: pytest.MonkeyPatch, **splits: dict[str, list[Any]] | list[Any]) -> list[tuple[Any, ...]]:
    """Have the hub give these splits. Returns what it is going to be asked for."""
    asked: list[tuple[Any, ...]] = []
    task_datasets._read_hub.cache_clear()

    def load_dataset(name: str, config: str | None, split: str | None, streaming: bool) -> Any:
        asked.append((name, config))
        made = {
            key: rows if isinstance(rows, list) else datasets.Dataset.from_dict(rows) for key, rows in splits.items()
        }
        return made if split is None else made[split]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return asked


class TestTasks:
    def test_an_id_and_the_short_names(self, monkeypatch: pytest.MonkeyPatch) -> None:
        asked = serve(monkeypatch, train=ROWS, test=ROWS)
        train, test = load_items(QA, "gsm8k")
        assert train == [TaskItem("train-0", "Two and two?", "4")] and test == [TaskItem("test-0", "Two and two?", "4")]
        load_items(QA, "someone/sums")
        load_items(QA, "someone/sums")
        assert asked == [("openai/gsm8k", "main"), ("someone/sums", None)]

    def test_summaries_and_a_validation_split(self, monkeypatch: pytest.MonkeyPatch) -> None:
        articles = {"article": ["A"], "highlights": ["B"], "id": ["x1"]}
        asked = serve(monkeypatch, train=articles, validation=articles)
        assert load_items(SUMMARY, "cnn_dailymail") == ([TaskItem("x1", "A", "B")], [TaskItem("x1", "A", "B")])
        assert asked == [("abisee/cnn_dailymail", "3.0.0")]

    def test_no_train_split_or_other_columns(self, monkeypatch: pytest.MonkeyPatch) -> None:
        serve(monkeypatch, test=ROWS)
        with pytest.raises(ConfigurationError, match="no split named train; it has test"):
            load_items(QA, "someone/sums")
        serve(monkeypatch, train={"text": ["x"], "label": ["y"]})
        with pytest.raises(DataFormatError, match=r"someone/sums\[train\]\[0\]: has no 'question'"):
            load_items(QA, "someone/sums")

    def test_an_unreachable_hub_says_so(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def load_dataset(*arguments: Any, **options: Any):
            raise ConnectionError("no route")

        task_datasets._read_hub.cache_clear()
        monkeypatch.setattr(datasets, "load_dataset", load_dataset)
        with pytest.raises(ConfigurationError, match=r"someone/sums.*could not be loaded.*no route"):
            load_items(QA, "someone/sums")


def test_prompts_of_conversations(monkeypatch: pytest.MonkeyPatch) -> None:
    # Arrow tables have no missing keys: what a message lacks is null.
    messages = [{"role": role, "content": role, "name": None, "tool_calls": None} for role in ("user", "assistant")]
    serve(monkeypatch, train=[{"messages": messages}], dev=[{"messages": messages}, {"messages": [{"role": "user"}]}])
    assert load_prompts("owner/chats") == [[{"role": "user", "content": "user"}]]
    with pytest.raises(DataFormatError, match=r"owner/chats\[dev\]\[1\]: .*the key 'content' is missing"):
        load_prompts("owner/chats", "dev")
