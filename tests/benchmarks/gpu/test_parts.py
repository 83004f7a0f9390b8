"""Parts on and off, the marks, the table of equality, and visits in several pieces."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import ablation, checks, equality, marks, parts, visit_report
from benchmarks.gpu.findings import COMPLETE, Findings
from benchmarks.gpu.models import random_model
from benchmarks.gpu.stand_ins import stand_ins
from benchmarks.gpu.visit import SECTIONS, Visit
from tests.benchmarks.gpu.test_checks import failed
from tinker_local_backend.engine.cuda import ops, varlen
from tinker_local_backend.engine.cuda.execution import FUSED, CudaExecution
from tinker_local_backend.engine.model.attention import Reference

CPU = torch.device("cpu")


def section(name: str) -> Any:
    return next(section for section in SECTIONS if section.name == name)


def test_a_mark_is_reached_from_its_bound_on() -> None:
    measured = {"decode 64": 0.5, "decode 256": 0.69, "training share": float("nan"), "KL": 2e-3}
    rows = {mark.key: row for mark, row in zip(marks.MARKS, marks.table(measured, on_gpu=True).rows, strict=True)}
    assert {key: row[3] for key, row in rows.items()} == {
        "decode 64": "yes",
        "decode 256": "no",
        "training share": "not measured",
        "training tokens": "not measured",
        "KL": "no",
    }
    assert rows["decode 256"][1:3] == ["at least 70%", "69%"]
    assert rows["KL"][1:3] == ["at most 0.001 nats/token", "0.002 nats/token"]


def test_no_number_of_a_cpu_reaches_a_mark() -> None:
    table = marks.table({mark.key: 1e-9 if mark.is_limit else 1e9 for mark in marks.MARKS}, on_gpu=False)
    assert {row[3] for row in table.rows} == {"stand-in, not a measurement"}


def earlier_report(folder: Path, **facts: str) -> visit_report.VisitReport:
    """Of a visit that has measured the machine and one mark."""
    report = visit_report.VisitReport.start("cpu", "tiny", 1, SECTIONS, str(folder))
    report.report.facts |= facts
    hardware, decoding = Findings("hardware", status=COMPLETE), Findings("decoding", status=COMPLETE)
    hardware.data["rates"] = {"copy": 7.0}
    decoding.mark("decode 64", 0.6)
    for findings in (hardware, decoding):
        report.add(findings)
    return report


def test_a_visit_in_pieces_keeps_what_was_found(tmp_path: Path) -> None:
    earlier_report(tmp_path)
    later = visit_report.VisitReport.start("cpu", "tiny", 1, [section("decoding")], str(tmp_path))
    assert later.rates == {"copy": 7.0}
    assert list(later.found) == ["hardware"], "what runs again is not kept"
    later.add(Findings("decoding", status="failed: out of memory"))
    rows = {row[0]: row[1] for row in later.report.tables[0].rows}
    assert rows == {"Machine": "complete, earlier", "Decoding": "failed: out of memory"}
    assert later.problems() == []


def test_another_machine_begins_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    earlier_report(tmp_path, cpu="another one")
    later = visit_report.VisitReport.start("cpu", "tiny", 1, [section("decoding")], str(tmp_path))
    assert later.found == {} and "another cpu" in capsys.readouterr().out


def test_a_whole_visit_keeps_nothing(tmp_path: Path) -> None:
    earlier_report(tmp_path)
    assert visit_report.VisitReport.start("cpu", "tiny", 1, SECTIONS, str(tmp_path)).found == {}


def test_marks_are_in_the_report(tmp_path: Path) -> None:
    report = earlier_report(tmp_path)
    (table,) = [table for table in report.report.tables if table.title == "Marks"]
    assert table.rows[0][2:] == ["60%", "stand-in, not a measurement"]
    assert json.loads((tmp_path / "gpu_tiny_float32_cpu.json").read_text())["tables"][1] == asdict(table)


def test_what_is_turned_off_comes_back() -> None:
    with stand_ins():
        model = random_model("tiny", CPU, torch.float32)
    execution = model.execution
    assert isinstance(execution, CudaExecution)

    def fused() -> int:
        return sum("forward" in vars(module) for part in FUSED for module in execution._fused[part])

    before = fused()
    assert before > 0
    with ablation.reference(model, execution):
        assert isinstance(model.execution, Reference)
        assert not any("forward" in vars(module) for part in FUSED for module in execution._fused[part])
    assert model.execution is execution and fused() == before


@pytest.mark.slow
def test_every_part_has_a_row_and_changes_nothing_but_the_time(visit: Visit) -> None:
    with stand_ins():
        parts.run(visit)
    decoding, training = visit.findings.tables
    for table, least in ((decoding, 13), (training, 12)):
        assert len(table.rows) >= least
        errors = [row for row in table.rows if "Error" in " ".join(row)]
        assert errors == []
    assert {row[1] for row in decoding.rows + training.rows if row[0].startswith(("split", "large", "rows"))} == {
        "on a GPU only"
    }
    for row in decoding.rows:
        if len(row) > 5 and row[5]:
            assert float(row[5].split(",")[0]) < 1e-4, row
    for row in training.rows:
        if len(row) > 7 and row[7]:
            assert float(row[7]) < 1e-4, row
    shared = next(row for row in training.rows if row[0].startswith("shared prefixes"))
    assert int(shared[3].replace(",", "")) > int(training.rows[0][3].replace(",", "")), "more tokens are computed"


@pytest.mark.slow
def test_the_checks_at_start_are_listed(visit: Visit, monkeypatch: pytest.MonkeyPatch) -> None:
    checks.run(visit)
    assert failed(visit.findings) == []
    right = ops.paged_attention
    monkeypatch.setattr(ops, "paged_attention", lambda *arguments: right(*arguments) * 1.2)
    checks.run(visit)
    assert failed(visit.findings) == ["tiny: decoding, paged attention"]


@pytest.mark.slow
def test_the_table_of_equality_finds_the_part_that_is_wrong(visit: Visit, monkeypatch: pytest.MonkeyPatch) -> None:
    equality.run(visit)
    assert failed(visit.findings) == []
    assert [row[1] for row in visit.findings.tables[0].rows] == 2 * list(equality.WAYS)
    right = varlen._varlen
    monkeypatch.setattr(varlen, "_varlen", lambda *a, **k: right(*a, **k) * 1.05)
    equality.run(visit)
    wrong = {name.split(": ")[1].split(", ", 1)[1] for name in failed(visit.findings)}
    assert wrong == {"one attention call for all sequences", "all parts"}
