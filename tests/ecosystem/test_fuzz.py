"""What this library computes equals what the reference package computed on the same random cases (`fuzz.py`)."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.ecosystem import fuzz

GOLDEN: dict[str, list[Any]] = json.loads(Path(__file__).with_name("golden.json").read_text())


def same(ours: Any, theirs: Any) -> bool:
    """Numbers up to rounding in float32, all else exactly."""
    if isinstance(ours, dict):
        return ours.keys() == theirs.keys() and all(same(ours[key], theirs[key]) for key in ours)
    if isinstance(ours, list):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    if isinstance(ours, str):
        return bool(ours == theirs)
    return math.isclose(ours, theirs, rel_tol=2e-5, abs_tol=1e-6)


@pytest.mark.parametrize("subject", fuzz.SUBJECTS)
def test_the_reference_computes_the_same(subject: str) -> None:
    ours = json.loads(json.dumps(fuzz.run(subject)))
    assert len(ours) == len(GOLDEN[subject]) == fuzz.CASES
    for case, (found, told) in enumerate(zip(ours, GOLDEN[subject], strict=True)):
        assert same(found, told), (case, found, told)


def test_cases_differ_and_a_wrong_number_is_seen() -> None:
    for subject, cases in GOLDEN.items():
        assert len({json.dumps(case) for case in cases}) > fuzz.CASES / 2, subject
    assert (
        not same({"a": [1.0, 2.0]}, {"a": [1.0, 2.001]})
        and not same([1.0], [1.0, 1.0])
        and not same({"a": 1}, {"b": 1})
        and not same(["4f"], ["4e"])
    )
