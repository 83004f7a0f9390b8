"""Checkpoints after saving: look up, list, publish, copy, archive, expire, delete.

A checkpoint is a folder and a row. Its folder has the data that is fixed at saving (info.py). Its row in
`<home>/registry.sqlite3` (database.py) has the state that changes later: the expiry and the public flag. Row and folder match if
their creation times agree, so a replaced checkpoint does not inherit the old row.

A checkpoint exists if its folder does. A folder without a row (copied by hand, or the database was lost or not writable) is
adopted when it is read or listed, as not public and with the expiry it was saved with. The next listing drops rows without a
folder. Rows also cache descriptions and sizes while a folder keeps its inode and modification time, so no file is opened twice.
"""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import tarfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from tinker_local_backend.errors import CheckpointError, ConflictError, RequestError
from tinker_local_backend.storage import files
from tinker_local_backend.storage.database import Database
from tinker_local_backend.storage.info import INFO_FILE, CheckpointInfo, expiry, info_in, missing, read_object
from tinker_local_backend.storage.paths import KINDS, CheckpointPath, check_run_id, names_in, runs_folder

LATEST = "latest"
"""Name in a path that stands for the newest checkpoint, for requests that support it."""

_OLD_FILES = ("expires_at.json", "public.json")
"""Files of earlier versions, whose contents are now in the row."""

_OF_PATH = "run_id = :run_id AND kind = :kind AND name = :name"
_OF_CHECKPOINT = f"{_OF_PATH} AND created = :created"
_PUT = """INSERT INTO checkpoint_states
    VALUES (:run_id, :kind, :name, :created, :expires_at, :public, :stamp, :info, :size_bytes)
    ON CONFLICT (run_id, kind, name, created) DO UPDATE SET stamp = :stamp, info = :info, size_bytes = :size_bytes"""
"""The expiry and the public flag of an existing row stay."""


@dataclass(frozen=True)
class CheckpointEntry:
    """A checkpoint in a listing."""

    path: CheckpointPath
    info: CheckpointInfo
    expires_at: float | None
    """current expiry; `info` has the one at saving"""
    public: bool
    size_bytes: int

    @property
    def has_expired(self) -> bool:
        return self.expires_at is not None and self.expires_at <= time.time()


@dataclass(frozen=True)
class RunListing:
    """A run's checkpoints, oldest first."""

    entries: list[CheckpointEntry]
    damaged: list[CheckpointPath]
    """checkpoints with an unreadable description; they can still be deleted"""


def record(home: Path, path: CheckpointPath, info: CheckpointInfo) -> None:
    """Write the row of a checkpoint that was just saved, and delete the rows of checkpoints that it replaced."""
    entry = CheckpointEntry(path, info, info.expires_at, public=False, size_bytes=0)

    def put(connection: sqlite3.Connection) -> None:
        key = _key(path, info.created)
        connection.execute(f"DELETE FROM checkpoint_states WHERE {_OF_PATH} AND created < :created", key)
        _put(connection, entry)

    Database(home).record(f"checkpoint {path}", put)


def read_info(home: Path, path: CheckpointPath, base_model: str | None = None) -> CheckpointInfo:
    """Raises CheckpointError if the checkpoint is missing, expired or damaged, RequestError if it is of another base model."""
    info = read_entry(home, path).info
    if base_model not in (None, info.base_model):
        raise RequestError(f"checkpoint {path} is of base model {info.base_model!r}, not {base_model!r}")
    return info


def read_entry(home: Path, path: CheckpointPath) -> CheckpointEntry:
    """As read_info, with the state from its row. `size_bytes` is not computed."""
    folder, database = path.folder(home), Database(home)
    if not folder.exists():
        files.recover_any(folder)
    info = info_in(folder, path)
    query, key = f"SELECT * FROM checkpoint_states WHERE {_OF_CHECKPOINT}", _key(path, info.created)
    rows = database.read(query, key, lambda row: row)
    entry = _entry(path, info, folder, rows[0] if rows else None)
    if not rows:
        database.record(f"checkpoint {path}", lambda connection: _put(connection, entry))
    if entry.has_expired:
        raise CheckpointError(
            f"checkpoint {path} has expired (it had a ttl); continue from another one, such as `final`"
        )
    return entry


def resolve_latest(home: Path, path: CheckpointPath) -> CheckpointPath:
    """The newest checkpoint of the path's run and kind, if the path's name is LATEST and no checkpoint has that name.
    Other paths are returned unchanged. Raises CheckpointError if there is no checkpoint."""
    if path.name != LATEST or path.folder(home).exists():
        return path
    paths = [entry.path for entry in list_run(home, path.run_id).entries if entry.path.kind == path.kind]
    if not paths:
        raise CheckpointError(
            f"run {path.run_id} has no checkpoint of kind {path.kind} here, so {path} does not exist; save one"
        )
    return paths[-1]


def list_run(home: Path, run_id: str) -> RunListing:
    """A run's checkpoints, after deleting expired ones. Empty for an unknown run."""
    return list_runs(home, [run_id])[run_id]


def list_runs(home: Path, run_ids: Sequence[str]) -> dict[str, RunListing]:
    """As list_run, of several runs. Opens files only in folders that have changed since the last listing."""
    listings = {run_id: RunListing([], []) for run_id in run_ids}
    rows = _rows(home, run_ids) if run_ids else {}
    read: list[tuple[CheckpointEntry, str]] = []
    for path, folder in _folders(home, run_ids):
        known = rows.pop(path, [])
        try:
            stat = os.lstat(folder)
            stamp = f"{stat.st_ino}:{stat.st_mtime_ns}"
            entry = next((_cached(path, row) for row in known if row["stamp"] == stamp), None)
            if entry is None:
                info = info_in(Path(folder), path)
                row = next((row for row in known if row["created"] == info.created), None)
                entry = _entry(path, info, Path(folder), row)
                size = sum(file.stat().st_size for file in Path(folder).iterdir() if not file.is_symlink())
                entry = replace(entry, size_bytes=size)
                read.append((entry, stamp))
        except (CheckpointError, OSError):
            if os.path.exists(folder):  # otherwise it was deleted meanwhile
                listings[path.run_id].damaged.append(path)
            continue
        listings[path.run_id].entries.append(entry)
    stale = []
    for path, known in rows.items():
        with suppress(RequestError):  # a symbolic link to another place
            if not files.recover(path.folder(home)):
                stale += [_key(path, row["created"]) for row in known]

    def reconcile(connection: sqlite3.Connection) -> None:
        connection.executemany(f"DELETE FROM checkpoint_states WHERE {_OF_CHECKPOINT}", stale)
        for entry, stamp in read:
            _put(connection, entry, stamp)

    if read or stale:
        Database(home).record("the listing of its folders", reconcile)
    for listing in listings.values():
        alive = [e for e in listing.entries if not (e.has_expired and _remove_expired(home, e.path, e.info.created))]
        listing.entries[:] = sorted(alive, key=lambda entry: (entry.info.created, str(entry.path)))
    return listings


def _folders(home: Path, run_ids: Sequence[str]) -> Iterator[tuple[CheckpointPath, str]]:
    """Checkpoints of runs and their folders, after removing unfinished files of killed processes.
    Folders are strings, because making a Path takes as long as all other work here."""
    for run_id in run_ids:
        run = runs_folder(home) / check_run_id(run_id)
        # Neither list nor clean folders behind a symbolic link.
        real = [] if run.is_symlink() else names_in(run)
        for kind in KINDS:
            if kind in real:
                files.remove_stale(run / kind)
                for name in names_in(run / kind):
                    yield CheckpointPath(run_id, kind, name), f"{run}/{kind}/{name}"


def _key(path: CheckpointPath, created: float) -> dict[str, object]:
    """Primary key of a row."""
    return {**vars(path), "created": created}


def _rows(home: Path, run_ids: Sequence[str]) -> dict[CheckpointPath, list[sqlite3.Row]]:
    """Rows of these runs. A path has several during an overwrite, or after an interrupted one."""
    rows: dict[CheckpointPath, list[sqlite3.Row]] = {}
    query = "SELECT * FROM checkpoint_states WHERE run_id IN (SELECT value FROM json_each(?))"
    for row in Database(home).read(query, [json.dumps(run_ids)], lambda row: row):
        rows.setdefault(CheckpointPath(row["run_id"], row["kind"], row["name"]), []).append(row)
    return rows


def _put(connection: sqlite3.Connection, entry: CheckpointEntry, stamp: str | None = None) -> None:
    """Insert a row, or update the cache in an existing one; without a stamp, its cache is invalid."""
    info = {"info": json.dumps(entry.info.to_json()), "stamp": stamp}
    connection.execute(_PUT, {**vars(entry), **_key(entry.path, entry.info.created), **info})


def _cached(path: CheckpointPath, row: sqlite3.Row) -> CheckpointEntry | None:
    """The entry cached in a row; None if it is invalid, or of another version."""
    with suppress(ValueError, TypeError, KeyError):
        info = CheckpointInfo.from_json(json.loads(row["info"]))
        return CheckpointEntry(path, info, row["expires_at"], bool(row["public"]), row["size_bytes"])


def _entry(path: CheckpointPath, info: CheckpointInfo, folder: Path, row: sqlite3.Row | None) -> CheckpointEntry:
    """A folder's description with the state from its row, or without a row the initial state."""
    if row is not None:
        return CheckpointEntry(path, info, row["expires_at"], bool(row["public"]), 0)
    state: dict[str, float | None] = {"expires_at": info.expires_at, "public": False}
    for name in state:  # earlier versions kept them in the folder: expires_at.json and public.json
        try:
            value = read_object(folder / f"{name}.json")[name]
            state[name] = None if value is None else float(value)
        except FileNotFoundError:
            continue
        except (OSError, ValueError, TypeError, KeyError):
            state[name] = None  # unreadable: keep the checkpoint rather than lose it
    return CheckpointEntry(path, info, state["expires_at"], bool(state["public"]), 0)


def remove(home: Path, path: CheckpointPath) -> None:
    """Delete a checkpoint, damaged or not, and its archive. Raises CheckpointError if it does not exist."""
    folder = path.folder(home)
    if not folder.is_dir():
        files.recover_any(folder)
    if not folder.is_dir():
        raise missing(folder, path)
    key = _key(path, time.time())
    with files.writing(f"the deletion of checkpoint {path}"):
        files.discard(folder)
    path.archive(home).unlink(missing_ok=True)
    delete = f"DELETE FROM checkpoint_states WHERE {_OF_PATH} AND created < :created"
    Database(home).record(f"the deletion of {path}", lambda connection: connection.execute(delete, key))


def remove_expired(home: Path, run_id: str) -> None:
    """Delete a run's checkpoints whose rows have expired, without reading the others."""
    query = "SELECT * FROM checkpoint_states WHERE run_id = ? AND expires_at <= ?"
    for row in Database(home).read(query, (run_id, time.time()), lambda row: row):
        _remove_expired(home, CheckpointPath(run_id, row["kind"], row["name"]), row["created"])


def _remove_expired(home: Path, path: CheckpointPath, created: float) -> bool:
    """Delete a checkpoint and its row, if the row has expired. Returns whether the checkpoint was deleted."""
    statement = f"DELETE FROM checkpoint_states WHERE {_OF_CHECKPOINT} AND expires_at <= :now"

    def is_same_checkpoint(folder: Path) -> bool:
        return info_in(folder, path).created == created

    def delete(connection: sqlite3.Connection) -> bool:
        if not connection.execute(statement, {**_key(path, created), "now": time.time()}).rowcount:
            return False  # its ttl was changed meanwhile
        return files.recover(folder) and is_same_checkpoint(folder) and files.discard(folder, is_same_checkpoint)

    # A failure is harmless: the checkpoint is still refused as expired.
    with suppress(CheckpointError, RequestError, OSError, sqlite3.Error):
        folder = path.folder(home)
        if Database(home).change(delete):
            path.archive(home).unlink(missing_ok=True)
            return True
    return False


def set_ttl(home: Path, path: CheckpointPath, ttl_seconds: float | None) -> None:
    """Let a checkpoint expire `ttl_seconds` from now; None: never."""
    _set(home, path, "expires_at", expiry(ttl_seconds, time.time()))


def set_public(home: Path, path: CheckpointPath, public: bool) -> None:
    """Set the public flag, which has no other effect on a local home. Raises ConflictError if it is already set."""
    if public and read_entry(home, path).public:
        raise ConflictError(f"checkpoint {path} is already published")
    _set(home, path, "public", public)


def _set(home: Path, path: CheckpointPath, column: str, value: object) -> None:
    """Change a row. Raises CheckpointError if the checkpoint does not exist, CheckpointWriteError if the write fails."""
    read_entry(home, path)  # adds a missing row
    statement = f"UPDATE checkpoint_states SET {column} = :value WHERE {_OF_PATH}"
    with files.writing(f"{column} of checkpoint {path}"):
        changed = Database(home).change(
            lambda connection: connection.execute(statement, {**vars(path), "value": value}).rowcount
        )
    if not changed:
        raise missing(path.folder(home), path)


def copy(home: Path, source: CheckpointPath, run_id: str, ttl_seconds: float | None) -> CheckpointPath:
    """Copy a checkpoint's files into another run, with its own ttl. Returns the copy's path."""
    now = time.time()
    info = read_info(home, source)
    copied = replace(info, created=now, expires_at=expiry(ttl_seconds, now))
    target = CheckpointPath(run_id, source.kind, source.name)
    with files.writing(f"checkpoint {target}"), files.staging_folder(target.folder(home)) as staging:
        for file in _files(home, source, info):
            if file.name not in (*_OLD_FILES, INFO_FILE):
                shutil.copyfile(file, staging / file.name)
        files.write_json(staging / INFO_FILE, copied.to_json())
    record(home, target, copied)
    return target


def archive(home: Path, path: CheckpointPath) -> Path:
    """Write the checkpoint's files to the top level of a .tar.gz. Returns its path."""
    info = read_info(home, path)
    target = path.archive(home)
    with files.writing(f"the archive of checkpoint {path}"):
        target.parent.mkdir(parents=True, exist_ok=True)
        # Weights hardly compress, so use the fastest level.
        with files.staging_file(target) as staging, tarfile.open(staging, "w:gz", compresslevel=1) as tar:
            for file in _files(home, path, info):
                tar.add(file, arcname=file.name, recursive=False)
    return target


def _files(home: Path, path: CheckpointPath, info: CheckpointInfo) -> Iterator[Path]:
    """The files to copy. Raises CheckpointError for anything but a plain file, which could lead out of the home.
    Raises it at the end if the checkpoint was overwritten meanwhile: the files would be a mix of two."""
    for file in sorted(file for file in path.folder(home).iterdir() if not file.name.startswith(".")):
        if file.is_symlink() or not file.is_file():
            raise CheckpointError(f"checkpoint {path}: {file.name} is not a plain file; remove or replace it")
        yield file
    if read_info(home, path).created != info.created:
        raise CheckpointError(f"checkpoint {path} was overwritten while it was read; try again")
