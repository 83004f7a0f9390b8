"""Which training runs and sessions there are: `<home>/registry.sqlite3`.

The cut. A checkpoint is its folder: all that is known of it lies in the folder's own files (info.py), so that a folder that is
copied in, deleted by hand or left by a killed process is listed exactly as it is, and no second list can disagree with it.
SQLite holds what no folder can say: runs that have saved nothing yet, the metadata given at their creation, the session they
belong to, and when they were last heard of. Folders win: a run that the file does not know is adopted from its checkpoints
(so the file may be deleted at any time), and a run that once saved something and whose folder is gone is forgotten.

Every call opens the file, runs one transaction and closes it: any number of threads and processes may share a home, a killed
process leaves no half row, and a file that was deleted is created again. Runs are written when they are created and when
they save, not at every training operation. A registry that cannot be written (full disk, read-only home) is logged and stops
no training: what it would have said is in the folders.
"""

from __future__ import annotations

import json
import logging
import os
import sqlite3
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from tinker_local_backend.engine.lora import LoraSpec
from tinker_local_backend.storage.catalog import list_run
from tinker_local_backend.storage.paths import run_ids_in, runs_folder

T = TypeVar("T")
logger = logging.getLogger(__name__)

REGISTRY_FILE = "registry.sqlite3"

BUSY_SECONDS = 30.0
"""How long to wait for another process's transaction, which takes milliseconds."""

_SCHEMA = (
    "CREATE TABLE IF NOT EXISTS sessions (session_id TEXT PRIMARY KEY, created REAL NOT NULL, display_name TEXT,"
    " user_metadata TEXT NOT NULL)",
    "CREATE TABLE IF NOT EXISTS runs (run_id TEXT PRIMARY KEY, session_id TEXT, base_model TEXT NOT NULL,"
    " lora_rank INTEGER NOT NULL, lora_alpha REAL NOT NULL, train_attn INTEGER NOT NULL, train_mlp INTEGER NOT NULL,"
    " train_unembed INTEGER NOT NULL, created REAL NOT NULL, last_request_time REAL NOT NULL,"
    " has_saved INTEGER NOT NULL, user_metadata TEXT NOT NULL)",
)


@dataclass(frozen=True)
class Session:
    """One service client, or one REST client made without one. Times in seconds since the epoch."""

    session_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: float = field(default_factory=time.time)
    display_name: str | None = None
    user_metadata: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Run:
    """One training run: a LoRA adapter and its history. Times in seconds since the epoch."""

    run_id: str
    session_id: str | None
    """None for a run that was adopted from its folder"""
    base_model: str
    spec: LoraSpec
    user_metadata: dict[str, str]
    created: float = field(default_factory=time.time)
    last_request_time: float = field(default_factory=time.time)
    """of its creation or its latest save"""
    has_saved: bool = False


class Registry:
    """The registry of one home. Holds no connection; safe to use from any thread."""

    def __init__(self, home: Path):
        self.home = home
        self._file = home / REGISTRY_FILE

    def record_session(self, session: Session) -> None:
        self._write("the session", lambda connection: _put_session(connection, session))

    def record_run(self, run: Run, session: Session | None) -> None:
        """Insert or replace a run, and the session that it belongs to."""

        def put(connection: sqlite3.Connection) -> None:
            if session is not None:
                _put_session(connection, session)
            _put_run(connection, run, "REPLACE")

        self._write(f"run {run.run_id}", put)

    def runs(self) -> list[Run]:
        """All runs of the home, newest first, as the folders and the file together say."""
        known = {run.run_id: run for run in self._read("SELECT * FROM runs", _run)}
        folders = set(run_ids_in(runs_folder(self.home)))
        gone = [run.run_id for run in known.values() if run.has_saved and run.run_id not in folders]
        adopted = [run for run_id in sorted(folders - known.keys()) if (run := _adopt(self.home, run_id)) is not None]
        if gone or adopted:
            self._write("what its folders say", lambda connection: _reconcile(connection, gone, adopted))
        runs = [run for run in known.values() if run.run_id not in gone] + adopted
        return sorted(runs, key=lambda run: (-run.created, run.run_id))

    def sessions(self) -> list[Session]:
        """All sessions, newest first."""
        sessions = self._read("SELECT * FROM sessions", _session)
        return sorted(sessions, key=lambda session: (-session.created, session.session_id))

    def _read(self, query: str, convert: Callable[[sqlite3.Row], T]) -> list[T]:
        if not self._file.exists():
            return []
        try:
            return self._transact(lambda connection: [convert(row) for row in connection.execute(query)])
        except (sqlite3.Error, OSError) as error:
            logger.warning("the run registry %s cannot be read: %s; listing what the folders say", self._file, error)
            return []

    def _write(self, what: str, function: Callable[[sqlite3.Connection], None]) -> None:
        try:
            self.home.mkdir(parents=True, exist_ok=True)
            self._transact(function)
        except (sqlite3.Error, OSError) as error:
            logger.warning("the run registry %s could not record %s: %s", self._file, what, error)

    def _transact(self, function: Callable[[sqlite3.Connection], T]) -> T:
        try:
            with self._transaction() as connection:
                return function(connection)
        except sqlite3.OperationalError:
            raise
        except (sqlite3.DatabaseError, ValueError, IndexError) as error:
            # No database, or one with something else in it.
            aside = self._file.with_name(f"{REGISTRY_FILE}.damaged-{uuid.uuid4().hex[:8]}")
            logger.warning("the run registry %s is damaged (%s); moved to %s, starting over", self._file, error, aside)
            with suppress(FileNotFoundError):  # another process did it
                os.replace(self._file, aside)
            for rest in ("-wal", "-shm"):
                self._file.with_name(REGISTRY_FILE + rest).unlink(missing_ok=True)
            with self._transaction() as connection:
                return function(connection)

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with closing(sqlite3.connect(self._file, timeout=BUSY_SECONDS, isolation_level=None)) as connection:
            connection.row_factory = sqlite3.Row
            _use_wal(connection)
            connection.execute("BEGIN IMMEDIATE")
            try:
                for statement in _SCHEMA:
                    connection.execute(statement)
                yield connection
                connection.execute("COMMIT")
            except BaseException:
                with suppress(sqlite3.Error):
                    connection.execute("ROLLBACK")
                raise


def _use_wal(connection: sqlite3.Connection) -> None:
    """Switching a new file to WAL does not wait for locks by itself."""
    deadline = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def _put_session(connection: sqlite3.Connection, session: Session) -> None:
    _insert(connection, "sessions", "REPLACE", vars(session))


def _put_run(connection: sqlite3.Connection, run: Run, conflict: str) -> None:
    row, spec = dict(vars(run)), vars(run.spec)
    del row["spec"]
    renamed = {key if key.startswith("train_") else f"lora_{key}": value for key, value in spec.items()}
    _insert(connection, "runs", conflict, row | renamed)


def _insert(connection: sqlite3.Connection, table: str, conflict: str, row: dict[str, Any]) -> None:
    columns, places = ", ".join(row), ", ".join(f":{key}" for key in row)
    values = {**row, "user_metadata": json.dumps(row["user_metadata"])}
    connection.execute(f"INSERT OR {conflict} INTO {table} ({columns}) VALUES ({places})", values)


def _session(row: sqlite3.Row) -> Session:
    return Session(row["session_id"], row["created"], row["display_name"], json.loads(row["user_metadata"]))


def _run(row: sqlite3.Row) -> Run:
    flags = [bool(row[name]) for name in ("train_attn", "train_mlp", "train_unembed")]
    return Run(
        run_id=row["run_id"],
        session_id=row["session_id"],
        base_model=row["base_model"],
        spec=LoraSpec(row["lora_rank"], *flags, alpha=row["lora_alpha"]),
        created=row["created"],
        last_request_time=row["last_request_time"],
        has_saved=bool(row["has_saved"]),
        user_metadata=json.loads(row["user_metadata"]),
    )


def _adopt(home: Path, run_id: str) -> Run | None:
    """What a run's checkpoints say of it: the metadata on which they all agree. None when none of them can be read."""
    entries = list_run(home, run_id).entries
    if not entries:
        return None
    first, last = entries[0].info, entries[-1].info
    agreed = set(first.user_metadata.items()).intersection(*(entry.info.user_metadata.items() for entry in entries))
    return Run(run_id, None, last.base_model, last.spec, dict(sorted(agreed)), first.created, last.created, True)


def _reconcile(connection: sqlite3.Connection, gone: list[str], adopted: list[Run]) -> None:
    connection.executemany("DELETE FROM runs WHERE run_id = ? AND has_saved", [(run_id,) for run_id in gone])
    for run in adopted:
        _put_run(connection, run, "IGNORE")  # the process that owns it may have come first, and knows more
