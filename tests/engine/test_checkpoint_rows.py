"""What changes after a save, the expiry and the public flag, is in the checkpoint's row alone, never lost and never another's."""

import json
import logging
import os
import shutil
import sqlite3
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.engine.helpers import assert_same, weights
from tests.engine.test_checkpoints import folder, train
from tests.engine.test_registry import script
from tinker_local_backend import CheckpointError, RestClient, ServiceClient, TrainingClient
from tinker_local_backend.storage import catalog, files
from tinker_local_backend.storage.database import REGISTRY_FILE
from tinker_local_backend.storage.files import CheckpointWriteError
from tinker_local_backend.storage.info import info_in
from tinker_local_backend.storage.paths import CheckpointPath


@pytest.fixture
def own_home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def own(own_home: Path) -> Iterator[ServiceClient]:
    with ServiceClient(home=own_home) as service:
        yield service


@pytest.fixture
def client(own: ServiceClient, tied_model: str) -> TrainingClient:
    return own.create_lora_training_client(tied_model, rank=2, seed=0, train_mlp=False).result()


@pytest.fixture
def rest(own_home: Path) -> RestClient:
    return RestClient(own_home)


def states(home: Path) -> dict[str, tuple[float | None, bool]]:
    """Expiry and public flag of all checkpoints, by name."""
    listed = RestClient(home).list_user_checkpoints(limit=1000).result().checkpoints
    return {
        c.checkpoint_id.partition("/")[2]: (c.expires_at and c.expires_at.timestamp(), bool(c.public)) for c in listed
    }


def rows(home: Path) -> set[str]:
    with closing(sqlite3.connect(home / REGISTRY_FILE)) as connection:
        return {name for (name,) in connection.execute("SELECT name FROM checkpoint_states")}


def lose_database(home: Path) -> None:
    for file in home.glob(f"{REGISTRY_FILE}*"):
        file.unlink()


def break_database(home: Path) -> None:
    """So that it can be neither read nor written."""
    lose_database(home)
    (home / REGISTRY_FILE).mkdir()


def move_time(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    now = time.time() + seconds
    monkeypatch.setattr(time, "time", lambda: now)


# Homes of earlier versions

OLD_SCHEMA = """
CREATE TABLE sessions (session_id TEXT PRIMARY KEY, created REAL NOT NULL, display_name TEXT, user_metadata TEXT NOT NULL);
CREATE TABLE runs (run_id TEXT PRIMARY KEY, session_id TEXT, base_model TEXT NOT NULL, lora_rank INTEGER NOT NULL,
    lora_alpha REAL NOT NULL, train_attn INTEGER NOT NULL, train_mlp INTEGER NOT NULL, train_unembed INTEGER NOT NULL,
    created REAL NOT NULL, last_request_time REAL NOT NULL, has_saved INTEGER NOT NULL, user_metadata TEXT NOT NULL);
CREATE TABLE checkpoints (run_id TEXT NOT NULL, kind TEXT NOT NULL, name TEXT NOT NULL, stamp TEXT, entry TEXT,
    expires_at REAL, PRIMARY KEY (run_id, kind, name));
CREATE INDEX expiring ON checkpoints (run_id, expires_at) WHERE expires_at IS NOT NULL;
"""


def make_old(home: Path, run_id: str, model: str, expiries: dict[str, float | None], public: str) -> None:
    """Turn the home into what earlier code would have left: small files in the folders, and a cache of what they say."""
    lose_database(home)
    with closing(sqlite3.connect(home / REGISTRY_FILE)) as connection:
        connection.executescript(f"PRAGMA journal_mode=WAL;{OLD_SCHEMA}")
        connection.execute("INSERT INTO sessions VALUES ('earlier', 1.0, 'night shift', '{}')")
        run = (run_id, "earlier", model, 2, 32.0, True, False, True, 1.0, 2.0, True, '{"who": "me"}')
        connection.execute(f"INSERT INTO runs VALUES ({', '.join('?' * len(run))})", run)
        for place in (home / "runs" / run_id / "weights").iterdir():
            stamp = f"{place.stat().st_ino}:{place.stat().st_mtime_ns}"
            connection.execute(
                "INSERT INTO checkpoints VALUES (?, 'weights', ?, ?, '{}', 5.0)", (run_id, place.name, stamp)
            )
        connection.commit()
    weights_folder = home / "runs" / run_id / "weights"
    for name, expires_at in expiries.items():
        (weights_folder / name / "expires_at.json").write_text(json.dumps({"expires_at": expires_at}) + "\n")
    (weights_folder / public / "public.json").write_text('{"public": true}\n')


def test_a_home_of_an_earlier_version_lists_expires_and_resumes_as_before(
    own: ServiceClient,
    client: TrainingClient,
    rest: RestClient,
    own_home: Path,
    tied_model: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    train(client, range(1))
    ttls = {"plain": None, "saved": 100, "prolonged": 100, "kept": 100, "shortened": 1000, "gone": None}
    paths = {name: client.save_state(name, ttl_seconds=ttl).result().path for name, ttl in ttls.items()}
    saved_expiry = states(own_home)["saved"][0]
    now = time.time()
    expiries = {"prolonged": now + 1000, "kept": None, "shortened": now + 50, "gone": now - 1}
    make_old(own_home, client.model_id, tied_model, expiries, public="kept")

    run = rest.get_training_run(client.model_id).result()
    assert run.user_metadata == {"who": "me"} and run.last_request_time.timestamp() == 2.0
    assert rest.get_session("earlier").result().training_run_ids == [client.model_id]
    expected = {
        "plain": (None, False),
        "saved": (saved_expiry, False),
        "prolonged": (pytest.approx(now + 1000, abs=1e-3), False),
        "kept": (None, True),
        "shortened": (pytest.approx(now + 50, abs=1e-3), False),
    }
    assert states(own_home) == expected and states(own_home) == expected
    assert not folder(own_home, paths["gone"]).exists()
    other = own.create_training_client_from_state_with_optimizer(paths["kept"]).result()
    assert_same(weights(other), weights(client))

    move_time(monkeypatch, 200)
    for name in ("saved", "shortened"):
        with pytest.raises(CheckpointError, match="expired"):
            own.create_training_client_from_state(paths[name])
    assert set(states(own_home)) == {"plain", "prolonged", "kept"}
    with closing(sqlite3.connect(own_home / REGISTRY_FILE)) as connection:
        tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    assert tables == {"sessions", "runs", "checkpoint_states"}


def test_reading_honours_an_earlier_version_s_files_and_changes_are_made_to_the_row(
    own: ServiceClient, client: TrainingClient, rest: RestClient, own_home: Path, tied_model: str
) -> None:
    paths = {name: client.save_state(name).result().path for name in ("expired", "kept")}
    now = time.time()
    make_old(own_home, client.model_id, tied_model, {"expired": now - 1, "kept": now + 100}, public="kept")
    with pytest.raises(CheckpointError, match="expired"):
        own.create_sampling_client(paths["expired"])
    before = sorted(path.name for path in folder(own_home, paths["kept"]).iterdir())
    rest.unpublish_checkpoint_from_tinker_path(paths["kept"]).result()
    rest.set_checkpoint_ttl_from_tinker_path(paths["kept"], None).result()
    assert states(own_home) == {"kept": (None, False)}, "files of an earlier version count once"
    assert sorted(path.name for path in folder(own_home, paths["kept"]).iterdir()) == before
    copied = rest.copy_weights(paths["kept"]).result()
    assert sorted(p.name for p in folder(own_home, copied).iterdir()) == sorted(
        {*before} - {"expires_at.json", "public.json"}
    )


# Which folder a row belongs to


def test_a_folder_put_in_another_s_place_begins_anew(client: TrainingClient, rest: RestClient, own_home: Path) -> None:
    first, second = client.save_state("a").result().path, client.save_state("b").result().path
    rest.publish_checkpoint_from_tinker_path(first).result()
    rest.set_checkpoint_ttl_from_tinker_path(first, 1000).result()
    shutil.move(folder(own_home, first), own_home / "aside")
    shutil.copytree(folder(own_home, second), folder(own_home, first))
    assert states(own_home) == {"a": (None, False), "b": (None, False)}
    shutil.rmtree(folder(own_home, first))
    assert set(states(own_home)) == rows(own_home) == {"b"}
    shutil.move(own_home / "aside", folder(own_home, first))
    assert states(own_home) == {"a": (None, False), "b": (None, False)}


def test_what_is_put_into_a_folder_changes_nothing_of_its_state(
    client: TrainingClient, rest: RestClient, own_home: Path
) -> None:
    path = client.save_state("a").result().path
    rest.publish_checkpoint_from_tinker_path(path).result()
    (folder(own_home, path) / "notes.txt").write_text("good")
    assert states(own_home) == {"a": (None, True)}


COPY = """
import os, sys
from pathlib import Path
from tinker_local_backend.storage import catalog, files
from tinker_local_backend.storage.paths import CheckpointPath
real = catalog.{function}
def die(*arguments, **keywords):
    {before}
    os.kill(os.getpid(), 9)
catalog.{function} = die
source, target = map(CheckpointPath.parse, sys.argv[2:4])
catalog.copy(Path(sys.argv[1]), source, target.run_id, 1000)
"""


@pytest.mark.parametrize("before", ["pass", "real(*arguments, **keywords)"], ids=["before its row", "after it"])
def test_an_overwrite_that_is_killed_at_its_row_is_the_new_checkpoint(
    client: TrainingClient, rest: RestClient, own_home: Path, before: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = client.save_state("x").result().path
    target = rest.copy_weights(source, ttl_seconds=100).result()
    rest.publish_checkpoint_from_tinker_path(target).result()
    process = script(COPY.format(function="record", before=before), str(own_home), source, target)
    process.communicate()
    assert process.returncode == -9
    move_time(monkeypatch, 200)
    rest.get_weights_info_by_tinker_path(target).result()
    (found,) = [c for c in rest.list_user_checkpoints().result().checkpoints if c.tinker_path == target]
    assert not found.public and found.expires_at is not None
    assert (found.expires_at - found.time).total_seconds() == pytest.approx(1000)


# Many at once

CHANGE = """
import sys
from pathlib import Path
from tinker_local_backend.storage import catalog, files
from tinker_local_backend.storage.paths import CheckpointPath
home, path, first = Path(sys.argv[1]), CheckpointPath.parse(sys.argv[2]), int(sys.argv[3])
for i in range(15):
    mine = CheckpointPath(path.run_id, path.kind, f"n{first + i}")
    catalog.set_ttl(home, mine, 1000 + first + i)
    catalog.set_public(home, mine, True)
    catalog.list_run(home, path.run_id)
"""


def test_processes_that_change_and_list_at_once_lose_nothing(client: TrainingClient, own_home: Path) -> None:
    path = client.save_state("n0").result().path
    for i in range(1, 45):
        shutil.copytree(folder(own_home, path), folder(own_home, path).with_name(f"n{i}"))
    begun = time.time()
    processes = [script(CHANGE, str(own_home), path, str(first)) for first in (0, 15, 30)]
    for process in processes:
        _, errors = process.communicate()
        assert process.returncode == 0 and "registry" not in errors, errors
    found = states(own_home)
    assert len(found) == 45 and all(public for _, public in found.values())
    for name, (expires_at, _) in found.items():
        assert expires_at is not None and expires_at > begun + 1000 + int(name[1:])
    assert len({round((expires_at or 0) - begun) for expires_at, _ in found.values()}) > 30, "each its own"


def test_a_ttl_that_is_taken_away_while_others_delete_is_kept(
    client: TrainingClient, own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The row decides at the moment of the deletion, and not when the listing began."""
    path = client.save_state("x", ttl_seconds=100).result().path
    remove_stale = catalog.files.remove_stale

    def change(parent: Path) -> None:
        with closing(sqlite3.connect(own_home / REGISTRY_FILE)) as connection, connection:
            connection.execute("UPDATE checkpoint_states SET expires_at = NULL")
        remove_stale(parent)

    monkeypatch.setattr(catalog.files, "remove_stale", change)
    move_time(monkeypatch, 200)
    states(own_home)
    assert folder(own_home, path).exists()
    assert states(own_home) == {"x": (None, False)}


def test_an_expired_row_does_not_take_what_replaced_its_checkpoint(
    client: TrainingClient, rest: RestClient, own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after an overwrite that was killed before it had a row: neither for a save nor for a listing, nor for a moment."""
    old, new = client.save_state("x", ttl_seconds=100).result().path, client.save_state("y").result().path
    shutil.rmtree(folder(own_home, old))
    shutil.copytree(folder(own_home, new), folder(own_home, old))
    move_time(monkeypatch, 200)

    def fail(*_: object) -> None:
        raise AssertionError("who reads the new one would miss it")

    monkeypatch.setattr(catalog.files, "discard", fail)
    client.save_state("z").result()
    assert set(states(own_home)) == {"x", "y", "z"}


def test_an_overwrite_that_is_killed_while_others_list_keeps_the_old_one_s_state(
    client: TrainingClient, rest: RestClient, own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = client.save_state("x").result().path
    rest.publish_checkpoint_from_tinker_path(path).result()
    place, remove_stale = folder(own_home, path), catalog.files.remove_stale
    retired = place.with_name(".x.old")

    def die_between_the_renames(parent: Path) -> None:
        remove_stale(parent)
        retired.mkdir()
        os.replace(place, retired / "old")
        os.utime(retired, (0, 0))

    with monkeypatch.context() as patch:
        patch.setattr(catalog.files, "remove_stale", die_between_the_renames)
        states(own_home)
    assert states(own_home) == {"x": (None, True)}


@pytest.mark.parametrize("created", [float("nan"), float("inf"), -1.0, 10**400], ids=str)
def test_a_time_that_is_none_hides_no_other_checkpoint(
    client: TrainingClient, rest: RestClient, own_home: Path, created: float
) -> None:
    paths = [client.save_state(name).result().path for name in ("good", "bad")]
    file = folder(own_home, paths[1]) / "checkpoint.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "created": created}))
    assert [*states(own_home)] == ["good"]
    assert rest.get_training_run(client.model_id).result().corrupted


def test_what_is_not_meant_is_put_back(tmp_path: Path) -> None:
    place = tmp_path / "x"
    place.mkdir()
    assert not files.discard(place, lambda _: False)
    with pytest.raises(CheckpointError):
        files.discard(place, lambda grave: info_in(grave, CheckpointPath("r", "weights", "x")).created == 1.0)
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
    assert files.discard(place, lambda _: True) and not [*tmp_path.iterdir()]


# A database that cannot be used


def test_a_checkpoint_is_saved_without_a_database_and_what_only_a_row_can_hold_is_refused(
    own: ServiceClient,
    client: TrainingClient,
    rest: RestClient,
    own_home: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    break_database(own_home)
    with caplog.at_level(logging.WARNING):
        path = client.save_state("x", ttl_seconds=100).result().path
    assert "could not record checkpoint" in caplog.text
    own.create_training_client_from_state_with_optimizer(path).result()
    for change in (
        lambda: rest.set_checkpoint_ttl_from_tinker_path(path, 5),
        lambda: rest.publish_checkpoint_from_tinker_path(path),
        lambda: rest.unpublish_checkpoint_from_tinker_path(path),
    ):
        with pytest.raises(
            CheckpointWriteError, match=r"of checkpoint .*/x could not be written: unable to open database"
        ):
            change().result()
    other = client.save_state("y").result().path
    rest.delete_checkpoint_from_tinker_path(other).result()
    assert [*states(own_home)] == ["x"]
    move_time(monkeypatch, 200)
    with pytest.raises(CheckpointError, match="expired"):
        own.create_sampling_client(path)
    states(own_home)
    assert folder(own_home, path).exists(), "nothing is deleted while the rows cannot be asked"
    (own_home / REGISTRY_FILE).rmdir()
    assert states(own_home) == {} and not folder(own_home, path).exists()


@pytest.mark.parametrize("damage", ["deleted", "damaged"])
def test_without_its_rows_a_home_expires_as_it_was_saved(
    client: TrainingClient, rest: RestClient, own_home: Path, damage: str
) -> None:
    paths = {name: client.save_state(name, ttl_seconds=1000).result().path for name in ("same", "longer", "public")}
    before = states(own_home)
    rest.set_checkpoint_ttl_from_tinker_path(paths["longer"], 5000).result()
    rest.publish_checkpoint_from_tinker_path(paths["public"]).result()
    assert states(own_home) != before
    lose_database(own_home)
    if damage == "damaged":
        (own_home / REGISTRY_FILE).write_bytes(b"no database at all" * 100)
        rest.publish_checkpoint_from_tinker_path(paths["public"]).result()
        rest.unpublish_checkpoint_from_tinker_path(paths["public"]).result()
        assert len([*own_home.glob(f"{REGISTRY_FILE}.damaged-*")]) == 1
    assert states(own_home) == before


def test_a_home_that_cannot_be_written_says_what_its_rows_say(
    client: TrainingClient, rest: RestClient, own: ServiceClient, own_home: Path, tmp_path: Path
) -> None:
    path = client.save_state("x", ttl_seconds=1000).result().path
    rest.set_checkpoint_ttl_from_tinker_path(path, None).result()
    rest.publish_checkpoint_from_tinker_path(path).result()
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = subprocess.run(["mount", "--bind", str(own_home), str(disk)], capture_output=True, text=True)
    if mount.returncode:
        pytest.skip(f"no file system can be mounted here: {mount.stderr.strip()}")
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", str(disk)], check=True)
        assert states(disk) == {"x": (None, True)}
        assert catalog.read_info(disk, CheckpointPath.parse(path)).optimizer_steps == 0
        with pytest.raises(CheckpointWriteError, match=r"could not be written: .*(readonly|unable to open)"):
            RestClient(disk).set_checkpoint_ttl_from_tinker_path(path, 5).result()
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_rows_go_with_their_checkpoints(client: TrainingClient, rest: RestClient, own_home: Path) -> None:
    path = client.save_state("x").result().path
    for _ in range(3):
        client.save_state("y", overwrite=True).result()
    with closing(sqlite3.connect(own_home / REGISTRY_FILE)) as connection:
        assert connection.execute("SELECT count(*) FROM checkpoint_states").fetchone() == (2,)
    rest.delete_checkpoint_from_tinker_path(path).result()
    assert rows(own_home) == {"y"}
    os.rename(own_home / "runs" / client.model_id, own_home / "elsewhere")
    assert states(own_home) == {} and rows(own_home) == set()
