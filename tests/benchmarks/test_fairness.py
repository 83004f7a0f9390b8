"""The benchmark of a flooded server, with a single step beside each flood."""

from pathlib import Path

import pytest

from benchmarks import fairness

pytestmark = pytest.mark.server


def test_every_flood_has_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("fastapi", reason="the extra `server` is not installed")
    monkeypatch.setattr(fairness, "SAMPLES", 8)
    monkeypatch.setattr(fairness, "LONG_TOKENS", 100)
    report = fairness.run(fairness.Config(steps=1, outstanding=1, models_dir=str(tmp_path / "models")))
    rows = report.tables[0].rows
    assert [row[0].split()[0] for row in rows] == ["alone", "8", "8", "8", "forward_backward"]
    assert rows[0][4] == "1" and all(float(row[4]) > 0 for row in rows)
