"""Runs as a report reads them: found, labelled, their metrics in columns, seeds together."""

import json
from pathlib import Path

import pytest

from tests.report.made import write_run
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.report.runs import columns, open_runs, read_spans, seeds_together, settings, swept_keys
from tinker_cookbook.utils import trace


def test_rows_of_a_step_are_joined_and_gaps_stay_gaps() -> None:
    rows = [{"step": 0, "a": 1}, {"step": 1, "a": 2, "b": "text"}, {"c": 3}, {"step": 1, "a": 4}]
    assert columns(rows) == {"step": [0, 1], "a": [1, 4], "b": [None, "text"], "c": [None, 3]}


def test_runs_are_found_below_a_folder_and_labelled_by_what_tells_them_apart(tmp_path: Path) -> None:
    write_run(tmp_path / "a" / "run", {}, [])
    write_run(tmp_path / "b" / "run", {}, [])
    assert [run.label for run in open_runs([str(tmp_path)])] == ["a/run", "b/run"]
    assert [run.label for run in open_runs([str(tmp_path / "a" / "run")])] == ["run"]
    assert len(open_runs([str(tmp_path), str(tmp_path / "a")])) == 2  # none twice


@pytest.mark.parametrize("name", ["missing", "empty"])
def test_a_folder_without_a_run_is_refused_by_name(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigurationError, match=rf"log_path: '.*{name}'"):
        open_runs([str(tmp_path / name)])


def test_seeds_of_a_setting_are_together(tmp_path: Path) -> None:
    for rate in (0.1, 0.2):
        for seed in (0, 1):
            config = {"seed": seed, "optim": {"rate": rate}, "log_path": f"{rate}-{seed}"}
            write_run(tmp_path / f"{rate}-{seed}", config, [])
    runs = open_runs([str(tmp_path)])
    assert swept_keys(runs) == ["optim.rate", "seed"]
    assert seeds_together(runs) == [[0, 1], [2, 3]]
    assert settings(runs)[2] == {"optim.rate": 0.2}


def test_runs_of_other_recipes_are_no_seeds_of_each_other(tmp_path: Path) -> None:
    write_run(tmp_path / "a", {"seed": 0}, [], recipe="rl_basic")
    write_run(tmp_path / "b", {"seed": 1}, [], recipe="math_rl")
    assert seeds_together(open_runs([str(tmp_path)])) == [[0], [1]]


def test_a_sweep_is_told_by_its_keys(tmp_path: Path) -> None:
    for i, rate in enumerate((0.1, 0.2)):
        folder = write_run(tmp_path / str(i), {"advantage": {"x": rate}, "derived": rate}, [])
        status = {"name": str(i), "point": {"learning_rate": rate, "seed": 0}, "status": "finished"}
        (folder / "sweep_run.json").write_text(json.dumps(status))
    assert swept_keys(open_runs([str(tmp_path)])) == ["learning_rate"]


def test_spans_of_a_trace(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", {}, [])
    trace.trace_init(output_file=folder / trace.EVENTS_BASE_NAME)
    try:
        with trace.scope_span_sync("outer"), trace.scope_span_sync("inner"):
            trace.update_scope_context({"tokens": 3})
    finally:
        trace.trace_shutdown()
    spans = read_spans(open_runs([str(folder)])[0])
    assert [(span["name"], span["args"]) for span in spans] == [("outer", {}), ("inner", {"tokens": 3})]
    assert spans[0]["start"] <= spans[1]["start"]
    assert 0 <= spans[1]["seconds"] <= spans[0]["seconds"]
