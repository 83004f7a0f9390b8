"""Where items come from (shipped, one's own file, the hub), in which order they come, and what a bad line says."""

import json
import pickle
from pathlib import Path
from typing import Any

import datasets
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinker_cookbook.exceptions import ConfigurationError, DataFormatError
from tinker_cookbook.tasks import datasets as task_datasets
from tinker_cookbook.tasks.datasets import load_items
from tinker_cookbook.tasks.registry import get_task
from tinker_cookbook.tasks.single_turn import TaskDataset, evaluation_set, load_task_items
from tinker_cookbook.tasks.types import TaskItem

QA, SUMMARY = get_task("qa"), get_task("summary")


def write(path: Path, *lines: Any) -> str:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return str(path)


class TestShipped:
    @pytest.mark.parametrize(
        ("task", "name", "sizes"),
        [(QA, "arithmetic", (300, 100)), (QA, "test", (8, 8)), (SUMMARY, "articles", (48, 16))],
    )
    def test_by_name(self, task, name: str, sizes: tuple[int, int]) -> None:
        train, test = load_items(task, name)
        assert (len(train), len(test)) == sizes
        assert all(item.id and item.question and item.reference for item in train + test)
        assert len({item.id for item in train}) == len(train)

    def test_training_and_test_questions_differ(self) -> None:
        for task in (QA, SUMMARY):
            train, test = load_items(task, task.default_dataset)
            assert not {item.question for item in train} & {item.question for item in test}

    def test_shipped_names_belong_to_their_task(self) -> None:
        with pytest.raises(ConfigurationError, match="dataset='articles' is unknown to task=qa; use a shipped name"):
            load_items(QA, "articles")


class TestFiles:
    def test_lines_train_and_another_file_tests(self, tmp_path: Path) -> None:
        mine = write(
            tmp_path / "mine.jsonl", {"question": "1+1?", "answer": "2"}, {"prompt": "2+2?", "solution": 4, "id": 7}
        )
        held_out = write(tmp_path / "held_out.jsonl", {"problem": "3+3?", "reference": "6"})
        train, test = load_items(QA, mine)
        assert train == [TaskItem("mine-1", "1+1?", "2"), TaskItem("7", "2+2?", "4")] and test == []
        assert load_items(QA, mine, held_out)[1] == [TaskItem("held_out-1", "3+3?", "6")]
        assert load_items(QA, mine, "arithmetic")[1] == load_items(QA, "arithmetic")[1]

    def test_home_and_other_suffixes(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOME", str(tmp_path))
        write(tmp_path / "mine.jsonl", {"article": "A", "highlights": "B"})
        assert load_items(SUMMARY, "~/mine.jsonl")[0] == [TaskItem("mine-1", "A", "B")]
        other = write(tmp_path / "mine.txt", {"article": "A", "highlights": "B"})
        assert load_items(SUMMARY, other)[0] == [TaskItem("mine-1", "A", "B")]

    def test_an_answer_after_its_derivation(self, tmp_path: Path) -> None:
        row = {"question": "Two and two?", "answer": "2+2=<<2+2=4>>4\n#### 4"}
        assert load_items(QA, write(tmp_path / "gsm.jsonl", row))[0][0].reference == "4"
        with_hashes = {"article": "A", "highlights": "B #### C"}
        assert load_items(SUMMARY, write(tmp_path / "s.jsonl", with_hashes))[0][0].reference == "B #### C"

    @pytest.mark.parametrize(
        ("line", "complaint"),
        [
            ("{not json", "not JSON"),
            ("", "not JSON"),
            ("[1, 2]", "not an object"),
            ({"question": "1+1?"}, "has no 'answer' (it has ['question'])"),
            ({"question": "", "answer": "2"}, "'question' must be a non-empty string"),
            ({"question": "1+1?", "answer": None}, "'answer' must be a non-empty string"),
            ({"question": "1+1?", "answer": True}, "'answer' must be a non-empty string"),
            ({"question": ["1+1?"], "answer": "2"}, "'question' must be a non-empty string"),
        ],
    )
    def test_a_bad_line_is_named_with_what_was_expected(self, tmp_path: Path, line: Any, complaint: str) -> None:
        path = write(tmp_path / "bad.jsonl", {"question": "1+1?", "answer": "2"}, line)
        with pytest.raises(DataFormatError) as raised:
            load_items(QA, path)
        message = str(raised.value)
        assert message.startswith(f"{path}:2: ") and complaint in message
        assert '{"question": "...", "answer": "..."}' in message

    def test_bytes_that_are_no_text_are_named_too(self, tmp_path: Path) -> None:
        path = tmp_path / "bad.jsonl"
        path.write_bytes(b'{"question": "1+1?", "answer": "2"}\n{"question": "\xff?", "answer": "2"}\n')
        with pytest.raises(DataFormatError, match=r"bad\.jsonl"):
            load_items(QA, str(path))

    def test_empty_and_missing_files(self, tmp_path: Path) -> None:
        with pytest.raises(DataFormatError, match="empty"):
            load_items(QA, write(tmp_path / "empty.jsonl"))
        with pytest.raises(ConfigurationError, match=r"nowhere\.jsonl.*no such file"):
            load_items(QA, str(tmp_path / "nowhere.jsonl"))

    def test_unknown_name_lists_what_there_is(self) -> None:
        with pytest.raises(ConfigurationError) as raised:
            load_items(QA, "arithmetics")
        assert "dataset='arithmetics'" in str(raised.value) and "arithmetic, test" in str(raised.value)

    def test_fewer_questions_than_a_batch_takes(self) -> None:
        with pytest.raises(ConfigurationError, match="num_groups=9 questions per batch, but the dataset has 8"):
            load_task_items("qa", None, "test", None, 9)


ROWS = {"question": ["Two and two?"], "answer": ["2+2\n#### 4"]}


class TestHub:
    def hub(self, monkeypatch: pytest.MonkeyPatch, **splits: dict[str, list[str]]) -> list[tuple[Any, ...]]:
        asked: list[tuple[Any, ...]] = []
        task_datasets._hub_cached.cache_clear()

        def load_dataset(*arguments: Any) -> datasets.DatasetDict:
            asked.append(arguments)
            return datasets.DatasetDict({name: datasets.Dataset.from_dict(rows) for name, rows in splits.items()})

        monkeypatch.setattr(datasets, "load_dataset", load_dataset)
        return asked

    def test_an_id_and_the_short_names(self, monkeypatch: pytest.MonkeyPatch) -> None:
        asked = self.hub(monkeypatch, train=ROWS, test=ROWS)
        train, test = load_items(QA, "gsm8k")
        assert train == [TaskItem("train-0", "Two and two?", "4")] and test == [TaskItem("test-0", "Two and two?", "4")]
        load_items(QA, "someone/sums")
        assert asked == [("openai/gsm8k", "main"), ("someone/sums", None)]

    def test_summaries_and_a_validation_split(self, monkeypatch: pytest.MonkeyPatch) -> None:
        articles = {"article": ["A"], "highlights": ["B"], "id": ["x1"]}
        asked = self.hub(monkeypatch, train=articles, validation=articles)
        assert load_items(SUMMARY, "cnn_dailymail") == ([TaskItem("x1", "A", "B")], [TaskItem("x1", "A", "B")])
        assert asked == [("abisee/cnn_dailymail", "3.0.0")]

    def test_no_train_split_or_other_columns(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.hub(monkeypatch, test=ROWS)
        with pytest.raises(ConfigurationError, match="no split named train"):
            load_items(QA, "someone/sums")
        self.hub(monkeypatch, train={"text": ["x"], "label": ["y"]})
        with pytest.raises(DataFormatError, match=r"someone/sums\[train\]\[0\]: has no 'question'"):
            load_items(QA, "someone/sums")

    def test_an_unreachable_hub_says_so(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def load_dataset(*arguments: Any):
            raise ConnectionError("no route")

        task_datasets._hub_cached.cache_clear()
        monkeypatch.setattr(datasets, "load_dataset", load_dataset)
        with pytest.raises(ConfigurationError, match=r"someone/sums.*could not be loaded.*no route"):
            load_items(QA, "someone/sums")


class Built:
    """Stands for a group of envs."""

    def __init__(self, item: TaskItem, key: tuple[int, int]):
        self.item, self.key = item, key


def make_dataset(items: int, groups: int, batches: int, seed: int | None = 0) -> TaskDataset:
    return TaskDataset([TaskItem(str(i), "q", "a") for i in range(items)], groups, batches, Built, seed)


def ids(dataset: TaskDataset, batch: int) -> list[str]:
    return [built.item.id for built in dataset.get_batch(batch)]  # pyright: ignore[reportAttributeAccessIssue]


class TestOrder:
    @given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 9), st.integers(0, 3), st.randoms())
    def test_any_order_of_access_gives_the_batches_of_sequential_access(
        self, items: int, groups: int, batches: int, seed: int, rng
    ) -> None:
        sequential = make_dataset(items, groups, batches, seed)
        expected = [ids(sequential, i) for i in range(batches)]
        order = [i for i in range(batches) for _ in range(2)]
        rng.shuffle(order)
        jumping = make_dataset(items, groups, batches, seed)
        assert [ids(jumping, i) for i in order] == [expected[i] for i in order]
        assert ids(make_dataset(items, groups, batches, seed), batches - 1) == expected[-1]

    def test_each_epoch_has_every_item_once_in_an_order_of_its_own(self) -> None:
        dataset = make_dataset(items=12, groups=4, batches=9, seed=3)
        stream = [item for batch in range(9) for item in ids(dataset, batch)]
        epochs = [tuple(stream[i : i + 12]) for i in (0, 12, 24)]
        assert all(sorted(epoch, key=int) == [str(i) for i in range(12)] for epoch in epochs)
        assert len(set(epochs)) == 3
        assert epochs[0] != tuple(ids(make_dataset(12, 12, 1, seed=4), 0))

    def test_builders_learn_their_batch_and_group(self) -> None:
        built = make_dataset(5, 2, 3).get_batch(2)
        assert [b.key for b in built] == [(2, 0), (2, 1)]  # pyright: ignore[reportAttributeAccessIssue]

    @pytest.mark.parametrize("index", [-1, 3])
    def test_outside_is_an_error(self, index: int) -> None:
        with pytest.raises(IndexError, match=f"batch {index} of 3"):
            make_dataset(5, 2, 3).get_batch(index)

    def test_an_evaluation_set_is_all_items_once_in_order(self) -> None:
        items = [TaskItem(str(i), "q", "a") for i in range(5)]
        dataset = evaluation_set(items, Built)
        assert dataset is not None and len(dataset) == 1 and ids(dataset, 0) == ["0", "1", "2", "3", "4"]
        assert evaluation_set([], Built) is None


@pytest.mark.parametrize("name", ["qa", "summary"])
def test_tasks_pickle(name: str) -> None:
    task = get_task(name)
    item = TaskItem("i", "q" * 50, "r")
    assert pickle.loads(pickle.dumps(task)).score(item, "<SOLUTION>r</SOLUTION>") == task.score(
        item, "<SOLUTION>r</SOLUTION>"
    )
