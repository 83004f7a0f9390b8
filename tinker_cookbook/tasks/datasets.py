"""Where a task's items come from: a shipped name, a JSONL file of one's own, or a Hugging Face dataset."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import cast

from tinker_cookbook.data.shipped import EXAMPLE_DATA
from tinker_cookbook.exceptions import ConfigurationError, DataFormatError
from tinker_cookbook.tasks.types import Task, TaskItem

HUB_ALIASES = {"cnn_dailymail": ("abisee/cnn_dailymail", "3.0.0"), "gsm8k": ("openai/gsm8k", "main")}


@lru_cache(maxsize=4)
def _hub_cached(task_type: type[Task], name: str) -> tuple[list[TaskItem], list[TaskItem]]:
    return _read_hub(task_type, name)


def load_items(task: Task, dataset: str, test_dataset: str | None = None) -> tuple[list[TaskItem], list[TaskItem]]:
    """Training and test items. Of a JSONL file all lines train; a file `test_dataset` gives the test items.

    Raises:
        ConfigurationError: no such dataset.
        DataFormatError: a line or row lacks what the task needs; the message names file and line.
    """
    if dataset in task.shipped:
        train, test = (_read_file(task, EXAMPLE_DATA / file) for file in task.shipped[dataset])
    elif dataset.endswith(".jsonl") or Path(dataset).exists():
        train, test = _read_file(task, Path(dataset).expanduser()), []
    elif "/" in dataset or dataset in HUB_ALIASES:
        train, test = _hub_cached(type(task), dataset)  # a run asks several times, and some hub sets are large
    else:
        raise ConfigurationError(
            f"dataset={dataset!r} is unknown to task={task.name}; use a shipped name ({', '.join(task.shipped)}), a .jsonl file "
            f"with {_expected(task)} per line, or a Hugging Face dataset id (owner/name)"
        )
    if test_dataset is not None:
        other_train, other_test = load_items(task, test_dataset)
        test = other_test or other_train
    return train, test


def _read_file(task: Task, path: Path) -> list[TaskItem]:
    if not path.is_file():
        raise ConfigurationError(f"dataset={str(path)!r}: no such file")
    items = []
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            where = f"{path}:{number}"
            try:
                row = json.loads(line.decode("utf-8"))
            except ValueError as error:  # also UnicodeDecodeError
                raise DataFormatError(f"{where}: not JSON in UTF-8 ({error}); expected {_expected(task)}") from None
            if not isinstance(row, dict):
                raise DataFormatError(f"{where}: not an object; expected {_expected(task)}")
            items.append(_item(task, row, where, f"{path.stem}-{number}"))
    if not items:
        raise DataFormatError(f"{path}: empty; expected one {_expected(task)} per line")
    return items


def _read_hub(task: Task | type[Task], name: str) -> tuple[list[TaskItem], list[TaskItem]]:
    import datasets

    repository, config = HUB_ALIASES.get(name, (name, None))
    try:
        splits = datasets.load_dataset(repository, config)
    except Exception as error:  # the hub raises many kinds, all of which mean that the dataset is not to be had
        raise ConfigurationError(f"dataset={name!r} could not be loaded from the Hugging Face hub: {error}") from error
    if not isinstance(splits, Mapping) or "train" not in splits:
        raise ConfigurationError(f"dataset={name!r} has no split named train")

    def items(split: str) -> list[TaskItem]:
        rows = cast(Iterable[Mapping], splits[split])
        return [_item(task, row, f"{name}[{split}][{i}]", f"{split}-{i}") for i, row in enumerate(rows)]

    test_split = next((split for split in ("test", "validation") if split in splits), None)
    return items("train"), items(test_split) if test_split else []


def _item(task: Task | type[Task], row: Mapping, where: str, default_id: str) -> TaskItem:
    question, reference = (_column(row, names, where, task) for names in task.columns)
    return TaskItem(str(row.get("id", default_id)), question, task.read_reference(reference))


def _column(row: Mapping, names: tuple[str, ...], where: str, task: Task | type[Task]) -> str:
    for name in names:
        if name in row:
            value = row[name]
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                value = str(value)
            if not isinstance(value, str) or not value.strip():
                raise DataFormatError(f"{where}: {name!r} must be a non-empty string; expected {_expected(task)}")
            return value
    raise DataFormatError(f"{where}: has no {names[0]!r} (it has {sorted(row)}); expected {_expected(task)}")


def _expected(task: Task | type[Task]) -> str:
    return "{" + ", ".join(f'"{names[0]}": "..."' for names in task.columns) + "}"
