"""Calls of programs that others wrote, and what becomes of each over the server. docs/frameworks.md has a row for each."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.child import ROOT
from tests.server.serving import Serving

PAGE = ROOT / "docs" / "frameworks.md"
WORKS = "works"


@dataclass(frozen=True)
class Served:
    """What a call is made to."""

    serving: Serving
    model: str
    """base model"""
    caller: str
    """the path of a checkpoint that answers a question with the call of a tool"""
    folder: Path
    """for files of the client's"""

    @property
    def openai_url(self) -> str:
        return f"{self.serving.url}/v1"


@dataclass(frozen=True)
class Call:
    """A call that asserts what must hold of its answer, or is refused.

    Args:
        refused: a part of what the error says; None: the call works.
    """

    ask: Callable[[Any], object]
    refused: str | None = None

    @property
    def outcome(self) -> str:
        return WORKS if self.refused is None else f"refused: {self.refused}"

    def check(self, of: Any) -> None:
        if self.refused is None:
            self.ask(of)
            return
        with pytest.raises(Exception) as error:
            self.ask(of)
        said = f"{error.value} {error.value.__cause__ or ''}"
        assert self.refused in said, said


def rows(title: str) -> list[tuple[str, str]]:
    """Call and outcome of each row below a title of the page."""
    section = PAGE.read_text().partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    return re.findall(r"^\| `(.+?)` \| (.+?) \|$", section, re.MULTILINE)


def table(calls: dict[str, Call]) -> list[tuple[str, str]]:
    return [(name, call.outcome) for name, call in calls.items()]


def assert_called(name: str, arguments: str | dict[str, Any]) -> None:
    """What `caller` answers."""
    assert name == "add"
    assert (json.loads(arguments) if isinstance(arguments, str) else arguments) == {"a": 7, "b": 5}
