"""What must hold for files: whole or absent, torn tails dropped, every object written as plain JSON."""

import dataclasses
import enum
import json
import math
import os
from pathlib import Path
from typing import Any

import chz
import numpy as np
import pytest
import torch

from tinker_cookbook.exceptions import DataFormatError, DataValidationError
from tinker_cookbook.utils.files import (
    append_jsonl,
    flatten,
    read_jsonl,
    to_jsonable,
    truncate_jsonl,
    write_json,
    write_text,
)


class Color(enum.Enum):
    RED = "red"


@dataclasses.dataclass
class Point:
    x: int
    color: Color


@chz.chz
class Inner:
    rate: float = 0.5


@chz.chz
class Config:
    inner: Inner
    name: str = "a"
    reward: Any = max


class TestJson:
    def test_numbers_of_numpy_and_torch_become_numbers(self) -> None:
        row = to_jsonable({"a": np.float32(0.5), "b": np.int64(3), "c": torch.tensor(2.0), "d": np.bool_(True)})
        assert row == {"a": 0.5, "b": 3, "c": 2.0, "d": True}
        assert [type(value) for value in row.values()] == [float, int, float, bool]

    def test_arrays_become_lists(self) -> None:
        assert to_jsonable([np.arange(3), torch.zeros(1, 2)]) == [[0, 1, 2], [[0.0, 0.0]]]

    def test_dataclasses_enums_sets_paths_and_functions(self) -> None:
        assert to_jsonable(Point(1, Color.RED)) == {"x": 1, "color": "red"}
        assert to_jsonable({Color.RED: {"b", "a"}}) == {"red": ["a", "b"]}
        assert to_jsonable(Path("a/b")) == "a/b"
        assert to_jsonable(flatten) == "tinker_cookbook.utils.files.flatten"

    def test_chz_objects_carry_their_class(self) -> None:
        dumped = to_jsonable(Config(inner=Inner()))
        assert dumped == {
            "class": f"{__name__}.Config",
            "inner": {"class": f"{__name__}.Inner", "rate": 0.5},
            "name": "a",
            "reward": "builtins.max",
        }

    def test_anything_else_is_named_by_its_type(self) -> None:
        assert to_jsonable(object()) == "<class 'object'>"

    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, np.float32("nan"), torch.tensor(math.inf)])
    def test_nan_and_infinity_are_errors_that_name_the_key(self, bad: Any) -> None:
        with pytest.raises(DataValidationError, match=r"^loss\.parts\[1\]: "):
            to_jsonable({"loss": {"parts": [0.0, bad]}})

    def test_keys_with_equal_text_are_an_error(self) -> None:
        with pytest.raises(DataValidationError, match="'1'"):
            to_jsonable({1: "a", "1": "b"})

    def test_flatten_keeps_lists_and_empty_dicts_as_leaves(self) -> None:
        assert flatten({"a": {"b": [1], "c": {}}, "d": 2}) == {"a.b": [1], "a.c": {}, "d": 2}


class TestWholeFiles:
    def test_a_failed_write_leaves_the_old_file_and_no_other(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = tmp_path / "a.json"
        write_json(path, {"a": 1})

        def fail(*_: Any) -> None:
            raise OSError("disk")

        monkeypatch.setattr(os, "replace", fail)
        with pytest.raises(OSError, match="disk"):
            write_json(path, {"a": 2})
        assert json.loads(path.read_text()) == {"a": 1}
        assert os.listdir(tmp_path) == ["a.json"]

    def test_an_object_that_cannot_be_encoded_writes_nothing(self, tmp_path: Path) -> None:
        with pytest.raises(DataValidationError):
            write_json(tmp_path / "a.json", {"a": math.nan})
        with pytest.raises(DataValidationError):
            append_jsonl(tmp_path / "a.jsonl", {"a": math.nan})
        assert os.listdir(tmp_path) == []

    def test_text_is_written_as_it_is(self, tmp_path: Path) -> None:
        write_text(tmp_path / "a", "één\r\n")
        assert (tmp_path / "a").read_bytes() == "één\r\n".encode()


class TestJsonLines:
    def test_rows_come_back_in_order(self, tmp_path: Path) -> None:
        rows = [{"step": 0, "text": "a\u2028b\nc"}, {"step": 1, "loss": 0.1}]
        for row in rows:
            append_jsonl(tmp_path / "m.jsonl", row)
        assert read_jsonl(tmp_path / "m.jsonl") == rows
        assert (tmp_path / "m.jsonl").read_bytes().count(b"\n") == 2

    @pytest.mark.parametrize("line", ["{", "3", '{"a": NaN}', "\udcff"])
    def test_a_bad_line_is_named_by_file_and_line(self, tmp_path: Path, line: str) -> None:
        path = tmp_path / "m.jsonl"
        path.write_bytes(b'{"a": 1}\n\n' + line.encode(errors="surrogateescape") + b'\n{"a": 2}\n')
        for tolerate in (False, True):
            with pytest.raises(DataFormatError, match=rf"^{path}:3: "):
                read_jsonl(path, tolerate_torn_tail=tolerate)

    def test_a_torn_tail_is_dropped_only_if_asked(self, tmp_path: Path) -> None:
        path = tmp_path / "m.jsonl"
        path.write_bytes(b'{"a": 1}\n{"a": "\xc3')
        assert read_jsonl(path, tolerate_torn_tail=True) == [{"a": 1}]
        with pytest.raises(DataFormatError, match=rf"^{path}:2: "):
            read_jsonl(path)

    def test_appending_replaces_a_torn_tail(self, tmp_path: Path) -> None:
        path = tmp_path / "m.jsonl"
        for torn, kept in ((b'{"a": 1}\n{"a": 2', [{"a": 1}]), (b'{"a', []), (b'{"a": 1}', [{"a": 1}])):
            path.write_bytes(torn)
            append_jsonl(path, {"a": 3})
            assert read_jsonl(path) == [*kept, {"a": 3}]

    def test_truncation_keeps_lines_byte_for_byte(self, tmp_path: Path) -> None:
        path = tmp_path / "m.jsonl"
        path.write_text('{"step":0,  "x": 1e-5}\n{"step": 1}\n{"note": "é"}\n{"step": 2}\n{"step"')
        assert truncate_jsonl(path, lambda row: row.get("step", 0) < 1) == 2
        assert path.read_text() == '{"step":0,  "x": 1e-5}\n{"note": "é"}\n'
        assert truncate_jsonl(tmp_path / "absent.jsonl", lambda row: True) == 0
