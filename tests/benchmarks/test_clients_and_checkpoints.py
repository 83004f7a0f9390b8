"""The benchmarks of many clients and of many checkpoints measure what they say, in small."""

import json
from pathlib import Path

import pytest

from benchmarks import checkpoints, latency
from benchmarks.checkpoints import CheckpointsConfig
from benchmarks.latency import ALONE, BEHAVIOURS, LatencyConfig


def test_many_checkpoints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "result.json"
    checkpoints.main(CheckpointsConfig(sizes=[2, 4], repetitions=1, output=str(output)))
    rows = json.loads(output.read_text())["milliseconds"]
    assert [row.pop("checkpoints") for row in rows] == [2, 4]
    assert all(value > 0 for row in rows for value in row.values())
    assert set(rows[0]) == {"save", "list a run again", "list 100 of all again", "list a run first"}
    assert "list a run first" in capsys.readouterr().out


@pytest.mark.slow
def test_latencies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "result.json"
    latency.main(LatencyConfig(clients=20, requests=2, tokens=2, behaviour_seconds=0.01, output=str(output)))
    found = json.loads(output.read_text())["milliseconds"]
    assert list(found) == ["default", "lockstep"]
    for of_mode in found.values():
        assert list(of_mode) == [ALONE, *BEHAVIOURS]
        for spread in of_mode.values():
            assert 0 < spread["median"] <= spread["99%"] <= spread["longest"]
    assert "| blocks |" in capsys.readouterr().out
