"""What a section found, kept in a file from the first row on, so that a section that is cut off loses nothing."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.report import Table, number, write_atomically
from tinker_local_backend.engine.model.memory import out_of_memory

RUNNING, COMPLETE = "running", "complete"


@dataclass(frozen=True)
class Check:
    """Something that must hold: `measured` at most `bound`, or a yes-or-no question (then both are None)."""

    name: str
    ok: bool
    measured: float | None = None
    bound: float | None = None
    detail: str = ""

    @property
    def row(self) -> list[str]:
        values = ["" if value is None else number(value) for value in (self.measured, self.bound)]
        return [self.name, "ok" if self.ok else "FAILED", *values, self.detail]


@dataclass
class Findings:
    """One section: its checks, tables and raw values. Every addition is written to `path` at once.

    `limit` is the number of seconds that the section may take; whoever has a list of things to measure asks `time_is_up`
    between two of them and says with `leave_out` what was not done.
    """

    section: str
    path: Path | None = None
    limit: float = float("inf")
    status: str = RUNNING
    seconds: float = 0.0
    checks: list[Check] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    data: dict[str, object] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    _started: float = field(default_factory=time.monotonic)

    @property
    def time_is_up(self) -> bool:
        return time.monotonic() - self._started > self.limit

    def mark(self, key: str, value: float) -> None:
        """What was measured for a mark (marks.py)."""
        measured = self.data.setdefault("marks", {})
        assert isinstance(measured, dict)
        measured[key] = value
        self.save()

    def record(self, kind: str, **values: str | float | bool) -> None:
        """What a row of a table says, as numbers: advice.py reads them."""
        records = self.data.setdefault("records", [])
        assert isinstance(records, list)
        records.append({"kind": kind, **values})
        self.save()

    def leave_out(self, what: str) -> None:
        """Note something that was not measured because the time was up."""
        self.left_out.append(what)
        self.save()

    def check(self, name: str, measured: float, bound: float, detail: str = "") -> None:
        """A number that must not exceed a bound; NaN does."""
        self._add(Check(name, measured <= bound, float(measured), float(bound), detail))

    def require(self, name: str, ok: bool, detail: str = "") -> None:
        """A question whose answer must be yes."""
        self._add(Check(name, bool(ok), detail=detail))

    def _add(self, check: Check) -> None:
        print(
            f"  {'ok    ' if check.ok else 'FAILED'} {check.name}: {' '.join(filter(None, check.row[2:]))}", flush=True
        )
        self.checks.append(check)
        self.save()

    @contextmanager
    def guarded(self, name: str) -> Iterator[None]:
        """What raises within is a failed check of this name, and the section goes on."""
        try:
            yield
        except Exception as error:
            self._add(Check(name, False, detail=describe(error)))

    def table(self, title: str, columns: Sequence[str]) -> Callable[[Sequence[str]], None]:
        """A new table. Returns what adds a row to it."""
        table = Table(title, list(columns), [])
        self.tables.append(table)
        print(f"  {title}", flush=True)

        def add(row: Sequence[str]) -> None:
            table.rows.append(list(row))
            print("    " + "  ".join(row), flush=True)
            self.save()

        return add

    def save(self) -> None:
        self.seconds = time.monotonic() - self._started
        if self.path is not None:
            write_atomically(self.path, json.dumps(self.to_json(), indent=1) + "\n")

    def to_json(self) -> dict[str, object]:
        kept = ("section", "limit", "status", "seconds", "checks", "tables", "data", "left_out")
        return {key: value for key, value in asdict(self).items() if key in kept}

    @classmethod
    def read(cls, path: Path) -> Findings:
        return cls.from_json(json.loads(path.read_text()))

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Findings:
        """The reverse of `to_json`."""
        value = dict(value)
        value["checks"] = [Check(**check) for check in value["checks"]]
        value["tables"] = [Table(**table) for table in value["tables"]]
        return cls(**value)


def describe(error: BaseException) -> str:
    """One line that names the error and, for running out of memory, says so."""
    what = "out of memory: " if out_of_memory(error) else ""
    text = (str(error).strip().splitlines() or [""])[0][:200]
    return f"{what}{type(error).__name__}: {text}"
