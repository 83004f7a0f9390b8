"""Evaluations in a storage: written, found again, filtered, and removed without touching what is not theirs."""

import asyncio
from pathlib import Path

import fsspec
import pytest

from tinker_cookbook.exceptions import ConfigurationError, DataFormatError
from tinker_cookbook.stores import EvalStore, FsspecStorage, LocalStorage, RunRegistry
from tinker_cookbook.stores.eval_store import BenchmarkResult, RunMetadata, StoredTrajectory, StoredTurn


@pytest.fixture
def store(tmp_path: Path) -> EvalStore:
    return EvalStore(LocalStorage(tmp_path), "eval")


def test_a_run_from_its_beginning_to_its_scores(store: EvalStore, tmp_path: Path) -> None:
    run_id = store.create_run("m", ["gsm8k", "aime"], "tinker://r/weights/7", "step_7", config={"temperature": 0.6})
    assert run_id.startswith("step_7_")
    assert store.run_dir(run_id) == str(tmp_path / "eval" / "runs" / run_id)
    assert store.read_run(run_id).scores == {}
    result = BenchmarkResult("gsm8k", 0.25, 4, 1, num_errors=2, pass_at_k={1: 0.25, 2: 0.5})
    store.write_result(run_id, result)
    assert store.read_result(run_id, "gsm8k") == result, "also the numbers of tries, which JSON has as texts"
    assert (result.num_completed, result.score_completed) == (2, 0.5)
    assert store.read_result(run_id, "aime") is None
    assert store.list_benchmarks(run_id) == ["gsm8k"]
    assert store.finalize_run(run_id).scores == store.read_run(run_id).scores == {"gsm8k": 0.25}
    store.write_summary(run_id, {"gsm8k": result})
    assert store.read_summary(run_id) == {
        "gsm8k": {"score": 0.25, "num_examples": 4, "num_correct": 1, "num_errors": 2}
    }
    registry = RunRegistry([LocalStorage(tmp_path)])
    found = registry.get_eval_store()
    assert found is not None and [run.run_id for run in found.list_runs()] == [run_id]
    assert registry.storage_count == 1 and registry.primary_storage.exists("eval/runs.jsonl")


def test_tries_are_found_by_how_they_went(store: EvalStore) -> None:
    run_id = store.create_run("m", ["b"], run_id="r")
    tries = [
        StoredTrajectory(0, "b", turns=[StoredTurn("user", "1 + 1?"), StoredTurn("assistant", "2", 3)], reward=1.0),
        StoredTrajectory(1, "b", reward=0.0),
        StoredTrajectory(2, "b", reward=0.0, error="timeout"),
    ]
    for row in tries:
        store.write_trajectory(run_id, "b", row)
    assert store.read_trajectories(run_id, "b") == tries
    kinds = {kind: store.read_trajectories(run_id, "b", **{kind: True}) for kind in KINDS}
    assert [[row.idx for row in rows] for rows in kinds.values()] == [[0], [1], [2]]
    assert store.read_single_trajectory(run_id, "b", 2) == tries[2]
    assert store.read_single_trajectory(run_id, "b", 3) is None
    assert asyncio.run(store.aread_trajectories(run_id, "b", errors_only=True)) == tries[2:]


KINDS = ("correct_only", "incorrect_only", "errors_only")


def test_what_is_removed_is_what_was_written(store: EvalStore, tmp_path: Path) -> None:
    for run_id in ("target", "other"):
        store.create_run("m", ["b"], run_id=run_id)
        store.write_result(run_id, BenchmarkResult("b", 1.0, 1, 1))
    store.write_trajectory("target", "unfinished", StoredTrajectory(0, "unfinished"))
    note = tmp_path / "eval" / "runs" / "target" / "b" / "note.txt"
    note.write_text("mine")
    store.delete_run("target")
    store.delete_run("target")
    assert note.read_text() == "mine"
    assert [*note.parents[1].rglob("*")] == [note.parent, note]
    assert [run.run_id for run in store.list_runs()] == ["other"]
    with pytest.raises(FileNotFoundError, match="'target'"):
        store.read_run("target")


def test_bad_names_damaged_files_and_stores_without_a_folder(store: EvalStore, tmp_path: Path) -> None:
    for run_id in ("..", "a/b", ""):
        with pytest.raises(ConfigurationError, match="run_id"):
            store.delete_run(run_id)
    with pytest.raises(DataFormatError, match=r"RunMetadata: .*missing"):
        RunMetadata.from_dict({"run_id": "r", "later": 1})
    store.storage.write("eval/runs/r/metadata.json", b"{")
    with pytest.raises(DataFormatError, match=r"metadata\.json"):
        store.list_runs()
    remote = EvalStore(FsspecStorage(fsspec.filesystem("memory"), "eval-store"))
    with pytest.raises(ConfigurationError, match="not in a local folder"):
        remote.run_dir(remote.create_run("m", []))
