"""Results of a section, saved to a file after every row, so that an interrupted section loses nothing."""

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
    """A condition: `measured` at most `bound`, or a boolean one (then both are None)."""

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
    """Checks, tables and raw values of one section. Every addition is written to `path` at once.

    `limit` is the number of seconds that the section may take. Code with a list of measurements checks `time_is_up` between them,
    and records skipped ones with `leave_out`.
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
        """Record the value for a mark (marks.py)."""
        measured = self.data.setdefault("marks", {})
        assert isinstance(measured, dict)
        measured[key] = value
        self.save()

    def record(self, kind: str, **values: str | float | bool) -> None:
        """Record the numbers of a table row, for advice.py."""
        records = self.data.setdefault("records", [])
        assert isinstance(records, list)
        records.append({"kind": kind, **values})
        self.save()

    def leave_out(self, what: str) -> None:
        """Record a measurement that was skipped because the time was up."""
        self.left_out.append(what)
        self.save()

    def check(self, name: str, measured: float, bound: float, detail: str = "") -> None:
        """Add a check that a number does not exceed a bound; NaN fails."""
        self._add(Check(name, measured <= bound, float(measured), float(bound), detail))

    def require(self, name: str, ok: bool, detail: str = "") -> None:
        """Add a boolean check."""
        self._add(Check(name, bool(ok), detail=detail))

    def _add(self, check: Check) -> None:
        print(
            f"  {'ok    ' if check.ok else 'FAILED'} {check.name}: {' '.join(filter(None, check.row[2:]))}", flush=True
        )
        self.checks.append(check)
        self.save()

    @contextmanager
    def guarded(self, name: str) -> Iterator[None]:
        """An exception in the block becomes a failed check of this name, and the section continues."""
        try:
            yield
        except Exception as error:
            self._add(Check(name, False, detail=describe(error)))

    def table(self, title: str, columns: Sequence[str]) -> Callable[[Sequence[str]], None]:
        """Start a table. Returns a function that adds a row to it."""
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
    """The error in one line, marked if it is out of memory."""
    what = "out of memory: " if out_of_memory(error) else ""
    text = (str(error).strip().splitlines() or [""])[0][:200]
    return f"{what}{type(error).__name__}: {text}"
