"""Studies: every run is announced and run once, an interrupted study goes on, and numbers are taken seed by seed."""

import asyncio
import math
from pathlib import Path
from typing import Any

import pandas
import pytest

from tinker_cookbook.exceptions import ConfigurationError, TrainingError
from tinker_cookbook.sweeps.study import (
    Part,
    difference,
    over_seeds,
    reduced,
    run_study,
    study_rows,
    write_parquet,
)
from tinker_cookbook.utils.intervals import DIFFERENCE_OF_RATES

TOY = "tests.sweeps.toy"


def part(name: str, rate: float, **fixed: Any) -> Part:
    return Part(name, TOY, {"learning_rate": [rate], "seed": [0, 1]}, {"max_steps": 3, **fixed})


PARTS = [part("low", 1.0), part("high", 2.0)]


def run(folder: Path, parts: list[Part] = PARTS, **options: Any) -> list[str]:
    """What is said."""
    said: list[str] = []
    asyncio.run(run_study(parts, folder, processes=0, say=said.append, **options))
    return said


def last_score(rows: pandas.DataFrame) -> dict[str, float]:
    return {"score": float(rows["score"].iloc[-1]), "steps": float(len(rows))}


def test_runs_are_announced_run_once_and_reduced(tmp_path: Path) -> None:
    said = run(tmp_path)
    assert said[0] == f"4 runs in {tmp_path}"
    assert said[1] == f"  low, 2 of {TOY}: learning_rate 1.0; seed 0, 1"
    assert said[3].startswith("Expected: 4 runs to go, about 0.00 hours") and "by a trial" in said[3]
    assert [line.partition(" finished in ")[0] for line in said[4:]] == [
        f"({i}/4) {name}" for i, name in enumerate(
            ["low/learning_rate=1.0,seed=0", "low/learning_rate=1.0,seed=1",
             "high/learning_rate=2.0,seed=0", "high/learning_rate=2.0,seed=1"], 1)
    ]  # fmt: skip
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["high", "low"]  # no trial is left
    rows = study_rows(PARTS, tmp_path)
    assert len(rows) == 12 and set(rows["part"]) == {"low", "high"}
    runs = reduced(rows, ["learning_rate", "seed"], last_score)
    # The toy's score is rate * (step + 1) + seed.
    assert runs["score"].tolist() == [3.0, 4.0, 6.0, 7.0] and runs["steps"].tolist() == [3.0] * 4
    write_parquet(tmp_path, rows, runs)
    assert pandas.read_parquet(tmp_path / "rows.parquet")["score"].tolist() == rows["score"].tolist()
    assert pandas.read_parquet(tmp_path / "runs.parquet")["part"].tolist() == ["low", "low", "high", "high"]
    assert run(tmp_path)[3] == "All runs were finished"
    fewer = Part("low", TOY, {"learning_rate": [1.0], "seed": [1]}, {"max_steps": 3})
    assert study_rows([fewer], tmp_path)["score"].tolist() == [2.0, 3.0, 4.0]  # not what another plan ran


def test_an_interrupted_study_goes_on(tmp_path: Path) -> None:
    run(tmp_path / "whole")
    done: list[str] = []

    def stop(line: str) -> None:
        if " finished in " in line:
            done.append(line)
            raise ConnectionError("the terminal is gone")

    with pytest.raises(ExceptionGroup, match="unhandled errors"):
        asyncio.run(run_study(PARTS, tmp_path / "cut", processes=0, say=stop))
    assert len(done) == 1
    said = run(tmp_path / "cut")
    assert said[3].startswith("Expected: 3 runs to go") and "by those that are finished" in said[3]
    assert [line for line in said if "was finished" in line] == ["(1/4) low/learning_rate=1.0,seed=0 was finished"]
    both = [
        study_rows(PARTS, tmp_path / name).drop(columns=["progress/seconds"], errors="ignore")
        for name in ("whole", "cut")
    ]
    pandas.testing.assert_frame_equal(*both)


def test_a_failed_run_is_not_counted_and_is_tried_again(tmp_path: Path) -> None:
    parts = [part("low", 1.0), part("high", 2.0, fail_at=2.0)]
    with pytest.raises(TrainingError, match="a trial of 3 steps failed: TrainingError: diverged"):
        run(tmp_path, [parts[1]])
    (tmp_path / "run" / "low").mkdir(parents=True)
    run(tmp_path / "run", [parts[0]])  # the recipe's seconds are known from now on, without a trial
    said = run(tmp_path / "run", parts)
    assert sum("diverged at learning_rate=2.0" in line for line in said) == 2
    assert reduced(study_rows(parts, tmp_path / "run"), ["seed"], last_score)["part"].tolist() == ["low", "low"]
    (tmp_path / "run" / "high" / "fixed_now").touch()
    run(tmp_path / "run", parts)
    assert len(reduced(study_rows(parts, tmp_path / "run"), ["seed"], last_score)) == 4


def test_a_plan_runs_nothing(tmp_path: Path) -> None:
    assert len(run(tmp_path, only_plan=True)) == 4
    assert not any(path.is_dir() for path in tmp_path.iterdir())
    with pytest.raises(ConfigurationError, match="no such key"):
        run(tmp_path / "other", [Part("odd", TOY, {"rate": [1]}, {"max_steps": 3})])
    assert not (tmp_path / "other").exists()


class TestEstimates:
    RUNS = pandas.DataFrame(
        {"part": ["a", "a", "a", "b", "b"], "seed": [0, 1, 2, 2, 0], "x": [0.1, 0.4, 0.7, 0.5, 0.3]}
    )

    def test_a_mean_has_student_s_interval(self) -> None:
        estimate = over_seeds(self.RUNS, {"part": "a"}, "x")
        assert estimate is not None
        # 0.4 +- 4.303 * 0.3 / sqrt(3)
        assert (estimate.mean, estimate.high) == (pytest.approx(0.4), pytest.approx(0.4 + 0.745302, abs=1e-5))
        assert over_seeds(self.RUNS, {"part": "c"}, "x") is None

    def test_a_difference_is_taken_seed_by_seed(self) -> None:
        gap = difference(self.RUNS, {"part": "a"}, {"part": "b"}, "x", DIFFERENCE_OF_RATES)
        assert gap is not None
        # Seeds 0 and 2: -0.2 and 0.2, so 12.706 * 0.2828 / sqrt(2) = 2.54, beyond what a difference of rates can be.
        assert (gap.mean, gap.low, gap.high) == (pytest.approx(0.0), -1.0, 1.0)
        alone = difference(self.RUNS, {"part": "a", "seed": 0}, {"part": "b", "seed": 0}, "x")
        assert alone is not None and alone.mean == pytest.approx(-0.2) and math.isnan(alone.low)
        assert difference(self.RUNS, {"part": "a", "seed": 1}, {"part": "b"}, "x") is None
