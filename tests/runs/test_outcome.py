"""What a run came to: means of its ends with intervals."""

import json
import math
from pathlib import Path

import pytest

from tinker_cookbook.runs.outcome import estimate, print_changes
from tinker_cookbook.utils.intervals import wilson


def test_a_rate_has_the_interval_of_its_episodes() -> None:
    rows = [
        {"env/all/correct": 0.5, "env/all/total_episodes": 10},
        {"env/all/correct": 1.0, "env/all/total_episodes": 10},
    ]
    found, wanted = estimate(rows, "env/all/correct"), wilson(15, 20)
    assert (found.mean, found.low, found.high) == (0.75, wanted.low, wanted.high)
    test = [{"test/env/all/correct": 0.9, "test/env/all/total_episodes": 100, "env/all/total_episodes": 3}]
    assert estimate(test, "test/env/all/correct").low == wilson(90, 100).low


def test_another_metric_has_that_of_a_mean_of_steps_where_there_are_enough() -> None:
    found = estimate([{"loss": value} for value in (1.0, 2.0, 3.0)], "loss")
    assert found.mean == 2.0 and math.isclose(found.high - 2.0, 1.959963984540054 / math.sqrt(3))
    assert math.isnan(estimate([{"loss": 1.0}], "loss").low)
    assert math.isnan(estimate([{"env/all/correct": 1.0}], "env/all/correct").low)  # of how many is not said


@pytest.mark.parametrize(
    "key", ["accuracy", "test/accuracy", "test/win_rate", "env/all/debate/win_rate", "env/all/correct"]
)
def test_an_interval_never_leaves_the_range_of_a_rate(key: str) -> None:
    """By hand: mean 0.9133, standard error 0.0817, 1.96 of them; mean 0.0867 with the same; of a loss it is as wide as it is."""
    high, low = [1.0, 0.99, 0.75], [0.0, 0.01, 0.25]
    above, below = (estimate([{key: value} for value in values], key) for values in (high, low))
    assert (above.low, above.high) == (pytest.approx(0.75325, abs=1e-4), 1.0)
    assert (below.low, below.high) == (0.0, pytest.approx(0.24675, abs=1e-4))
    assert estimate([{"loss": value} for value in high], "loss").high == pytest.approx(1.07342, abs=1e-4)


def test_the_table_fits_eighty_columns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [
        {"step": i, "env/all/task_reward": -0.25 + i, "test/env/all/correct": i / 10, "test/env/all/total_episodes": 50}
        for i in range(10)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setenv("COLUMNS", "80")
    print_changes(tmp_path, {"test/env/all/correct": "held-out questions"}, {"env/all/task_reward": "rollouts"})
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= 80 for line in lines[:-1])
    text = "\n".join(lines)
    assert "first and last 5 steps" in text and "held-out questions" in text
    assert "1.750 [.36 3.14]" in text and "0.000 [.00 .07]" in text and "+5.000" in text and "+0.900" in text
    assert lines[-1] == f"Files: {tmp_path}"


def test_a_quiet_run_leaves_the_path(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text('{"quiet": true}')
    print_changes(tmp_path, {}, {"a": "steps"})
    assert capsys.readouterr().out == f"Files: {tmp_path}\n"
