"""The life of a checkpoint after it was saved: found, listed, published, copied, archived, expired and deleted.

A checkpoint is a folder and a row. What is fixed when it is saved is in its folder (info.py). What changes later, when it expires
and whether it is public, is in its row of `<home>/registry.sqlite3` (database.py) and nowhere else. A row belongs to the folder
that was created at the same time, as its description says, so one that was replaced is not taken for the old one.

Folders decide what there is. One without a row (copied in by hand, saved while the database could not be written, or the database
is lost) is adopted when it is read or listed: it is not public, and expires as it was saved. A row without a folder is dropped by
the next listing. Rows also cache descriptions and sizes, for as long as a folder has the same inode and time of change, so that a
listing opens no file twice.
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

from tinker_local_backend.errors import CheckpointError, RequestError
from tinker_local_backend.storage import files
from tinker_local_backend.storage.database import Database
from tinker_local_backend.storage.info import INFO_FILE, CheckpointInfo, expiry, info_in, missing, read_object
from tinker_local_backend.storage.paths import KINDS, CheckpointPath, check_run_id, names_in, runs_folder

_OLD_FILES = ("expires_at.json", "public.json")
"""Where earlier versions kept, in the folder, what is in the row now."""

_OF_PATH = "run_id = :run_id AND kind = :kind AND name = :name"
_OF_CHECKPOINT = f"{_OF_PATH} AND created = :created"
_PUT = """INSERT INTO checkpoint_states
    VALUES (:run_id, :kind, :name, :created, :expires_at, :public, :stamp, :info, :size_bytes)
    ON CONFLICT (run_id, kind, name, created) DO UPDATE SET stamp = :stamp, info = :info, size_bytes = :size_bytes"""
"""The expiry and the public flag of an existing row stay."""


@dataclass(frozen=True)
class CheckpointEntry:
    """A line of a listing."""

    path: CheckpointPath
    info: CheckpointInfo
    expires_at: float | None
    """as it stands now; `info` has what it was saved with"""
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
    """whose description cannot be read; they can still be deleted"""


def record(home: Path, path: CheckpointPath, info: CheckpointInfo) -> None:
    """Give a checkpoint that was just saved its row, in place of those of what had its name before."""
    entry = CheckpointEntry(path, info, info.expires_at, public=False, size_bytes=0)

    def put(connection: sqlite3.Connection) -> None:
        key = _key(path, info.created)
        connection.execute(f"DELETE FROM checkpoint_states WHERE {_OF_PATH} AND created < :created", key)
        _put(connection, entry)

    Database(home).record(f"checkpoint {path}", put)


def read_info(home: Path, path: CheckpointPath, base_model: str | None = None) -> CheckpointInfo:
    """Raises CheckpointError when the checkpoint is absent, expired or damaged, RequestError when it is of another base model."""
    info = read_entry(home, path).info
    if base_model not in (None, info.base_model):
        raise RequestError(f"checkpoint {path} is of base model {info.base_model!r}, not {base_model!r}")
    return info


def read_entry(home: Path, path: CheckpointPath) -> CheckpointEntry:
    """As read_info, with the state of the row. The size is not looked at."""
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
            f"checkpoint {path} has expired (it was saved with a ttl); go on from another one, such as `final`"
        )
    return entry


def list_run(home: Path, run_id: str) -> RunListing:
    """The checkpoints that a run has now; expired ones are deleted on the way. Empty for an unknown run."""
    return list_runs(home, [run_id])[run_id]


def list_runs(home: Path, run_ids: Sequence[str]) -> dict[str, RunListing]:
    """As list_run, of several runs. Files are opened only in folders that have changed since they were last listed."""
    listings = {run_id: RunListing([], []) for run_id in run_ids}
    rows = _rows(home, run_ids) if run_ids else {}
    read: list[tuple[CheckpointEntry, str]] = []
    for path, folder in _folders(home, run_ids):
        known = rows.pop(path, [])
        try:
            found = os.lstat(folder)
            stamp = f"{found.st_ino}:{found.st_mtime_ns}"
            entry = next((_cached(path, row) for row in known if row["stamp"] == stamp), None)
            if entry is None:
                info = info_in(Path(folder), path)
                row = next((row for row in known if row["created"] == info.created), None)
                entry = _entry(path, info, Path(folder), row)
                size = sum(file.stat().st_size for file in Path(folder).iterdir() if not file.is_symlink())
                entry = replace(entry, size_bytes=size)
                read.append((entry, stamp))
        except (CheckpointError, OSError):
            if os.path.exists(folder):  # else somebody deleted it while we looked
                listings[path.run_id].damaged.append(path)
            continue
        listings[path.run_id].entries.append(entry)
    stale = []
    for path, known in rows.items():
        with suppress(RequestError):  # a symbolic link leads elsewhere
            if not files.recover(path.folder(home)):
                stale += [_key(path, row["created"]) for row in known]

    def reconcile(connection: sqlite3.Connection) -> None:
        connection.executemany(f"DELETE FROM checkpoint_states WHERE {_OF_CHECKPOINT}", stale)
        for entry, stamp in read:
            _put(connection, entry, stamp)

    if read or stale:
        Database(home).record("what its folders say", reconcile)
    for listing in listings.values():
        alive = [e for e in listing.entries if not (e.has_expired and _remove_expired(home, e.path, e.info.created))]
        listing.entries[:] = sorted(alive, key=lambda entry: (entry.info.created, str(entry.path)))
    return listings


def _folders(home: Path, run_ids: Sequence[str]) -> Iterator[tuple[CheckpointPath, str]]:
    """Checkpoints of runs and their folders, as strings: a Path takes as long to make as all that is done with it.

    What killed processes left unfinished is cleared away first.
    """
    for run_id in run_ids:
        run = runs_folder(home) / check_run_id(run_id)
        # What is reached through a symbolic link is not ours to list or clean.
        real = [] if run.is_symlink() else names_in(run)
        for kind in KINDS:
            if kind in real:
                files.remove_stale(run / kind)
                for name in names_in(run / kind):
                    yield CheckpointPath(run_id, kind, name), f"{run}/{kind}/{name}"


def _key(path: CheckpointPath, created: float) -> dict[str, object]:
    """What a row is found by."""
    return {**vars(path), "created": created}


def _rows(home: Path, run_ids: Sequence[str]) -> dict[CheckpointPath, list[sqlite3.Row]]:
    """Of these runs. A path has several while it is overwritten, or after that was cut short."""
    rows: dict[CheckpointPath, list[sqlite3.Row]] = {}
    query = "SELECT * FROM checkpoint_states WHERE run_id IN (SELECT value FROM json_each(?))"
    for row in Database(home).read(query, [json.dumps(run_ids)], lambda row: row):
        rows.setdefault(CheckpointPath(row["run_id"], row["kind"], row["name"]), []).append(row)
    return rows


def _put(connection: sqlite3.Connection, entry: CheckpointEntry, stamp: str | None = None) -> None:
    """Insert a row, or change what the one that there is caches; without a stamp nothing is cached."""
    info = {"info": json.dumps(entry.info.to_json()), "stamp": stamp}
    connection.execute(_PUT, {**vars(entry), **_key(entry.path, entry.info.created), **info})


def _cached(path: CheckpointPath, row: sqlite3.Row) -> CheckpointEntry | None:
    """What a row caches of its folder; None where that makes no sense, or was written by another version."""
    with suppress(ValueError, TypeError, KeyError):
        info = CheckpointInfo.from_json(json.loads(row["info"]))
        return CheckpointEntry(path, info, row["expires_at"], bool(row["public"]), row["size_bytes"])


def _entry(path: CheckpointPath, info: CheckpointInfo, folder: Path, row: sqlite3.Row | None) -> CheckpointEntry:
    """What was read of a folder, with the state in its row; without a row with the state that it begins with."""
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
            state[name] = None  # one that cannot be read expires nothing: better kept than lost
    return CheckpointEntry(path, info, state["expires_at"], bool(state["public"]), 0)


def remove(home: Path, path: CheckpointPath) -> None:
    """Delete a checkpoint, also a damaged one, and its archive. Raises CheckpointError when there is none."""
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
    Database(home).record(f"that {path} is deleted", lambda connection: connection.execute(delete, key))


def remove_expired(home: Path, run_id: str) -> None:
    """Delete those checkpoints of a run whose rows have expired, without looking at the others."""
    query = "SELECT * FROM checkpoint_states WHERE run_id = ? AND expires_at <= ?"
    for row in Database(home).read(query, (run_id, time.time()), lambda row: row):
        _remove_expired(home, CheckpointPath(run_id, row["kind"], row["name"]), row["created"])


def _remove_expired(home: Path, path: CheckpointPath, created: float) -> bool:
    """Delete a checkpoint and its row, if the row says that it has expired. Returns whether the checkpoint was deleted."""
    statement = f"DELETE FROM checkpoint_states WHERE {_OF_CHECKPOINT} AND expires_at <= :now"

    def is_meant(folder: Path) -> bool:
        return info_in(folder, path).created == created

    def delete(connection: sqlite3.Connection) -> bool:
        if not connection.execute(statement, {**_key(path, created), "now": time.time()}).rowcount:
            return False  # its ttl was changed meanwhile
        return files.recover(folder) and is_meant(folder) and files.discard(folder, is_meant)

    # Deleting is a courtesy of whoever comes by; one that cannot be deleted stays refused as expired.
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
    """Mark it as published, which on one's own machine is a mark and nothing more."""
    _set(home, path, "public", public)


def _set(home: Path, path: CheckpointPath, column: str, value: object) -> None:
    """Change a row. Raises CheckpointError when there is no such checkpoint, CheckpointWriteError when the disk refuses."""
    read_entry(home, path)  # which makes the row of a folder that has none
    statement = f"UPDATE checkpoint_states SET {column} = :value WHERE {_OF_PATH}"
    with files.writing(f"{column} of checkpoint {path}"):
        changed = Database(home).change(
            lambda connection: connection.execute(statement, {**vars(path), "value": value}).rowcount
        )
    if not changed:
        raise missing(path.folder(home), path)


def copy(home: Path, source: CheckpointPath, run_id: str, ttl_seconds: float | None) -> CheckpointPath:
    """Copy a checkpoint's files into another run, with a ttl of its own. Returns the copy's path."""
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
    """Write the checkpoint's files into a .tar.gz, without a folder around them. Returns its path."""
    info = read_info(home, path)
    target = path.archive(home)
    with files.writing(f"the archive of checkpoint {path}"):
        target.parent.mkdir(parents=True, exist_ok=True)
        # Weights hardly compress: the fastest level loses nothing.
        with files.staging_file(target) as staging, tarfile.open(staging, "w:gz", compresslevel=1) as tar:
            for file in _files(home, path, info):
                tar.add(file, arcname=file.name, recursive=False)
    return target


def _files(home: Path, path: CheckpointPath, info: CheckpointInfo) -> Iterator[Path]:
    """The files to copy.

    Raises CheckpointError for one that is not a plain file, which could lead out of the home, and at the end if the checkpoint
    was overwritten meanwhile: the files would be of two.
    """
    for file in sorted(file for file in path.folder(home).iterdir() if not file.name.startswith(".")):
        if file.is_symlink() or not file.is_file():
            raise CheckpointError(
                f"checkpoint {path}: {file.name} is not a plain file; remove it or put the file itself there"
            )
        yield file
    if read_info(home, path).created != info.created:
        raise CheckpointError(f"checkpoint {path} was overwritten while it was read; try again")
