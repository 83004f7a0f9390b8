"""The list of runs: folders are the truth, the file may vanish or be damaged, and many processes may use it."""

import logging
import os
import shutil
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.child import python_path
from tests.engine.test_checkpoints import folder
from tinker_local_backend import CheckpointError, RequestError, RestClient, ServiceClient, TrainingClient
from tinker_local_backend.engine.model.lora_spec import LoraSpec
from tinker_local_backend.storage import files
from tinker_local_backend.storage.database import REGISTRY_FILE
from tinker_local_backend.storage.registry import Registry, Run, Session

SPEC = LoraSpec(4, train_mlp=False)


def make_run(run_id: str, created: float = 1.0, has_saved: bool = False) -> Run:
    return Run(run_id, "session", "model", SPEC, {"a": "b"}, created, created, has_saved)


def ids(home: Path) -> set[str]:
    return {run.training_run_id for run in RestClient(home).list_training_runs().result().training_runs}


@pytest.fixture
def client(service: ServiceClient, tied_model: str) -> TrainingClient:
    metadata = {"who": "me", "step": "0"}
    return service.create_lora_training_client(tied_model, rank=2, seed=0, user_metadata=metadata).result()


def test_what_is_recorded_is_read_back(tmp_path: Path) -> None:
    registry, session = Registry(tmp_path), Session(display_name="x", user_metadata={"c": "d"})
    runs = [make_run("new", 2.0), make_run("old", 1.0)]
    for run in runs:
        registry.record_run(run, session)
    registry.record_run(runs[0], session)
    assert Registry(tmp_path).runs() == runs
    assert Registry(tmp_path).sessions() == [session]
    with sqlite3.connect(tmp_path / REGISTRY_FILE) as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    connection.close()


def test_a_lost_file_is_made_anew_from_the_folders(client: TrainingClient, service: ServiceClient, home: Path) -> None:
    rest = service.create_rest_client()
    client.save_state("a", user_metadata={"step": "1"}).result()
    client.save_weights_for_sampler("b", user_metadata={"step": "2"}).result()
    before = rest.get_training_run(client.model_id).result()
    for file in home.glob(f"{REGISTRY_FILE}*"):
        file.unlink()
    after = rest.get_training_run(client.model_id).result()
    assert after.user_metadata == {"who": "me"}  # what its checkpoints agree on
    assert after.last_request_time <= before.last_request_time
    unchanged = {"user_metadata", "last_request_time"}
    assert after.model_dump(exclude=unchanged) == before.model_dump(exclude=unchanged)
    client.save_state("c").result()  # its owner knows more, and says so
    assert rest.get_training_run(client.model_id).result().user_metadata == {"who": "me", "step": "0"}


@pytest.mark.parametrize("content", [b"no database at all" * 100, b"SQLite format 3\0" + b"\xff" * 5000])
def test_a_damaged_file_is_set_aside(
    client: TrainingClient, home: Path, tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    client.save_state("a").result()
    copy = tmp_path / "copy"
    shutil.copytree(home / "runs" / client.model_id, copy / "runs" / client.model_id)
    (copy / REGISTRY_FILE).write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert ids(copy) == {client.model_id}
    assert "is damaged" in caplog.text
    (aside,) = copy.glob(f"{REGISTRY_FILE}.damaged-*")
    assert aside.read_bytes() == content
    assert ids(copy) == {client.model_id}


def test_a_folder_deleted_by_hand_disappears(client: TrainingClient, service: ServiceClient, home: Path) -> None:
    rest = service.create_rest_client()
    first, second = client.save_state("a").result().path, client.save_state("b").result().path
    shutil.rmtree(folder(home, first))
    assert [c.tinker_path for c in rest.list_checkpoints(client.model_id).result().checkpoints] == [second]
    shutil.rmtree(home / "runs" / client.model_id)
    assert client.model_id not in ids(home)
    with pytest.raises(RequestError, match="no training run"):
        rest.list_checkpoints(client.model_id).result()
    client.save_state("a").result()
    assert client.model_id in ids(home)


def test_a_folder_copied_in_appears(client: TrainingClient, home: Path, tmp_path: Path) -> None:
    path = client.save_state("a").result().path
    shutil.copytree(home / "runs" / client.model_id, tmp_path / "runs" / client.model_id)
    rest = RestClient(tmp_path)
    assert rest.get_training_run_by_tinker_path(path).result().lora_rank == 2
    assert [c.tinker_path for c in rest.list_user_checkpoints().result().checkpoints] == [path]


def test_training_writes_nothing_to_the_registry(client: TrainingClient, home: Path) -> None:
    from tests.engine.test_checkpoints import train

    before = (home / REGISTRY_FILE).stat().st_mtime_ns
    train(client, range(3))
    client.save_weights_and_get_sampling_client().result()
    assert (home / REGISTRY_FILE).stat().st_mtime_ns == before


def test_a_run_that_could_not_be_created_is_not_listed(
    client: TrainingClient, service: ServiceClient, home: Path
) -> None:
    path = client.save_state("a").result().path
    (folder(home, path) / "adapter_model.safetensors").write_bytes(b"x")
    before = ids(home)
    with pytest.raises(CheckpointError):
        service.create_training_client_from_state(path).result()
    assert ids(home) == before


# They import no engine, and so meet each other at work.
MAKE_RUN = """
import os, sys
from pathlib import Path
from tinker_local_backend.engine.model.lora_spec import LoraSpec
from tinker_local_backend.storage import registry
from tinker_local_backend.storage.registry import Registry, Run, Session
def make_run(run_id):
    return Run(run_id, "session", "model", LoraSpec(4), {"a": "b"}, 1.0, 1.0, False)
"""

WRITER = f"""
{MAKE_RUN}
registry, session = Registry(Path(sys.argv[1])), Session()
for i in range(20):
    registry.record_run(make_run(f"{{sys.argv[2]}}-{{i}}"), session)
    registry.runs()
"""

KILLED = f"""
{MAKE_RUN}
real = registry._put_run
def put_and_die(connection, run, conflict):
    real(connection, run, conflict)
    os.kill(os.getpid(), 9)
registry._put_run = put_and_die
registry.Registry(Path(sys.argv[1])).record_run(make_run("half"), registry.Session())
"""


def script(code: str, *arguments: str) -> subprocess.Popen:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": python_path()}
    return subprocess.Popen([sys.executable, "-c", code, *arguments], env=env, stderr=subprocess.PIPE, text=True)


def test_several_processes_share_a_home(tmp_path: Path) -> None:
    processes = [script(WRITER, str(tmp_path), name) for name in "abc"]
    for process in processes:
        _, errors = process.communicate()
        assert process.returncode == 0 and "registry" not in errors, errors
    registry = Registry(tmp_path)
    assert {run.run_id for run in registry.runs()} == {f"{name}-{i}" for name in "abc" for i in range(20)}
    assert len(registry.sessions()) == 3


def test_a_killed_process_leaves_no_half_row(tmp_path: Path) -> None:
    registry = Registry(tmp_path)
    registry.record_run(make_run("whole"), Session())
    process = script(KILLED, str(tmp_path))
    process.communicate()
    assert process.returncode == -9
    assert [run.run_id for run in registry.runs()] == ["whole"]
    assert len(registry.sessions()) == 1
    registry.record_run(make_run("next"), None)
    assert len(registry.runs()) == 2


def test_a_registry_that_cannot_be_written_stops_nothing(
    tied_model: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / REGISTRY_FILE).mkdir()  # no file can be opened there
    with ServiceClient(home=tmp_path) as service, caplog.at_level(logging.WARNING):
        client = service.create_lora_training_client(tied_model, rank=1).result()
        path = client.save_state("x").result().path
        listed = service.create_rest_client().list_user_checkpoints().result().checkpoints
    assert [c.tinker_path for c in listed] == [path]
    assert "could not record run" in caplog.text


@pytest.mark.parametrize("where", ["run", "kind", "checkpoint", "file"])
def test_a_symbolic_link_leads_nowhere(
    client: TrainingClient, service: ServiceClient, home: Path, tmp_path: Path, where: str
) -> None:
    rest = service.create_rest_client()
    secret = tmp_path / "outside" / "x"
    shutil.copytree(folder(home, client.save_state("real").result().path), secret)
    (secret / ".half-done").mkdir()
    os.utime(secret / ".half-done", (0, 0))
    content = sorted(p.name for p in secret.iterdir())
    name = f"planted-{tmp_path.name}"
    if where == "run":
        (home / "runs" / name).mkdir()
        (home / "runs" / name).rmdir()
        (tmp_path / "run" / "weights").mkdir(parents=True)
        shutil.copytree(secret, tmp_path / "run" / "weights" / "x")
        (home / "runs" / name).symlink_to(tmp_path / "run")
    elif where == "kind":
        (home / "runs" / name).mkdir()
        (home / "runs" / name / "weights").symlink_to(secret.parent)
    elif where == "checkpoint":
        (home / "runs" / name / "weights").mkdir(parents=True)
        (home / "runs" / name / "weights" / "x").symlink_to(secret)
    else:
        shutil.copytree(secret, home / "runs" / name / "weights" / "x", ignore=shutil.ignore_patterns(".*"))
        file = home / "runs" / name / "weights" / "x" / "adapter_model.safetensors"
        file.unlink()
        file.symlink_to(secret / file.name)
    path = f"tinker://{name}/weights/x"
    calls = [
        lambda: service.create_sampling_client(path).result(),
        lambda: service.create_training_client_from_state_with_optimizer(path).result(),
        lambda: client.load_state(path).result(),
        lambda: rest.get_checkpoint_archive_url_from_tinker_path(path).result(),
        lambda: rest.copy_weights(path).result(),
    ]
    if where != "file":
        calls += [
            lambda: rest.delete_checkpoint_from_tinker_path(path).result(),
            lambda: rest.set_checkpoint_ttl_from_tinker_path(path, 5).result(),
            lambda: rest.publish_checkpoint_from_tinker_path(path).result(),
            lambda: rest.get_weights_info_by_tinker_path(path).result(),
        ]
    for call in calls:
        with pytest.raises((RequestError, CheckpointError), match=r"symbolic link|plain file"):
            call()
    listed = [c.tinker_path for c in rest.list_user_checkpoints(limit=1000).result().checkpoints]
    assert (path in listed) == (where == "file")
    assert sorted(p.name for p in secret.iterdir()) == content
    if where == "run":
        (home / "runs" / name).unlink()
    else:
        shutil.rmtree(home / "runs" / name)


@pytest.mark.parametrize(
    "path", ["tinker://../weights/x", "tinker://%2e%2e/weights/x", "tinker://r/weights/%2e%2e%2fx", "tinker://r/weights/..",
             "tinker:///etc/weights/x", "tinker://r/weights//etc/passwd", "/etc/passwd", "tinker://r\0/weights/x"],
)  # fmt: skip
def test_a_path_that_leaves_the_root_is_refused_by_every_call(tmp_path: Path, path: str) -> None:
    rest = RestClient(tmp_path)
    calls = [
        rest.get_training_run_by_tinker_path,
        rest.get_weights_info_by_tinker_path,
        rest.delete_checkpoint_from_tinker_path,
        rest.publish_checkpoint_from_tinker_path,
        rest.unpublish_checkpoint_from_tinker_path,
        rest.get_checkpoint_archive_url_from_tinker_path,
        rest.copy_weights,
        lambda path: rest.set_checkpoint_ttl_from_tinker_path(path, 5),
        lambda path: rest.delete_checkpoint(path, "weights/x"),
        lambda path: rest.delete_checkpoint("r", f"weights/{path}"),
        lambda path: rest.get_checkpoint_archive_url("..", "weights/x"),
        rest.get_training_run,
        rest.list_checkpoints,
    ]
    for call in calls:
        with pytest.raises(RequestError):
            call(path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", [".x.old", ".x.old.abc"], ids=["", "by an earlier version"])
def test_an_overwrite_cut_short_between_its_renames_is_undone(
    client: TrainingClient, service: ServiceClient, home: Path, name: str
) -> None:
    path = client.save_state("x").result().path
    where = folder(home, path)
    retired = where.parent / name
    retired.mkdir()
    os.replace(where, retired / "x")
    long_ago = time.time() - 10
    os.utime(retired, (long_ago, long_ago))
    service.create_training_client_from_state_with_optimizer(path).result()
    assert [p.name for p in where.parent.iterdir()] == ["x"]


def test_what_a_killed_save_left_is_cleared_away_in_time(
    client: TrainingClient, service: ServiceClient, home: Path
) -> None:
    path = client.save_state("x").result().path
    parent = folder(home, path).parent
    for name, age in ((".x.young", 0.0), (".x.old-one", files.STALE_SECONDS + 10)):
        (parent / name).mkdir()
        (parent / name / "adapter_model.safetensors").write_bytes(b"half")
        os.utime(parent / name, (time.time() - age, time.time() - age))
    only_copy = parent / ".z.old.abc" / "x"
    shutil.copytree(parent / "x", only_copy)
    os.utime(only_copy.parent, (0, 0))
    client.save_state("y").result()
    service.create_rest_client().list_checkpoints(client.model_id).result()
    assert sorted(p.name for p in parent.iterdir()) == [".x.young", "x", "y", "z"]
    shutil.rmtree(parent / ".x.young")
