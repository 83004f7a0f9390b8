"""Local files in the usual forms: JSONL, CSV and parquet, with the columns that other people's tools write."""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from tinker_cookbook.data.rows import read_file
from tinker_cookbook.env.task_data import load_items
from tinker_cookbook.env.tasks import get_task
from tinker_cookbook.exceptions import DataFormatError
from tinker_cookbook.preference.preference_datasets import read_comparisons
from tinker_cookbook.supervised.conversations import read_conversations

USER, ASSISTANT = {"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}
WORSE = {"role": "assistant", "content": "5"}
Rows = list[dict[str, Any]]


def write_jsonl(folder: Path, rows: Rows) -> str:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def write_csv(folder: Path, rows: Rows) -> str:
    """Lists, which a cell cannot hold, as JSON."""
    path = folder / "rows.csv"
    with open(path, "w", encoding="utf-8-sig", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        for row in rows:
            writer.writerow({k: json.dumps(v) if isinstance(v, list) else v for k, v in row.items()})
    return str(path)


def write_parquet(folder: Path, rows: Rows) -> str:
    path = folder / "rows.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return str(path)


WRITERS = [write_jsonl, write_csv, write_parquet]
Write = Callable[[Path, Rows], str]


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize(
    "row",
    [
        {"messages": [USER, ASSISTANT]},
        {"prompt": "2 + 2?", "completion": "4"},
        {"question": "2 + 2?", "answer": "4"},
        {"prompt": "2 + 2?", "completion": "4", "source": "somewhere", "weight": 1},
    ],
)
def test_conversations(tmp_path: Path, write: Write, row: dict[str, Any]) -> None:
    path = write(tmp_path, [row, row])
    found = read_conversations(path)
    assert [each.messages for each in found] == [[USER, ASSISTANT]] * 2
    assert all(each.place.startswith(path) for each in found) and found[0].place != found[1].place


@pytest.mark.parametrize("write", [write_jsonl, write_parquet])
def test_prompt_and_completion_as_messages(tmp_path: Path, write: Write) -> None:
    system = {"role": "system", "content": "Be brief."}
    (found,) = read_conversations(write(tmp_path, [{"prompt": [system, USER], "completion": [ASSISTANT]}]))
    assert found.messages == [system, USER, ASSISTANT]


@pytest.mark.parametrize("write", WRITERS)
def test_text_pairs_as_comparisons(tmp_path: Path, write: Write) -> None:
    rows = [{"prompt": "2 + 2?", "chosen": "4", "rejected": "5"} for _ in range(16)]
    found = [row.labeled for row in read_comparisons(write(tmp_path, rows))]
    assert all(each.chosen == [ASSISTANT] and each.rejected == [WORSE] for each in found)
    assert all(each.comparison.prompt_conversation == [USER] for each in found)
    assert {each.label for each in found} == {"A", "B"}, "neither side is favoured"


@pytest.mark.parametrize("write", [write_jsonl, write_parquet])
@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [USER], "chosen": [ASSISTANT], "rejected": [WORSE]},
        {"chosen": [USER, ASSISTANT], "rejected": [USER, WORSE]},
        {"prompt": "2 + 2?", "chosen": [USER, ASSISTANT], "rejected": [USER, WORSE]},
    ],
)
def test_pairs_of_messages_as_comparisons(tmp_path: Path, write: Write, row: dict[str, Any]) -> None:
    (found,) = read_comparisons(write(tmp_path, [row]))
    assert found.labeled.chosen == [ASSISTANT] and found.labeled.rejected == [WORSE]
    assert found.labeled.comparison.prompt_conversation == [USER]


@pytest.mark.parametrize("write", WRITERS)
def test_questions_and_answers_as_items_of_a_task(tmp_path: Path, write: Write) -> None:
    items, _ = load_items(get_task("qa"), write(tmp_path, [{"question": "2 + 2?", "answer": "4"}]))
    assert [(item.question, item.reference) for item in items] == [("2 + 2?", "4")]


def test_rows_of_a_table_are_named(tmp_path: Path) -> None:
    table = write_csv(tmp_path, [{"a": "x"}, {"a": ""}])
    with pytest.raises(DataFormatError, match=r"rows\.csv:3: has no 'a' \(it has \[\]\)"):
        read_file(table, lambda row: row.text("a"), "a")
    table = write_parquet(tmp_path, [{"a": "x"}, {"a": None}])
    with pytest.raises(DataFormatError, match=r"rows\.parquet\[1\]: has no 'a'"):
        read_file(table, lambda row: row.text("a"), "a")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.parquet", b"not a table", "not a parquet table"),
        ("a.csv", b"a,b\nx\n", "a.csv:2: the number of cells differs from the header"),
        ("a.csv", b'a\n"x\n', "not a CSV table"),
        ("a.csv", b"a\n\xff\n", "not a CSV table in UTF-8"),
    ],
)
def test_tables_that_are_none_are_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataFormatError, match=message):
        read_file(tmp_path / name, lambda row: row.text("a"), "a")
