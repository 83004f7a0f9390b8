"""The loop in one file: what a reader of `rl/train.py` looks for stands there, and the synchronous loop needs no other pacing."""

import ast
import inspect
import re
import textwrap
from pathlib import Path

import pytest

from tinker_cookbook.rl import batches, train

MARKS = {
    "Here a batch is filtered": (train.Loop.prepare, "remove_constant="),
    "Here the KL penalty enters": (train.Loop.prepare, "penalties="),
    "Here a checkpoint is written": (train.Loop.log_and_save, "if session.checkpoints.should_save("),
}
"""How a comment begins -> the function that it stands in, and how the first line of code below it begins."""

MOST_LINES = 360


@pytest.mark.parametrize("mark", MARKS)
def test_a_comment_says_where_it_happens(mark: str) -> None:
    assert Path(inspect.getfile(train)).read_text().count(f"# {mark}") == 1
    function, code = MARKS[mark]
    _, found, below = inspect.getsource(function).partition(f"# {mark}")
    assert found
    lines = [line.strip() for line in below.splitlines()[1:]]
    assert next(line for line in lines if not line.startswith("#")).startswith(code)


def test_the_steps_of_the_loop_stand_in_their_order() -> None:
    source = inspect.getsource(train.Loop._take_steps) + inspect.getsource(train.Loop.train)
    source += inspect.getsource(train.Loop.log_and_save)
    steps = ("evaluate(", "anext(", "self.train(", "self.log_and_save(")
    steps += ("self.prepare(", "self.update(", "write_records(", "log_metrics(", "maybe_save(")
    places = [source.index(step) for step in steps]
    assert places == sorted(places)


def test_the_loop_is_read_in_one_sitting() -> None:
    assert len(Path(inspect.getfile(train)).read_text().splitlines()) <= MOST_LINES


def test_a_reader_of_the_synchronous_loop_needs_none_of_the_others() -> None:
    tree = ast.parse(textwrap.dedent(inspect.getsource(batches.sync_batches)))
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    assert names.isdisjoint({"PendingGroups", "StepInProgress", "Update", "Minibatch"})
    assert len(inspect.getsource(batches.sync_batches).splitlines()) <= 40
    code = re.sub(r'""".*?"""', "", inspect.getsource(batches.sync_batches), flags=re.DOTALL)
    assert not re.search("ahead|pending|stream|async_", code)
