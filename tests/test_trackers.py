"""The trackers themselves, offline: metrics, rollouts of a debate as a table, and a resumed run that goes on."""

# Packages of extras.
# pyright: reportMissingImports=false

import json
from pathlib import Path
from typing import Any

import pytest

from tinker_cookbook.runs import ml_log

pytestmark = pytest.mark.trackers

ROWS: list[dict[str, Any]] = [
    {
        "group": 0,
        "member": 0,
        "reward": 1.0,
        "said": "four\n漢字",
        "verdict": "A",
        "judge": {"raw": "<VERDICT>A</VERDICT>"},
    },
    {"group": 0, "member": 1, "reward": 0.0, "said": "five", "verdict": "A", "judge": None},
]


def log(folder: Path, steps: range, **trackers: Any) -> ml_log.MultiplexLogger:
    logger = ml_log.setup_logging(folder, config={"lr": 1.0}, do_configure_logging_module=False, **trackers)
    assert logger.takes_rollouts
    for step in steps:
        logger.log_rollouts([row | {"reward": float(step)} for row in ROWS], step)
        logger.log_metrics({"a": 0.5 + step}, step)
    logger.close()
    return logger


def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    log(tmp_path, range(2), wandb_project="p", wandb_name="n")
    first = (tmp_path / "wandb_id").read_text()
    log(tmp_path, range(2, 3), wandb_project="p", wandb_name="n")
    assert (tmp_path / "wandb_id").read_text() == first
    runs = [path.name for path in (tmp_path / "wandb").glob("offline-run-*")]
    assert len(runs) == 2 and all(name.endswith(first) for name in runs)
    tables = sorted((tmp_path / "wandb").rglob("*.table.json"))
    table = json.loads(tables[0].read_text())
    assert sorted(json.loads(path.read_text())["data"][0][2] for path in tables) == [0.0, 1.0, 2.0]
    assert table["columns"] == [*ROWS[0]]
    assert table["data"][0][3] == "four\n漢字" and table["data"][0][5] == '{"raw": "<VERDICT>A</VERDICT>"}'


def test_trackio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trackio = pytest.importorskip("trackio")
    from trackio.sqlite_storage import SQLiteStorage

    monkeypatch.setattr("trackio.utils.TRACKIO_DIR", tmp_path / "trackio")
    monkeypatch.setattr("trackio.sqlite_storage.TRACKIO_DIR", tmp_path / "trackio")
    assert trackio.Table is not None
    folder = tmp_path / "run"
    log(folder, range(2), trackers="trackio", wandb_project="p")
    log(folder, range(2, 3), trackers="trackio", wandb_project="p")
    (name,) = SQLiteStorage.get_runs("p")
    assert name == (folder / "trackio_name").read_text()
    logs = SQLiteStorage.get_logs("p", name)
    assert [row["a"] for row in logs if "a" in row] == [0.5, 1.5, 2.5]
    assert sum("rollouts" in row for row in logs) == 3


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log(tmp_path, range(2), trackers="tensorboard")
    found = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"tensors": 0})
    found.Reload()
    assert [event.value for event in found.Scalars("a")] == [0.5, 1.5]
    texts = [event.tensor_proto.string_val[0].decode() for event in found.Tensors("rollouts/text_summary")]
    assert len(texts) == 2 and "four ⏎ 漢字" in texts[0]
