"""What must hold of a sweep's table and ranking."""

import io
import json
from pathlib import Path
from typing import Any

import pandas
import pytest
from rich.console import Console

from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.sweeps import collect, print_summary, rank, write_summary, write_tables
from tinker_cookbook.sweeps.run import STATUS_BASE_NAME


def write_run(
    folder: Path, point: dict[str, Any], rows: list[dict[str, Any]], status: str = "finished", **config: Any
) -> None:
    name = ",".join(f"{key}={value}" for key, value in point.items())
    (folder / name).mkdir()
    error = "Boom: x|y" if status == "failed" else None
    (folder / name / STATUS_BASE_NAME).write_text(
        json.dumps({"name": name, "point": point, "status": status, "error": error, "config": point | config})
    )
    if rows:
        (folder / name / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for rate, seed, scores in ((1, 0, [1, 5, 3]), (1, 1, [2, 2, 5]), (2, 0, [9, 1, 2]), (2, 1, [0, 1, 3])):
        rows = [{"step": step, "score": score, "who": "me"} for step, score in enumerate(scores)]
        write_run(tmp_path, {"lr": rate, "seed": seed}, rows)
    write_run(tmp_path, {"lr": 3, "seed": 0}, [{"step": 0, "score": 100}], "failed")
    write_run(tmp_path, {"lr": 4, "seed": 0}, [], "running")
    return tmp_path


class TestCollect:
    def test_one_row_per_run_and_step_and_all_files_say_the_same(self, folder: Path) -> None:
        table = collect(folder)
        assert list(table.columns) == ["run", "lr", "seed", "status", "step", "score", "who"]
        assert len(table) == 4 * 3 + 2
        assert table[table["run"] == "lr=2,seed=0"]["score"].tolist() == [9, 1, 2]
        write_tables(folder, table)
        for written in (pandas.read_csv(folder / "sweep.csv"), pandas.read_parquet(folder / "sweep.parquet")):
            assert written["run"].tolist() == table["run"].tolist()
            assert written["score"].fillna(-1).tolist() == table["score"].fillna(-1).tolist()

    def test_a_key_that_is_also_a_metric_keeps_its_own_column(self, tmp_path: Path) -> None:
        write_run(tmp_path, {"score": 7}, [{"step": 0, "score": 1}])
        table = collect(tmp_path)
        assert table["config/score"].tolist() == [7] and table["score"].tolist() == [1]

    def test_mixed_values_of_a_key_can_be_written(self, tmp_path: Path) -> None:
        write_run(tmp_path, {"max": None}, [{"step": 0, "score": 1}])
        write_run(tmp_path, {"max": "five"}, [{"step": 0, "score": 1}])
        write_run(tmp_path, {"max": 5}, [{"step": 0, "score": 1}])
        write_tables(tmp_path, collect(tmp_path))
        written = pandas.read_parquet(tmp_path / "sweep.parquet")
        assert sorted(x for x in written["max"] if isinstance(x, str)) == ["5", "five"]

    def test_a_folder_without_runs_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigurationError, match="no runs of a sweep"):
            collect(tmp_path)


class TestRank:
    @pytest.mark.parametrize(
        ("value", "mode", "means"),
        [
            ("last", "max", [(1, 4.0), (2, 2.5)]),
            ("last", "min", [(2, 2.5), (1, 4.0)]),
            ("best", "max", [(2, 6.0), (1, 5.0)]),
            ("best", "min", [(2, 0.5), (1, 1.5)]),
            ("mean:2", "max", [(1, 3.75), (2, 1.75)]),
            ("mean:99", "max", [(1, 3.0), (2, 8 / 3)]),
        ],
    )
    def test_golden(self, folder: Path, value: str, mode: Any, means: list[tuple[int, float]]) -> None:
        summary = rank(folder, "score", mode, value)
        assert [entry.setting["lr"] for entry in summary.ranking] == [rate for rate, _ in means]
        assert [entry.mean for entry in summary.ranking] == pytest.approx([mean for _, mean in means])

    def test_spread_best_run_and_what_did_not_finish(self, folder: Path) -> None:
        summary = rank(folder, "score", "max")
        first = summary.ranking[0]
        assert first.seeds == 2 and first.std == pytest.approx(2**0.5) and first.best_run == "lr=1,seed=1"
        assert [run.status for run in summary.runs[-2:]] == ["failed", "running"]
        assert {entry.setting["lr"] for entry in summary.ranking} == {1, 2}

    def test_runs_with_other_fixed_settings_are_no_seeds_of_each_other(self, tmp_path: Path) -> None:
        """As when a sweep is started again with more seeds, and with another number of steps."""
        for seed, steps, score in ((0, 3, 1.0), (1, 3, 3.0), (2, 9, 8.0), (3, 9, 10.0)):
            settings: dict[str, Any] = {"max_steps": steps, "inner": {"beta": 0.5}, "wandb_name": f"run-{seed}"}
            write_run(tmp_path, {"lr": 1, "seed": seed}, [{"step": 0, "score": score}], **settings)
        summary = rank(tmp_path, "score", "max")
        assert [(entry.setting, entry.mean, entry.seeds) for entry in summary.ranking] == [
            ({"lr": 1, "max_steps": 9}, 9.0, 2),
            ({"lr": 1, "max_steps": 3}, 2.0, 2),
        ]
        write_summary(tmp_path, summary)
        assert "| rank | lr | max_steps | mean | std | seeds | best run |" in (tmp_path / "summary.md").read_text()

    def test_what_is_written_and_printed(self, folder: Path) -> None:
        summary = rank(folder, "score", "max")
        write_summary(folder, summary)
        assert json.loads((folder / "summary.json").read_text())["ranking"][0]["mean"] == 4.0
        text = (folder / "summary.md").read_text()
        assert "| 1 | 1 | 4 | 1.414 | 2 | lr=1,seed=1 |" in text and "Boom: x\\|y" in text
        out = io.StringIO()
        print_summary(summary, Console(file=out, width=120))
        assert "failed: lr=3,seed=0: Boom: x|y" in out.getvalue()

    def test_a_metric_that_no_run_has(self, folder: Path) -> None:
        with pytest.raises(ConfigurationError, match="did you mean score"):
            rank(folder, "scor", "max")
        with pytest.raises(ConfigurationError, match="no run has logged it; they have score, who"):
            rank(folder)

    def test_a_metric_that_is_no_number(self, folder: Path) -> None:
        with pytest.raises(ConfigurationError, match="'who': is not a number"):
            rank(folder, "who", "max")

    def test_the_usual_metric_is_found(self, tmp_path: Path) -> None:
        write_run(tmp_path, {"lr": 1}, [{"step": 0, "test/nll": 2.0, "lr": 0.1}])
        write_run(tmp_path, {"lr": 2}, [{"step": 0, "test/nll": 1.0, "lr": 0.1}])
        summary = rank(tmp_path)
        assert (summary.metric, summary.mode) == ("test/nll", "min") and summary.ranking[0].setting == {"lr": 2}

    @pytest.mark.parametrize(
        ("trained", "held_out", "mode"),
        [
            ("accuracy", "test/accuracy", "max"),
            ("dpo_loss", "test/dpo_loss", "min"),
            ("teacher_kl", "test/teacher_kl", "min"),
            ("train/kl", "test/kl", "min"),
            ("train_mean_nll", "test/win_rate", "max"),
            ("train_mean_nll", "test/agreement", "max"),
        ],
    )
    def test_what_is_held_out_comes_before_what_trained(
        self, tmp_path: Path, trained: str, held_out: str, mode: str
    ) -> None:
        write_run(tmp_path, {"lr": 1}, [{"step": 0, trained: 0.1, held_out: 0.2}])
        summary = rank(tmp_path)
        assert (summary.metric, summary.mode) == (held_out, mode)
