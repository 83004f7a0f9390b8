"""The helper that kills runs: it dies where it is told to, and a point that is never reached is a failure."""

import asyncio
from pathlib import Path

import pytest

from tests import killing
from tests.killing import KillPoint
from tinker_cookbook.utils import files
from tinker_cookbook.utils.files import append_jsonl, read_jsonl

LINE = "tests.test_killing:append_jsonl"
PAUSE = "tests.test_killing:pause"


async def pause(path: Path) -> None:
    await asyncio.sleep(0)
    append_jsonl(path, {"paused": True})


def three_lines(log_path: Path) -> None:
    """Appends lines 0, 1, 2; then one from a coroutine."""
    log_path.mkdir(exist_ok=True)
    for n in range(3):
        append_jsonl(log_path / "lines.jsonl", {"n": n})
    asyncio.run(pause(log_path / "lines.jsonl"))


@pytest.mark.parametrize(
    ("kill", "left"),
    [
        (KillPoint(LINE, 3), [{"n": 0}, {"n": 1}]),
        (KillPoint(LINE, 1, "after"), [{"n": 0}]),
        (KillPoint(PAUSE, 1), [{"n": 0}, {"n": 1}, {"n": 2}]),
        (KillPoint(PAUSE, 1, "after"), [{"n": 0}, {"n": 1}, {"n": 2}, {"paused": True}]),
    ],
    ids=str,
)
def test_it_dies_where_it_is_told_to(tmp_path: Path, kill: KillPoint, left: list[dict]) -> None:
    killing.run_once(three_lines, tmp_path, kill)
    assert read_jsonl(tmp_path / "log" / "lines.jsonl") == left


def test_a_torn_line_is_half_of_one(tmp_path: Path) -> None:
    killing.run_once(three_lines, tmp_path, KillPoint(LINE, 2, "torn"))
    path = tmp_path / "log" / "lines.jsonl"
    assert path.read_text() == '{"n": 0}\n{"n"'
    assert read_jsonl(path, tolerate_torn_tail=True) == [{"n": 0}]


def test_a_point_that_is_never_reached_fails(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"exit code 0 with kill point before-test_killing\.append_jsonl-9"):
        killing.run_once(three_lines, tmp_path, KillPoint(LINE, 9))


def test_a_run_that_fails_shows_what_it_printed(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"(?s)exit code 1 with kill point None.*NotADirectoryError"):
        killing.run_once(not_a_folder, tmp_path, None)


def not_a_folder(log_path: Path) -> None:
    log_path.write_text("")
    three_lines_in_a_file = log_path / "lines.jsonl"
    files.append_jsonl(three_lines_in_a_file, {})


@pytest.mark.parametrize(
    "name", [name for name in vars(killing) if name.isupper() and isinstance(getattr(killing, name), str)]
)
def test_the_named_points_exist(name: str) -> None:
    owner, attribute = killing.resolve(getattr(killing, name))
    assert callable(getattr(owner, attribute))
