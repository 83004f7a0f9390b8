"""The benchmark of the server, with a few steps and clients, beside another server as the stub."""

from pathlib import Path

import pytest

from benchmarks import server
from benchmarks.errors import BenchmarkError

pytestmark = pytest.mark.server

STUB = """
import os
import sys
from tinker_local_backend.server.config import ServerConfig
from tinker_local_backend.server.run import serve
serve(ServerConfig(model=os.environ["STUB_MODEL"], port=int(sys.argv[1])))
"""


def test_every_table_is_filled(quick_comparison: dict, tmp_path: Path) -> None:
    pytest.importorskip("fastapi", reason="the extra `server` is not installed")
    stub = tmp_path / "stub.py"
    stub.write_text(STUB)
    few = {"steps": 3, "ahead": 2, "sampling_rounds": 1, "pollers": 5, "poll_seconds": 0.5, "crowd": 20}
    keys = {key: value for key, value in quick_comparison.items() if key != "max_new_tokens"}
    report = server.run(server.Config(**keys, **few, stub=str(stub)))
    training, steps, sampling, idle, crowd = report.tables
    assert [row[0] for row in training.rows] == ["ours, served", "in process", "the stub, which computes nothing"]
    assert len(steps.rows) == 3 and all(float(row[1]) > 0 for row in steps.rows)
    assert [row[0] for row in sampling.rows] == ["ours, served", "in process"]
    assert float(idle.rows[0][1]) < 1
    assert crowd.rows[0][:2] == ["20", "20"] and float(crowd.rows[0][4].split()[0]) > 0


def test_a_stub_that_is_not_there_is_named() -> None:
    with pytest.raises(BenchmarkError, match=r"stub='/no/such\.py' is not a file"):
        server.stub_server("/no/such.py", Path("x"))
