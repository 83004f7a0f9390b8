"""Runs without a log_path get a folder of their own."""

import time
from pathlib import Path

import pytest

from recipes.common import CommonConfig, open_log_path


def test_runs_of_the_same_second_do_not_share_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_DEBATE_LOG_ROOT", str(tmp_path))
    monkeypatch.setattr(time, "strftime", lambda form: "20300101_000000")
    folders = [Path(open_log_path(CommonConfig(name="a b"), "recipe", "qa")) for _ in range(3)]
    assert [folder.name for folder in folders] == [f"20300101_000000_qa_a-b{tail}" for tail in ("", "_2", "_3")]
    assert all(folder.is_dir() for folder in folders)
