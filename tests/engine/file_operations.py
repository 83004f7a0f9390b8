"""How often a piece of code asks the file system for something."""

import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

_AUDITED = {"open", "os.listdir", "os.scandir", "os.rename", "os.mkdir", "os.rmdir", "os.remove", "sqlite3.connect"}
_counting: list[Counter[str]] = []


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if _counting and event in _AUDITED:
        _counting[-1][event] += 1


sys.addaudithook(_hook)  # for good, but it does nothing as long as nobody counts


@contextmanager
def file_operations() -> Iterator[Counter[str]]:
    """Those within, by kind, on any thread; "stat" is os.stat and os.lstat together."""
    counts: Counter[str] = Counter()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("stat", "lstat"):
            original = getattr(os, name)

            def counted(*args: Any, original: Any = original, **kwargs: Any) -> os.stat_result:
                counts["stat"] += 1
                return original(*args, **kwargs)

            patch.setattr(os, name, counted)
        _counting.append(counts)
        try:
            yield counts
        finally:
            _counting.remove(counts)
