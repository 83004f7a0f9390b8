"""The report of a visit: one table of sections, then every section's checks and tables, as JSON and markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.gpu.findings import COMPLETE, Findings
from benchmarks.gpu.visit import Section
from benchmarks.machine import facts
from benchmarks.report import Report, Table, show

NOT_REACHED = "not reached"


@dataclass
class VisitReport:
    """What the sections have found so far. `add` writes the files anew, so that they are true at any moment."""

    report: Report
    sections: Sequence[Section]
    folder: str
    found: dict[str, Findings] = field(default_factory=dict)

    @classmethod
    def start(cls, device: str, scale: str, threads: int, sections: Sequence[Section], folder: str) -> VisitReport:
        dtype = "bfloat16" if device == "cuda" else "float32"
        about = facts(threads, ask_gpu=False)
        return cls(Report("gpu", scale, dtype, device, about, []), sections, folder)

    def add(self, found: Findings) -> None:
        """Take in a section's findings, in place of its earlier ones."""
        self.found[found.section] = found
        if isinstance(gpu := found.data.get("gpu"), str):
            self.report.facts["gpu"] = gpu
        self.write()

    def write(self) -> list[Path]:
        self.report.tables = [self._overview(), *self._tables()]
        self.report.measurements = {name: found.to_json() for name, found in self.found.items()}
        return self.report.write(self.folder)

    def show(self) -> None:
        self.write()
        show(self.report)

    def problems(self) -> list[str]:
        """Checks that did not hold, and sections of correctness that did not come to their end."""
        problems = []
        for section in self.sections:
            found = self.found.get(section.name)
            if not section.is_correctness:
                continue
            if found is None or found.status != COMPLETE:
                problems.append(f"{section.title}: {found.status if found else NOT_REACHED}")
            if found is not None:
                problems += [
                    f"{check.name}: {' '.join(filter(None, check.row[2:]))}" for check in found.checks if not check.ok
                ]
                problems += [f"no time for {what}" for what in found.left_out]
        return problems

    def _overview(self) -> Table:
        rows = []
        for section in self.sections:
            found = self.found.get(section.name)
            if found is None:
                rows.append([section.title, NOT_REACHED, "", "", "", ""])
                continue
            held = sum(check.ok for check in found.checks)
            left_out = f"{len(found.left_out)} for want of time" if found.left_out else ""
            rows.append(
                [
                    section.title,
                    found.status,
                    f"{found.seconds:.0f}",
                    str(held),
                    str(len(found.checks) - held),
                    left_out,
                ]
            )
        columns = ["section", "status", "seconds", "checks that held", "failed", "left out"]
        return Table("Sections, in order of worth", columns, rows)

    def _tables(self) -> list[Table]:
        tables = []
        for section in self.sections:
            found = self.found.get(section.name)
            if found is None:
                continue
            if found.checks:
                columns = ["check", "", "measured", "bound", "detail"]
                rows = [check.row for check in sorted(found.checks, key=lambda check: check.ok)]
                tables.append(Table(f"{section.title}: checks (failed ones first)", columns, rows))
            tables += [_padded(table) for table in found.tables]
        return tables


def _padded(table: Table) -> Table:
    """Rows that end early, because something could not be measured, filled up."""
    width = len(table.columns)
    return Table(table.title, table.columns, [[*row, *[""] * (width - len(row))] for row in table.rows])
