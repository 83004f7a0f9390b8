"""What runs came to: the ends of a run, and the ranking, which is the sweep's own."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.report.made import write_run
from tinker_cookbook.report.result import ranking, result
from tinker_cookbook.report.runs import open_runs
from tinker_cookbook.sweeps import rank


def write_sweep(folder: Path, ways: dict[tuple[float, int], tuple[list[float], list[float], str]]) -> None:
    """A run per (learning rate, seed): held-out accuracies, training rewards, status."""
    for (rate, seed), (held_out, rewards, status) in ways.items():
        name = f"rate={rate},seed={seed}"
        rows: list[dict[str, Any]] = [{"step": i, "env/all/reward/total": value} for i, value in enumerate(rewards)]
        for row, value in zip(rows, held_out, strict=False):
            row["test/env/all/correct"] = value
        run = write_run(folder / name, {"learning_rate": rate, "seed": seed}, rows)
        point = {"learning_rate": rate, "seed": seed}
        told = {"name": name, "point": point, "status": status, "recipe": "recipes.rl_basic", "config": point}
        (run / "sweep_run.json").write_text(json.dumps(told))


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    write_sweep(
        tmp_path,
        {
            # The best on held-out questions has the lowest reward in training, and was not the best all along.
            (0.1, 0): ([0.2, 0.5], [0.1, 0.9], "finished"),
            (0.1, 1): ([0.2, 0.7], [0.1, 0.8], "finished"),
            (0.2, 0): ([0.1, 0.8], [0.1, 0.2], "finished"),
            (0.2, 1): ([0.1, 0.9], [0.1, 0.3], "finished"),
            (0.3, 0): ([0.9, 1.0], [1.0, 1.0], "failed"),
        },
    )
    return tmp_path


def test_the_ranking_of_a_report_is_that_of_the_sweep(sweep: Path) -> None:
    summary, runs = rank(sweep), open_runs([str(sweep)])
    found = ranking(runs)
    assert found is not None
    assert (found["metric"], found["mode"], found["value"]) == (summary.metric, summary.mode, summary.value)
    assert found["metric"] == "test/env/all/correct"
    rows = [
        {key: row[key] for key in ("setting", "mean", "std", "seeds")} | {"best_run": runs[row["best_run"]].label}
        for row in found["rows"]
    ]
    wanted = [
        {"setting": way.setting, "mean": way.mean, "std": way.std, "seeds": way.seeds, "best_run": way.best_run}
        for way in summary.ranking
    ]
    assert rows == wanted and [row["setting"]["learning_rate"] for row in rows] == [0.2, 0.1]
    assert [runs[i].seed for i in found["rows"][0]["runs"]] == [1, 0]  # the best seed first
    assert [runs[i].label for i in found["left_out"]] == ["rate=0.3,seed=0"]


def test_runs_that_still_go_on_are_ranked_by_what_they_have(tmp_path: Path) -> None:
    for i, values in enumerate(([3.0, 1.0], [2.0, 2.0])):
        rows = [{"step": step, "train_mean_nll": value} for step, value in enumerate(values)]
        write_run(tmp_path / str(i), {"rate": i}, rows)
    found = ranking(open_runs([str(tmp_path)]))
    assert found is not None and (found["metric"], found["mode"]) == ("train_mean_nll", "min")
    assert [(row["mean"], row["runs"]) for row in found["rows"]] == [(1.0, [0]), (2.0, [1])] and not found["left_out"]


def test_without_a_metric_that_has_a_better_end_nothing_is_ranked(tmp_path: Path) -> None:
    for i in range(2):
        write_run(tmp_path / str(i), {"rate": i}, [{"step": 0, "score": 1.0}])
    assert ranking(open_runs([str(tmp_path)])) is None


def test_the_result_of_a_run_begins_with_what_it_is_ranked_by(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"step": i, "env/all/correct": i / 4, "env/all/total_episodes": 100, "env/all/reward/total": float(i)}
        for i in range(4)
    ]
    rows[0] |= {"test/env/all/correct": 0.25, "test/env/all/total_episodes": 100}
    rows[3] |= {"test/env/all/correct": 0.75, "test/env/all/total_episodes": 100}
    found = result(open_runs([str(write_run(tmp_path / "run", {}, rows))])[0])
    assert [change["key"] for change in found] == ["test/env/all/correct", "env/all/correct", "env/all/reward/total"]
    held_out, training, _ = found
    assert (held_out["name"], held_out["where"], held_out["mode"]) == ("correct", "held out", "max")
    assert (held_out["before"]["mean"], held_out["after"]["mean"]) == (0.25, 0.75)
    assert 0.65 < held_out["after"]["low"] < 0.75 < held_out["after"]["high"] < 0.83
    assert (training["before"]["mean"], training["after"]["mean"]) == (0.125, 0.625)  # two steps at each end
    assert training["where"] == "rollouts"


def test_a_run_of_one_step_has_no_change(tmp_path: Path) -> None:
    row = {"step": 0, "env/all/reward/total": 0.5, "test/env/all/correct": 0.25}
    found = result(open_runs([str(write_run(tmp_path / "run", {}, [row]))])[0])
    assert [(change["key"], change["before"]["mean"], change["after"]) for change in found] == [
        ("test/env/all/correct", 0.25, None),
        ("env/all/reward/total", 0.5, None),
    ]
    assert found[0]["before"]["low"] is None  # of how many questions is not said


def test_a_reward_that_is_the_share_of_right_answers_is_told_once(tmp_path: Path) -> None:
    rows = [{"step": i, "env/all/correct": i / 4, "env/all/reward/total": i / 4, "train/kl": 1e-8} for i in range(4)]
    found = result(open_runs([str(write_run(tmp_path / "run", {}, rows))])[0])
    assert [change["key"] for change in found] == ["env/all/correct"]
