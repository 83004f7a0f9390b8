"""Columns made of buffers are those that pyarrow makes of the same values, and nothing of it imports pandas."""

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.child import python_path
from tests.drawn import examples
from tests.waiting import HANG_SECONDS
from tinker_cookbook.stores import columns

INTEGERS = st.integers(-(2**31), 2**31 - 1)
FLOATS = st.floats(allow_nan=False)
KINDS: dict[str, st.SearchStrategy[Any]] = {
    "int32": INTEGERS,
    "float64": FLOATS | st.integers(-5, 5),
    "bool": st.booleans(),
}


@pytest.mark.parametrize("kind", KINDS)
@examples(40)
@given(data=st.data())
def test_numbers_are_those_of_pyarrow(kind: str, data: st.DataObject) -> None:
    values = data.draw(st.lists(st.none() | KINDS[kind], max_size=20))
    made = columns.numbers(values, kind)
    made.validate(full=True)
    assert made.equals(pyarrow.array(values, type=pyarrow.type_for_alias(kind)))


@examples(60)
@given(values=st.lists(st.none() | st.text(max_size=8), max_size=20))
def test_texts_are_those_of_pyarrow(values: list[str | None]) -> None:
    made = columns.texts(values, "string")
    made.validate(full=True)
    assert made.equals(pyarrow.array(values, type=pyarrow.string()))
    coded = [None if value is None else value.encode("utf-16") for value in values]
    assert columns.texts(coded, "binary").equals(pyarrow.array(coded, type=pyarrow.binary()))


@examples(60)
@given(values=st.lists(st.none() | st.lists(INTEGERS, max_size=5), max_size=20))
def test_lists_are_those_of_pyarrow(values: list[list[int] | None]) -> None:
    made = columns.lists([None if value is None else np.array(value, dtype=np.int32) for value in values], "int32")
    made.validate(full=True)
    assert made.equals(pyarrow.array(values, type=pyarrow.list_(pyarrow.int32())))
    cut = len(values) // 2
    column = pyarrow.chunked_array([made[:cut], made[cut:]])
    assert [None if row is None else row.tolist() for row in columns.arrays_of(column)] == values


def test_a_float_that_is_not_a_number_is_a_value() -> None:
    made = columns.numbers([1.5, math.nan, None], "float64")
    assert made.null_count == 1 and math.isnan(made[1].as_py())


@pytest.mark.parametrize(
    ("kind", "value"), [("int32", 0.5), ("int32", "1"), ("bool", 1), ("float64", "1"), ("int32", 2**31)]
)
def test_a_value_of_another_kind_is_refused(kind: str, value: object) -> None:
    with pytest.raises((TypeError, OverflowError)):
        columns.numbers([None, value], kind)


def test_a_column_beyond_what_offsets_count_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columns, "_LARGEST_OFFSET", 3)
    assert columns.texts(["abc"], "string").to_pylist() == ["abc"]
    with pytest.raises(ValueError, match="4 values or bytes is larger than a file can have"):
        columns.texts(["ab", "cd"], "string")


def test_a_run_that_is_recorded_and_read_imports_no_pandas(tmp_path: Path) -> None:
    """The whole recipe with its records, vocabulary and the table at its end, in a process of its own."""
    code = (
        "import sys\n"
        "from recipes import rl_basic\n"
        "from tinker_cookbook.cli_utils import run_recipe\n"
        "from tinker_cookbook.stores.storage import LocalStorage\n"
        "from tinker_cookbook.stores.training_store import TrainingRunStore\n"
        "run_recipe(rl_basic.CLIConfig, rl_basic.main, argv=sys.argv[1:])\n"
        f"store = TrainingRunStore(LocalStorage({str(tmp_path / 'run')!r}))\n"
        "assert store.read_vocabulary()\n"
        "assert store.read_turns(0)\n"
        "assert 'pyarrow' in sys.modules and 'pandas' not in sys.modules, 'pandas is imported'\n"
    )
    keys = ["max_steps=1", "groups_per_batch=2", "num_test=2", "max_tokens=8", f"log_path={tmp_path / 'run'}"]
    env = {**os.environ, "PYTHONPATH": python_path(), "TINKER_LOCAL_HOME": str(tmp_path / "home")}
    command = [sys.executable, "-c", code, *keys]
    child = subprocess.run(command, capture_output=True, text=True, env=env, timeout=HANG_SECONDS)
    assert child.returncode == 0, child.stderr
