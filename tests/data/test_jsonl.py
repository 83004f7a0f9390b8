"""Every reader of JSONL files: blank lines and unknown keys do not matter, a wrong line is named by its number in the file."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from recipes.twenty_questions import Things
from tinker_cookbook.data.rows import read_file
from tinker_cookbook.distillation.datasets import load_prompts
from tinker_cookbook.env.task_data import load_items
from tinker_cookbook.env.tasks import get_task
from tinker_cookbook.exceptions import ConfigurationError, DataFormatError
from tinker_cookbook.preference.preference_datasets import ComparisonBuilderFromJsonl, read_comparisons
from tinker_cookbook.supervised.conversations import read_conversations
from tinker_cookbook.tool_use.ready_made import ArticleSearch

CHAT = [{"role": "user", "content": "Q\u2028\x85R"}, {"role": "assistant", "content": "A"}]
COMPARISON = {"prompt_conversation": CHAT[:1], "completion_A": CHAT[1:], "completion_B": CHAT[1:]}


class Reader(NamedTuple):
    """A way to read a file, a right line for it, and the number of what it makes of a file."""

    read: Callable[[str], Any]
    line: dict[str, Any]
    size: Callable[[Any], int] = len


READERS = {
    "rows": Reader(lambda path: read_file(path, lambda row: row.text("a"), '{"a": "..."}'), {"a": "x"}),
    "conversations": Reader(read_conversations, {"messages": CHAT}),
    "comparisons": Reader(read_comparisons, {"comparison": COMPARISON, "label": "A"}),
    "items": Reader(lambda path: load_items(get_task("qa"), path)[0], {"question": "Q", "answer": "A"}),
    "prompts": Reader(load_prompts, {"prompt": "Q"}),
    "prompts of conversations": Reader(load_prompts, {"messages": CHAT}),
    "articles": Reader(ArticleSearch.from_jsonl, {"article": "lamp"}, lambda search: len(search.articles)),
    "things": Reader(lambda path: Things.read(Path(path)), {"object": "o", "attributes": []}, lambda all: 2 * len(all.names)),
}  # fmt: skip


@pytest.fixture(params=READERS)
def reader(request: pytest.FixtureRequest) -> Reader:
    return READERS[request.param]


def write(path: Path, *lines: object) -> str:
    written = [line if isinstance(line, bytes) else json.dumps(line, ensure_ascii=False).encode() for line in lines]
    path.write_bytes(b"\n".join(written))
    return str(path)


@pytest.mark.parametrize("end", [b"", b"\n", b"\n\n \t\r\n"])
def test_blank_lines_and_other_keys_do_not_matter(tmp_path: Path, reader: Reader, end: bytes) -> None:
    path = write(tmp_path / "a.jsonl", b" ", reader.line, b"", {**reader.line, "source": [1], "weight": None}, end)
    assert reader.size(reader.read(path)) == 2


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        (b"{", "not valid JSON"),
        (b'{"a": NaN}', "not valid JSON (NaN"),
        (b"[" * 100_000, "not valid JSON"),
        (b'{"a": "\xff"}', "not UTF-8 text"),
        (b'["a"]', "a list and not an object"),
        (b'{"text": "x"}', ""),
    ],
)  # fmt: skip
def test_a_wrong_line_is_named_by_its_own_number(tmp_path: Path, reader: Reader, line: bytes, complaint: str) -> None:
    path = write(tmp_path / "a.jsonl", b"", reader.line, b" ", line, reader.line)
    with pytest.raises(DataFormatError) as raised:
        reader.read(path)
    message = str(raised.value)
    assert message.startswith(f"{path}:4: ") and complaint in message.removeprefix(path)
    assert "; expected " in message


def test_files_that_are_not_there_or_hold_nothing(tmp_path: Path, reader: Reader) -> None:
    with pytest.raises(
        ConfigurationError, match=r"none\.jsonl'.*no such file; name a .jsonl, .csv, .parquet file with"
    ):
        reader.read(str(tmp_path / "none.jsonl"))
    path = write(tmp_path / "empty.jsonl", b"", b" ")
    with pytest.raises(DataFormatError, match=r"empty\.jsonl: there is no row in it; expected "):
        reader.read(path)


def test_the_setting_that_names_the_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match=r"train_path='/no/such\.jsonl': there is no such file"):
        ComparisonBuilderFromJsonl(train_path="/no/such.jsonl").get_rows()
    with pytest.raises(ConfigurationError, match=r"dataset='/no/such\.jsonl': there is no such file"):
        load_items(get_task("qa"), "/no/such.jsonl")
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path / "mine.jsonl", {"messages": CHAT})
    (row,) = read_conversations("~/mine.jsonl")
    assert row.messages[0]["content"] == CHAT[0]["content"] and row.place == f"{tmp_path}/mine.jsonl:1"


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ({"b": "x"}, r"has no 'a' \(it has \['b'\]\)"),
        ({"a": ""}, "'a' must be a string that is not blank"),
        ({"a": None}, "'a' must be a string"),
        ({"a": True}, "'a' must be a string"),
        ({"a": ["x"]}, "'a' must be a string"),
    ],
)
def test_text_of_a_row(tmp_path: Path, row: dict[str, Any], complaint: str) -> None:
    path = write(tmp_path / "a.jsonl", {"a": 4, "c": "x"}, {"c": "y"}, row)
    with pytest.raises(DataFormatError, match=f"^{path}:3: {complaint}"):
        read_file(path, lambda row: row.text("a", "c"), '{"a": "..."}')
    assert read_file(write(tmp_path / "b.jsonl", {"c": "y", "a": 4}), lambda row: row.text("a", "c"), "") == ["4"]
