"""The questions of the task collatz are made again byte for byte, and hold what they promise."""

import random
from pathlib import Path

import pytest

from tinker_cookbook.data.shipped import EXAMPLE_DATA
from tinker_cookbook.tasks.collatz import next_number
from tinker_cookbook.utils.files import read_jsonl
from tools.make_tiny_debate.data_files import write_all
from tools.make_tiny_debate.trails import LARGEST, STARTS, WORLD, is_misconceived, mistakes, trail, write


@pytest.mark.parametrize("name", ["train", "test"])
def test_data_files_are_made_again_byte_for_byte(tmp_path: Path, name: str) -> None:
    write_all(tmp_path)
    file = f"collatz/{name}.jsonl"
    assert (tmp_path / file).read_bytes() == (EXAMPLE_DATA / file).read_bytes()


def test_held_out_questions_are_new_and_answers_are_right() -> None:
    rows = {name: read_jsonl(EXAMPLE_DATA / "collatz" / f"{name}.jsonl") for name in ("train", "test")}
    asked = {name: {row["question"] for row in found} for name, found in rows.items()}
    assert not asked["train"] & asked["test"]
    assert len(asked["train"] | asked["test"]) == len(STARTS)
    for row in rows["train"] + rows["test"]:
        number = int(row["question"])
        for _ in range(7):
            number = next_number(number)
        assert row["answer"] == str(number)


def test_no_right_step_leads_out_of_the_world() -> None:
    assert all(next_number(number) in WORLD and number <= LARGEST for number in WORLD)
    assert all(4 not in (start, *trail(start)[:-1]) for start in STARTS)


def test_writers_slip_rarely_and_share_a_misconception() -> None:
    rng = random.Random(0)
    written = [(start, write(start, rng)) for start in STARTS for _ in range(40)]
    steps = [
        (is_misconceived(number) and next_number(number) - 5 in WORLD, i in mistakes(start, numbers))
        for start, numbers in written
        for i, number in enumerate([start, *numbers[:-1]])
    ]
    shared = [wrong for misconceived, wrong in steps if misconceived]
    slips = [wrong for misconceived, wrong in steps if not misconceived]
    assert sum(shared) / len(shared) > 0.5
    assert 0.02 < sum(slips) / len(slips) < 0.04
    right = sum(not mistakes(start, numbers) for start, numbers in written) / len(written)
    assert 0.3 < right < 0.6
