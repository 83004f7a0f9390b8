"""A run in a store: what its own folder's readers read, also while it is written, and what a loop writes there."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any
from uuid import uuid4

import fsspec
import pytest

from tests.fakes import FakeServiceClient
from tests.rl.loop import NumberDatasetBuilder, make_config
from tests.runs.test_saving import FakeTrainingClient, Save, save  # noqa: F401 - a fixture
from tinker_cookbook import backends
from tinker_cookbook.exceptions import CheckpointError, ConfigurationError, DataFormatError, DataValidationError
from tinker_cookbook.rl import train
from tinker_cookbook.runs import ml_log
from tinker_cookbook.runs.checkpoints import load_checkpoints_file
from tinker_cookbook.stores import (
    AsyncStorage,
    FsspecStorage,
    IncrementalReader,
    LocalStorage,
    RunRegistry,
    Storage,
    TrainingRunStore,
)
from tinker_cookbook.stores.folder import one_writer
from tinker_cookbook.stores.rollouts import read_rollouts
from tinker_cookbook.utils.files import truncate_jsonl


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small finished run, with rollouts, transcripts and an evaluation."""
    folder = tmp_path_factory.mktemp("runs") / "recipe" / "first"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backends, "create_service_client", lambda *_: FakeServiceClient())
        data = NumberDatasetBuilder(batches=2, with_test=True)
        config = make_config(folder, data, write_records=True, num_groups_to_log=1, save_every=1, eval_every=1)
        asyncio.run(train.main(config))
    return folder


def in_memory(folder: Path) -> FsspecStorage:
    """The files of a folder, in a storage that is not one."""
    storage = FsspecStorage(fsspec.filesystem("memory"), f"test-{uuid4().hex}")
    for path in folder.rglob("*"):
        if path.is_file():
            storage.write(path.relative_to(folder).as_posix(), path.read_bytes())
    return storage


@pytest.fixture(params=[LocalStorage, in_memory], ids=["local", "memory"])
def runs(request: pytest.FixtureRequest, run_folder: Path) -> Storage:
    return request.param(run_folder.parents[1])


@pytest.fixture
def store(runs: Storage) -> TrainingRunStore:
    return TrainingRunStore(runs, "recipe/first")


class TestAFinishedRun:
    def test_metrics_config_and_checkpoints(self, store: TrainingRunStore, run_folder: Path) -> None:
        metrics = ml_log.read_metrics(run_folder)
        assert len(metrics) == 3 and store.read_metrics() == metrics == store.read_new_metrics()
        assert store.read_new_metrics() == []
        keys = store.metric_keys()
        assert "env/all/reward/total" in keys and "test/env/all/reward/total" in keys and "step" not in keys
        assert store.read_config() == json.loads((run_folder / "config.json").read_text())
        records = load_checkpoints_file(run_folder)
        assert records[-1].final and store.read_checkpoint_records() == records
        assert store.read_checkpoints() == [record.to_dict() for record in records]

    def test_rollouts(self, store: TrainingRunStore, run_folder: Path) -> None:
        _, turns = read_rollouts(run_folder / "iteration_000001" / "rollouts.parquet")
        assert len(turns) == 12 and str(store.read_turns(1)) == str(turns)
        assert store.read_turns(9) == store.read_rollouts(9) == []

    def test_steps_and_transcripts(self, store: TrainingRunStore, run_folder: Path) -> None:
        steps = store.list_iterations()
        folders = sorted(path.name for path in run_folder.glob("iteration_*"))
        assert [f"iteration_{step.iteration:06d}" for step in steps] == folders and len(folders) == 3
        assert [step.has_train_rollouts for step in steps] == [True, True, False]
        names = store.list_logtrees(1)
        assert names[0] == "train" and names[1:] == list(steps[1].eval_labels) and steps[1].has_train_logtree
        for name in names:
            written = json.loads((run_folder / "iteration_000001" / f"{name}_logtree.json").read_text())
            assert store.read_logtree(1, name) == written
        assert store.read_logtree(9) is None and store.list_logtrees(9) == []


def test_a_run_that_is_not_there_has_nothing(tmp_path: Path) -> None:
    store = TrainingRunStore(LocalStorage(tmp_path), "none")
    assert store.read_config() is None
    assert store.read_metrics() == store.read_new_metrics() == store.read_checkpoints() == store.list_iterations() == []


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"a": 1}\n{"a":\n{"a": 3}\n')
    store = TrainingRunStore(LocalStorage(tmp_path))
    for read in (store.read_metrics, store.read_new_metrics):
        with pytest.raises(DataFormatError, match=rf"^{re.escape(str(tmp_path))}/metrics\.jsonl:2: .*Remove that line"):
            read()


class TestWhileItIsWritten:
    def test_a_line_counts_when_it_is_whole(self, tmp_path: Path) -> None:
        store, logger = TrainingRunStore(LocalStorage(tmp_path)), ml_log.JsonLogger(tmp_path)
        assert store.read_new_metrics() == []
        logger.log_metrics({"a": 1}, step=0)
        with open(tmp_path / "metrics.jsonl", "a") as file:
            file.write('{"step": 1, "a"')
        assert store.read_metrics() == store.read_new_metrics() == [{"step": 0, "a": 1}]
        assert store.read_new_metrics() == []
        with open(tmp_path / "metrics.jsonl", "a") as file:
            file.write(': "é\u2028"}\n')
        assert store.read_new_metrics() == [{"step": 1, "a": "é\u2028"}]
        with open(tmp_path / "metrics.jsonl", "a") as file:
            file.write("broken\n")
        with pytest.raises(DataFormatError, match=r"metrics\.jsonl:3: "):
            store.read_new_metrics()

    @pytest.mark.parametrize("again", [[1.5], [1.5, 2.5, 3.5], [11.125]])
    def test_steps_that_are_done_again_come_again(self, tmp_path: Path, again: list[float]) -> None:
        reader, logger = IncrementalReader(LocalStorage(tmp_path), "metrics.jsonl"), ml_log.JsonLogger(tmp_path)
        for step, value in enumerate((0.25, 1.25, 2.25)):
            logger.log_metrics({"a": value}, step=step)
        assert [row["a"] for row in reader.read()] == [0.25, 1.25, 2.25]
        truncate_jsonl(tmp_path / "metrics.jsonl", keep=lambda row: row["step"] < 1)
        for step, value in enumerate(again, start=1):
            logger.log_metrics({"a": value}, step=step)
        assert [row["a"] for row in reader.read()] == again
        assert [row["a"] for row in reader.records] == [0.25, *again]
        logger.log_metrics({"a": 9}, step=9)
        assert [row["a"] for row in reader.read()] == [9]

    def test_a_run_that_was_deleted_begins_anew(self, tmp_path: Path) -> None:
        reader, logger = IncrementalReader(LocalStorage(tmp_path), "metrics.jsonl"), ml_log.JsonLogger(tmp_path)
        logger.log_metrics({"a": 1})
        assert reader.read() == [{"a": 1}]
        (tmp_path / "metrics.jsonl").unlink()
        assert reader.read() == [] == reader.records
        logger.log_metrics({"a": 1})
        assert reader.read() == [{"a": 1}]


def written(logger: ml_log.Logger) -> None:
    logger.log_hparams({"lr": 1, "api_key": "k", "é": [1.5]})
    logger.log_metrics({"b": 1, "a": 0.5, "path": "é"}, step=3)
    logger.log_metrics({"c": 2})
    logger.log_hparams({"lr": 2})


class TestJsonLogger:
    def test_the_bytes_are_those_of_a_folder(self, tmp_path: Path) -> None:
        written(ml_log.JsonLogger(tmp_path / "folder"))
        local, memory = LocalStorage(tmp_path), FsspecStorage(fsspec.filesystem("memory"), f"test-{uuid4().hex}")
        for storage in (local, memory):
            logger = ml_log.JsonLogger(tmp_path / "own", TrainingRunStore(storage, "store"))
            written(logger)
            for name in ("metrics.jsonl", "config.json"):
                assert storage.read(f"store/{name}") == (tmp_path / "folder" / name).read_bytes()
            assert storage.list_dir("store") == ["config.json", "metrics.jsonl"]
        assert list((tmp_path / "own").iterdir()) == []

    def test_what_a_folder_refuses(self, tmp_path: Path) -> None:
        logger = ml_log.JsonLogger(tmp_path, TrainingRunStore(LocalStorage(tmp_path)))
        with pytest.raises(DataValidationError, match=r"^a: nan"):
            logger.log_metrics({"a": float("nan")}, step=0)
        with pytest.raises(DataValidationError, match="'step'"):
            logger.log_metrics({"step": 1}, step=0)
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize(("tail", "kept"), [('{"a": 2', []), ('{"a": 2}', [{"a": 2}]), ("", [])])
    def test_a_torn_line_of_a_killed_writer(self, tmp_path: Path, tail: str, kept: list[Any]) -> None:
        (tmp_path / "metrics.jsonl").write_text('{"a": 1}\n' + tail)
        ml_log.JsonLogger(tmp_path, store := TrainingRunStore(LocalStorage(tmp_path))).log_metrics({"a": 3})
        assert store.read_metrics() == [{"a": 1}, *kept, {"a": 3}]

    def test_loggers_tell_their_store(self, tmp_path: Path) -> None:
        store = TrainingRunStore(LocalStorage(tmp_path))
        plain, stored = ml_log.JsonLogger(tmp_path), ml_log.JsonLogger(tmp_path, store)
        assert plain.store is None and ml_log.MultiplexLogger([plain]).store is None
        assert ml_log.MultiplexLogger([plain, stored]).store is store


class TestSaveCheckpoint:
    def test_it_is_listed_in_the_folder_and_in_the_store(self, save: Save, tmp_path: Path) -> None:  # noqa: F811
        run, store = tmp_path / "run", TrainingRunStore(LocalStorage(tmp_path / "elsewhere"), "first")
        run.mkdir()
        paths = save(FakeTrainingClient(run), "000003", run, {"batch": 3, "seen": 7}, kind="both", store=store)
        assert store.read_checkpoints() == [{"name": "000003", "batch": 3, **paths, "seen": 7}]
        assert store.read_checkpoint_records() == load_checkpoints_file(run)

    def test_a_store_of_the_same_folder_lists_it_once(self, save: Save, tmp_path: Path) -> None:  # noqa: F811
        (tmp_path / "run").mkdir()
        (tmp_path / "link").symlink_to(tmp_path / "run")
        store = TrainingRunStore(LocalStorage(tmp_path), "run")
        save(FakeTrainingClient(tmp_path / "run"), "a", tmp_path / "link", {"batch": 1}, store=store)
        assert [record["name"] for record in store.read_checkpoints()] == ["a"]

    def test_a_save_that_fails_is_listed_nowhere(self, save: Save, tmp_path: Path) -> None:  # noqa: F811
        store = TrainingRunStore(LocalStorage(tmp_path / "elsewhere"))
        with pytest.raises(RuntimeError, match="no disk"):
            save(FakeTrainingClient(tmp_path, fail=True), "a", tmp_path, {"batch": 1}, store=store)
        assert store.read_checkpoints() == [] == load_checkpoints_file(tmp_path)

    def test_a_store_takes_only_checkpoints(self, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match="'name'"):
            TrainingRunStore(LocalStorage(tmp_path)).write_checkpoint({"batch": 1})
        assert list(tmp_path.iterdir()) == []


class TestRegistry:
    def test_a_run_is_found_with_what_it_has(self, runs: Storage) -> None:
        registry = RunRegistry([runs])
        (info,) = registry.get_runs()
        assert (info.run_id, info.prefix, info.status, info.iteration_count) == (
            "recipe/first",
            "recipe/first",
            "completed",
            3,
        )
        assert info.has_config and info.has_metrics and info.has_checkpoints
        assert info.last_updated is not None and info.last_updated > 1.7e9
        assert registry.get_run("recipe/first") == info and registry.get_run("other") is None
        assert len(registry.get_training_store("recipe/first").read_metrics()) == 3
        assert registry.storage_for("recipe/first") is runs
        with pytest.raises(ConfigurationError, match=r"run_id='other': no such run; there are \['recipe/first'\]"):
            registry.get_training_store("other")

    def test_how_far_a_run_is(self, tmp_path: Path) -> None:
        store = TrainingRunStore(LocalStorage(tmp_path), "run")
        store.write_metrics({"a": 1}, step=0)
        registry = RunRegistry([store.storage])

        def status() -> str:
            (info,) = registry.refresh()
            return info.status

        assert status() == "idle"
        store.write_checkpoint({"name": "a", "batch": 1, "final": True})
        store.write_checkpoint({"name": "b", "batch": 2})
        assert status() == "idle", "it has gone on since"
        with one_writer(tmp_path / "run", "log_path"):
            assert status() == "running"
            held = (tmp_path / "run" / ".lock").read_text()
        assert status() == "idle"
        store.write_checkpoint({"name": "final", "batch": 3, "final": True})
        assert status() == "completed"
        died = {**json.loads(held), "pid": 2**22 + 1}  # above what the kernel gives out
        (tmp_path / "run" / ".lock").write_text(json.dumps(died))
        assert status() == "completed"
        (tmp_path / "run" / ".lock").write_text(json.dumps({**died, "host": "another"}))
        assert status() == "running", "nobody here can know"

    def test_runs_of_several_storages(self, tmp_path: Path) -> None:
        one, two = LocalStorage(tmp_path / "one"), LocalStorage(tmp_path / "two")
        for storage, prefixes in ((one, ["a", "sweep/b", "sweep/b/below"]), (two, ["a", "1/2/3", "1/2/3.5/4"])):
            for prefix in prefixes:
                TrainingRunStore(storage, prefix).write_metrics({"where": storage.url(prefix)})
        (tmp_path / "one" / "model").mkdir()
        (tmp_path / "one" / "model" / "config.json").write_text("{}")
        registry = RunRegistry([one, two])
        assert [run.run_id for run in registry.get_runs()] == ["a", "sweep/b", "1/2/3", two.url("a")]
        for run in registry.get_runs():
            (row,) = registry.get_training_store(run.run_id).read_metrics()
            assert row["where"] == registry.storage_for(run.run_id).url(run.prefix)
        TrainingRunStore(one, "c").write_metrics({"a": 1})
        assert registry.get_run("c") is None and len(registry.get_runs()) == 4
        assert len(registry.refresh()) == 5 and registry.get_run("c") is not None

    def test_a_run_at_the_root(self, tmp_path: Path) -> None:
        TrainingRunStore(LocalStorage(tmp_path)).write_metrics({"a": 1})
        (info,) = RunRegistry([LocalStorage(tmp_path)]).get_runs()
        assert (info.run_id, info.prefix) == (tmp_path.as_uri(), "")


class TestWhatALoopWrites:
    def test_rollouts_in_short_transcripts_and_code(self, tmp_path: Path) -> None:
        store = TrainingRunStore(LocalStorage(tmp_path), "r")
        rows = [{"group_idx": g, "traj_idx": t, "total_reward": g + t / 4} for g in range(2) for t in range(2)]
        store.write_rollouts(3, rows)
        store.write_rollouts(3, rows[:1], base_name="eval_b")
        assert store.read_rollouts(3) == rows and store.read_rollouts(3, "eval_b") == rows[:1]
        assert store.read_single_rollout(3, 1, 0) == rows[2] and store.read_single_rollout(3, 1, 2) is None
        store.write_rollouts(3, rows[1:])
        assert store.read_rollouts(3) == rows[1:], "in place of those before"
        store.write_logtree(3, {"title": "t"}, "eval_b")
        assert store.list_logtrees(3) == ["eval_b"] and store.read_logtree(3, "eval_b") == {"title": "t"}
        store.write_code_diff("+é\n")
        assert (tmp_path / "r" / "code.diff").read_text() == "+é\n"

    def test_timing(self, tmp_path: Path) -> None:
        store = TrainingRunStore(LocalStorage(tmp_path))
        span = {"name": "sample", "duration": 1.0, "wall_start": 0.0, "wall_end": 1.0}
        store.write_timing_spans(0, [])
        assert store.read_timing() == []
        store.write_timing_spans(1, [span])
        store.write_timing_spans(2, [span, span])
        assert store.read_timing() == [{"step": 1, "spans": [span]}, {"step": 2, "spans": [span, span]}]

    def test_steps_that_are_done_again_leave_the_metrics(self, tmp_path: Path) -> None:
        store = TrainingRunStore(LocalStorage(tmp_path))
        for step in range(4):
            store.write_metrics({"a": step / 2}, step=step)
        store.write_metrics({"said": 1})
        before = (tmp_path / "metrics.jsonl").read_bytes()
        assert store.truncate_metrics(2) == 2 and store.truncate_metrics(2) == 0
        assert store.read_metrics() == [{"step": 0, "a": 0.0}, {"step": 1, "a": 0.5}, {"said": 1}]
        assert (tmp_path / "metrics.jsonl.pre_resume_000002").read_bytes() == before

    def test_a_resumed_run_drops_metrics_and_timing_of_the_steps_that_it_repeats(self, tmp_path: Path) -> None:
        store = TrainingRunStore.in_folder(tmp_path / "run")
        assert store.rewind(1) == 0 and not (tmp_path / "run").exists()
        span = {"name": "sample", "duration": 1.0, "wall_start": 0.0, "wall_end": 1.0}
        for step in range(3):
            store.write_metrics({"a": step / 2}, step=step)
            store.write_timing_spans(step, [span])
        store.write_metrics({"note": 1})
        lines = (tmp_path / "run" / "metrics.jsonl").read_bytes().splitlines(keepends=True)
        assert store.rewind(1) == 2
        assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == lines[0] + lines[3]
        assert [row["step"] for row in store.read_timing()] == [0]
        assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["metrics.jsonl", "timing_spans.jsonl"]

    def test_what_a_run_is_described_by(self, tmp_path: Path) -> None:
        store = TrainingRunStore(LocalStorage(tmp_path), "run")
        assert store.read_metadata() is None and not store.has("run_metadata.json")
        store.write_metadata({"recipe": "x"})
        store.write_record("episode_000000_g000_00.json", {"turns": [1.5]})
        store.write_page(3, "train.html", "<p>é</p>")
        assert store.read_metadata() == {"recipe": "x"} and store.has("run_metadata.json")
        assert (tmp_path / "run" / "episode_000000_g000_00.json").read_text() == '{"turns":[1.5]}\n'
        assert (tmp_path / "run" / "iteration_000003" / "train.html").read_text() == "<p>é</p>"

    def test_coroutines_do_the_same(self, tmp_path: Path) -> None:
        async def write_and_read() -> list[dict[str, Any]]:
            async with LocalStorage(tmp_path) as storage:
                store = TrainingRunStore(storage)
                await store.awrite_metrics({"a": 1.0}, step=0)
                assert isinstance(storage, AsyncStorage) and await storage.alist_dir("") == ["metrics.jsonl"]
                return await store.aread_metrics()

        assert asyncio.run(write_and_read()) == [{"step": 0, "a": 1.0}]


@pytest.mark.parametrize(("key", "kind"), [("dpo_beta", "dpo"), ("loss_fn", "rl"), ("num_epochs", "sl"), ("a", None)])
def test_a_config_tells_the_kind_of_training(tmp_path: Path, key: str, kind: str | None) -> None:
    store = TrainingRunStore(LocalStorage(tmp_path), "r")
    store.write_config({key: 1})
    store.write_metrics({"a": 1.0}, step=0)
    (info,) = RunRegistry([LocalStorage(tmp_path)]).get_runs()
    assert (info.training_type, info.has_timing) == (kind, False)
