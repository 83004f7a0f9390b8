"""CONTRIBUTING.md names tests that exist, at least one for each promise."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SECTION = (ROOT / "CONTRIBUTING.md").read_text().partition("\n## What is promised")[2].partition("\n## ")[0]
PROMISES = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in SECTION.splitlines()
    if line.startswith("| ") and not line.startswith("| promise")
]


@cache
def known_tests(file: str) -> set[str]:
    """`test_name` and `Class::test_name` of a file."""
    found = set()
    for node in ast.parse((ROOT / file).read_text()).body:
        for part in node.body if isinstance(node, ast.ClassDef) else [node]:
            if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef) and part.name.startswith("test_"):
                found.add(f"{node.name}::{part.name}" if isinstance(node, ast.ClassDef) else part.name)
    return found


def test_every_promise_of_the_house_is_listed() -> None:
    assert len(PROMISES) == 36
    assert all(len(row) == 2 and row[0].endswith(".") for row in PROMISES)


@pytest.mark.parametrize("promise", PROMISES, ids=lambda row: row[0][:40])
def test_a_promise_has_tests_that_exist(promise: list[str]) -> None:
    named = re.findall(r"`(tests/[^`]+)`", promise[1])
    assert named and re.sub(r"`[^`]+`|[, |]", "", promise[1]) == ""
    for test in named:
        file, _, name = test.partition("::")
        assert (ROOT / file).is_file(), f"{test}: there is no such file"
        assert name in known_tests(file), f"{test}: the file has no such test"
