"""The report of a visit: the marks, one table of sections, then every section's checks and tables, as JSON and markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu import advice, marks
from benchmarks.gpu.findings import COMPLETE, Findings
from benchmarks.gpu.visit import SECTIONS, Section
from benchmarks.machine import facts
from benchmarks.report import Report, Table, show

NOT_REACHED = "not reached"
PASSING = ("date", "command", "gpu")
"""Facts that may differ between visits of one machine, or are unknown before the first section."""


@dataclass
class VisitReport:
    """The findings of the sections so far. `add` rewrites the files, so that they are always current.

    `kept`: sections of an earlier visit that this one does not repeat.
    """

    report: Report
    sections: Sequence[Section]
    folder: str
    found: dict[str, Findings] = field(default_factory=dict)
    kept: list[Section] = field(default_factory=list)

    @classmethod
    def start(cls, device: str, scale: str, threads: int, sections: Sequence[Section], folder: str) -> VisitReport:
        """Start a report. SECTIONS that are not among `sections` are copied from the report in the folder, if its machine,
        versions and commit are the same.
        """
        dtype = "bfloat16" if device == "cuda" else "float32"
        report = Report("gpu", scale, dtype, device, facts(threads, ask_gpu=False), [])
        visit = cls(report, sections, folder)
        earlier = Path(folder).expanduser() / f"{report.name}.json"
        if earlier.is_file() and len(sections) < len(SECTIONS):
            visit._keep(Report.read(earlier))
        return visit

    def _keep(self, earlier: Report) -> None:
        ours, theirs = ({k: v for k, v in r.facts.items() if k not in PASSING} for r in (self.report, earlier))
        if ours != theirs:
            different = sorted(key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key))
            print(f"the existing report has another {', '.join(different)}: it is replaced")
            return
        running = {section.name for section in self.sections}
        for section in SECTIONS:
            values = earlier.measurements.get(section.name)
            if section.name not in running and isinstance(values, dict):
                self.kept.append(section)
                self.found[section.name] = Findings.from_json(values)
        if "gpu" in earlier.facts:
            self.report.facts["gpu"] = earlier.facts["gpu"]

    @property
    def rates(self) -> dict[str, float]:
        """Rates of the machine, measured now or earlier."""
        return self._gathered("rates")

    @property
    def _all(self) -> list[Section]:
        """New and kept sections, in the order of SECTIONS."""
        order = {section.name: i for i, section in enumerate(SECTIONS)}
        return sorted((*self.sections, *self.kept), key=lambda section: order.get(section.name, 0))

    def _gathered(self, key: str) -> dict[str, float]:
        """The numbers of all sections under this key."""
        gathered: dict[str, float] = {}
        for findings in self.found.values():
            numbers = findings.data.get(key, {})
            assert isinstance(numbers, dict)
            gathered |= numbers
        return gathered

    def add(self, findings: Findings) -> None:
        """Set a section's findings, replacing its earlier ones."""
        self.found[findings.section] = findings
        if isinstance(gpu := findings.data.get("gpu"), str):
            self.report.facts["gpu"] = gpu
        self.write()

    def write(self) -> list[Path]:
        self.report.tables = [self._overview(), *self._marks(), *self._tables(), *self._advice()]
        self.report.measurements = {name: found.to_json() for name, found in self.found.items()}
        return self.report.write(self.folder)

    def show(self) -> None:
        self.write()
        show(self.report)

    def problems(self) -> list[str]:
        """Failed checks, and sections of correctness that did not complete."""
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

    def _marks(self) -> list[Table]:
        """The table of marks, if any mark was measured."""
        measured = self._gathered("marks")
        return [marks.table(measured, self.report.device == "cuda")] if measured else []

    def _advice(self) -> list[Table]:
        """The advice, if there are records for it; it comes last, where it is seen on the console."""
        records: list[dict[str, Any]] = []
        for findings in self.found.values():
            more = findings.data.get("records", [])
            assert isinstance(more, list)
            records += more
        return [advice.table(records, self.report.device == "cuda")] if records else []

    def _overview(self) -> Table:
        rows = []
        for section in self._all:
            found = self.found.get(section.name)
            if found is None:
                rows.append([section.title, NOT_REACHED, "", "", "", ""])
                continue
            passed = sum(check.ok for check in found.checks)
            left_out = str(len(found.left_out)) if found.left_out else ""
            rows.append(
                [
                    section.title,
                    f"{found.status}, earlier" if section in self.kept else found.status,
                    f"{found.seconds:.0f}",
                    str(passed),
                    str(len(found.checks) - passed),
                    left_out,
                ]
            )
        columns = ["section", "status", "seconds", "checks that held", "failed", "left out"]
        return Table("Sections, in order of worth", columns, rows)

    def _tables(self) -> list[Table]:
        tables = []
        for section in self._all:
            found = self.found.get(section.name)
            if found is None:
                continue
            if found.checks:
                columns = ["check", "", "measured", "bound", "detail"]
                rows = [check.row for check in sorted(found.checks, key=lambda check: check.ok)]
                tables.append(Table(f"{section.title}: checks (failed ones first)", columns, rows))
            tables += [_padded(table) for table in found.tables]
            if found.left_out:
                title = f"{section.title}: left out for want of time"
                tables.append(Table(title, ["what"], [[what] for what in found.left_out]))
        return tables


def _padded(table: Table) -> Table:
    """The table with short rows, whose numbers could not be measured, padded."""
    width = len(table.columns)
    return Table(table.title, table.columns, [[*row, *[""] * (width - len(row))] for row in table.rows])
