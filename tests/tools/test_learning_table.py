"""The table of what runs learnt, from runs made by hand."""

from pathlib import Path

import pytest

from tests.report.made import write_run
from tinker_cookbook.exceptions import ConfigurationError
from tools.learning_table import CLIConfig, table


def run(folder: Path, seed: int, rewards: list[float], tests: tuple[float, ...]) -> str:
    rows = [{"step": i, "env/all/correct": reward} for i, reward in enumerate(rewards)]
    rows += [
        {"step": i, "test/env/all/correct": share, "test/env/all/total_episodes": 100} for i, share in enumerate(tests)
    ]
    return str(write_run(folder, {"seed": seed}, rows))


def test_a_row_per_run_and_the_change_over_them(tmp_path: Path) -> None:
    folders = [
        run(tmp_path / "a", 0, [0.2] * 5 + [0.9] + [0.6] * 5, (0.25, 0.4, 0.5)),
        run(tmp_path / "b", 1, [0.2] * 5 + [0.8] * 5, (0.25, 0.75)),
    ]
    lines = table(CLIConfig(runs=",".join(folders))).splitlines()
    assert lines[2] == "| 0 | 0.20 | 0.60 | 0.25 [0.18, 0.34] | 0.50 [0.40, 0.60] |"
    assert lines[3].startswith("| 1 | 0.20 | 0.80 | 0.25 ")
    assert lines[-1].startswith("Change, mean over runs [95 %]: training 0.50 [") and "held out 0.38 [" in lines[-1]


def test_a_run_without_two_evaluations(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="two evaluations of"):
        table(CLIConfig(runs=run(tmp_path / "a", 0, [0.2], (0.25,))))
