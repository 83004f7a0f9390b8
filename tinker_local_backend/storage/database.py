"""The home's SQLite file, `<home>/registry.sqlite3`: tables of runs and sessions (registry.py) and of checkpoints (catalog.py).

Every call opens the file, runs one transaction and closes it, so any number of threads and processes may share a home, a killed
process leaves no partial row, and a deleted file is created again. A damaged file is moved aside and rebuilt from the folders. If
the file cannot be read or written (full disk, read-only home), everything that folders record still works.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
logger = logging.getLogger(__name__)

REGISTRY_FILE = "registry.sqlite3"

BUSY_SECONDS = 30.0
"""How long to wait for another process's transaction, which takes milliseconds."""

_VERSION = 2
"""Schema version, stored in PRAGMA user_version; 0: a new file, or one of an earlier version."""

_SCHEMA = (
    "CREATE TABLE IF NOT EXISTS sessions (session_id TEXT PRIMARY KEY, created REAL NOT NULL, display_name TEXT,"
    " user_metadata TEXT NOT NULL)",
    "CREATE TABLE IF NOT EXISTS runs (run_id TEXT PRIMARY KEY, session_id TEXT, base_model TEXT NOT NULL,"
    " lora_rank INTEGER NOT NULL, lora_alpha REAL NOT NULL, train_attn INTEGER NOT NULL, train_mlp INTEGER NOT NULL,"
    " train_unembed INTEGER NOT NULL, created REAL NOT NULL, last_request_time REAL NOT NULL,"
    " has_saved INTEGER NOT NULL, user_metadata TEXT NOT NULL)",
    # Version 0: only a cache of the folders.
    "DROP TABLE IF EXISTS checkpoints",
    "CREATE TABLE IF NOT EXISTS checkpoint_states (run_id TEXT NOT NULL, kind TEXT NOT NULL, name TEXT NOT NULL,"
    " created REAL NOT NULL, expires_at REAL, public INTEGER NOT NULL, stamp TEXT, info TEXT NOT NULL,"
    " size_bytes INTEGER NOT NULL, PRIMARY KEY (run_id, kind, name, created))",
    "CREATE INDEX IF NOT EXISTS expiring ON checkpoint_states (run_id, expires_at) WHERE expires_at IS NOT NULL",
    # Version 1: adapters left routed experts frozen.
    "ALTER TABLE runs ADD COLUMN lora_experts TEXT NOT NULL DEFAULT 'frozen'",
    f"PRAGMA user_version = {_VERSION}",
)


class Database:
    """Keeps no connection open; safe to use from any thread."""

    def __init__(self, home: Path):
        self.home = home
        self._file = home / REGISTRY_FILE

    def read(
        self, query: str, parameters: Sequence[object] | Mapping[str, object], convert: Callable[[sqlite3.Row], T]
    ) -> list[T]:
        """Converted rows; none if the file is missing or cannot be read."""

        def select(connection: sqlite3.Connection) -> list[T]:
            try:
                return [convert(row) for row in connection.execute(query, parameters)]
            except (ValueError, IndexError) as error:  # unexpected contents
                raise sqlite3.DatabaseError(str(error)) from error

        if not self._file.exists():
            return []
        try:
            return self._run(select, "BEGIN")
        except (sqlite3.Error, OSError) as error:
            logger.warning(
                "the run registry %s cannot be read: %s; listing from the folders instead", self._file, error
            )
            return []

    def change(self, function: Callable[[sqlite3.Connection], T]) -> T:
        """Run a transaction, all or nothing. Raises sqlite3.Error or OSError if the file cannot be written."""
        self.home.mkdir(parents=True, exist_ok=True)
        return self._run(function, "BEGIN IMMEDIATE")

    def record(self, what: str, function: Callable[[sqlite3.Connection], object]) -> None:
        """As `change`, for data that folders also record: a failure is only logged, with `what`."""
        try:
            self.change(function)
        except (sqlite3.Error, OSError) as error:
            logger.warning("the run registry %s could not record %s: %s", self._file, what, error)

    def _run(self, function: Callable[[sqlite3.Connection], T], begin: str) -> T:
        try:
            return self._transact(function, begin)
        except sqlite3.DatabaseError as error:
            if type(error) is not sqlite3.DatabaseError:
                raise  # the file is intact, but cannot be read or written now
            aside = self._file.with_name(f"{REGISTRY_FILE}.damaged-{uuid.uuid4().hex[:8]}")
            logger.warning("the run registry %s is damaged (%s); moved to %s, starting over", self._file, error, aside)
            with suppress(FileNotFoundError):  # another process moved it first
                os.replace(self._file, aside)
            for rest in ("-wal", "-shm"):
                self._file.with_name(REGISTRY_FILE + rest).unlink(missing_ok=True)
            return self._transact(function, begin)

    def _transact(self, function: Callable[[sqlite3.Connection], T], begin: str) -> T:
        uri, writable = self._file.absolute().as_uri(), os.access(self.home, os.W_OK)
        if not (writable or self._file.with_name(f"{REGISTRY_FILE}-wal").exists()):
            uri += "?immutable=1"  # otherwise reading creates files next to it, which fails in a read-only home
        # Closed without a commit, a transaction is rolled back.
        with closing(sqlite3.connect(uri, uri=True, timeout=BUSY_SECONDS, isolation_level=None)) as connection:
            connection.row_factory = sqlite3.Row
            if writable and _is_old(connection):
                begin = "BEGIN IMMEDIATE"
            if begin == "BEGIN IMMEDIATE":
                # In WAL mode readers do not wait for writers. Setting it fails while others use a new file.
                with suppress(sqlite3.OperationalError):
                    connection.execute("PRAGMA journal_mode=WAL")
            connection.execute(begin)
            if writable and begin == "BEGIN IMMEDIATE" and _is_old(connection):  # or another process was faster
                for statement in _SCHEMA:
                    connection.execute(statement)
            result = function(connection)
            connection.execute("COMMIT")
            return result


def _is_old(connection: sqlite3.Connection) -> bool:
    return bool(connection.execute("PRAGMA user_version").fetchone()[0] < _VERSION)
