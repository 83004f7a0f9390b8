"""Where a task's items come from: a shipped name, a file of one's own, or a Hugging Face dataset."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from tinker_cookbook.data import hub
from tinker_cookbook.data.rows import Row, is_data_file, read_file
from tinker_cookbook.data.shipped import EXAMPLE_DATA
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.tasks.types import Task, TaskItem

HUB_TASKS = ("cnn_dailymail", "gsm8k")
"""Short names of datasets on the hub."""


def load_items(task: Task, dataset: str, test_dataset: str | None = None) -> tuple[list[TaskItem], list[TaskItem]]:
    """Training and test items. Of a file all rows train; a file `test_dataset` gives the test items.

    Raises ConfigurationError for an unknown dataset; DataFormatError, with file and line, for a row that lacks something.
    """
    if dataset in task.shipped:
        train, test = (_read_file(task, EXAMPLE_DATA / file) for file in task.shipped[dataset])
    elif is_data_file(dataset) or Path(dataset).expanduser().is_file():
        train, test = _read_file(task, dataset), []
    elif hub.find(dataset, HUB_TASKS) is not None:
        train, test = _read_hub(type(task), dataset)
    else:
        raise ConfigurationError(
            f"dataset={dataset!r} is unknown to task={task.name}; use a shipped name ({', '.join(task.shipped)}), a .jsonl/"
            f".csv/.parquet file with {_expected(task)} per row, or a Hugging Face dataset id (owner/name)"
        )
    if test_dataset is not None:
        other_train, other_test = load_items(task, test_dataset)
        test = other_test or other_train
    return train, test


def _read_file(task: Task, path: str | Path) -> list[TaskItem]:
    name = Path(path).stem
    return read_file(path, lambda row: _item(task, row, f"{name}-{row.number}"), _expected(task), "dataset")


@lru_cache(maxsize=4)  # a run asks several times, and some hub sets are large
def _read_hub(task: type[Task], name: str) -> tuple[list[TaskItem], list[TaskItem]]:
    found = hub.find(name, HUB_TASKS)
    assert found is not None
    splits = hub.load(found.repository, config=found.config)
    if "train" not in splits:
        raise ConfigurationError(f"dataset={name!r} has no split named train; it has {', '.join(sorted(splits))}")

    def items(split: str) -> list[TaskItem]:
        return hub.read_rows(
            splits[split], f"{name}[{split}]", lambda row: _item(task, row, f"{split}-{row.number}"), _expected(task)
        )

    test_split = next((split for split in ("test", "validation") if split in splits), None)
    return items("train"), items(test_split) if test_split else []


def _item(task: Task | type[Task], row: Row, default_id: str) -> TaskItem:
    question, reference = (row.text(*names) for names in task.columns)
    return TaskItem(str(row.content.get("id", default_id)), question, task.read_reference(reference))


def _expected(task: Task | type[Task]) -> str:
    return "{" + ", ".join(f'"{names[0]}": "..."' for names in task.columns) + "}"
