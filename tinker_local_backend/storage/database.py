"""The home's SQLite file, `<home>/registry.sqlite3`: what no folder can say (registry.py), and what folders said (index.py).

Every call opens the file, runs one transaction and closes it: any number of threads and processes may share a home, a killed
process leaves no half row, and a file that was deleted is created again. A file that cannot be read or written (full disk,
read-only home) is logged and stops nothing: what counts is in the folders.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TypeVar

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
    "CREATE TABLE IF NOT EXISTS checkpoints (run_id TEXT NOT NULL, kind TEXT NOT NULL, name TEXT NOT NULL, stamp TEXT,"
    " entry TEXT, expires_at REAL, PRIMARY KEY (run_id, kind, name))",
    "CREATE INDEX IF NOT EXISTS expiring ON checkpoints (run_id, expires_at) WHERE expires_at IS NOT NULL",
)


class Database:
    """Holds no connection; safe to use from any thread."""

    def __init__(self, home: Path):
        self.home = home
        self._file = home / REGISTRY_FILE

    def read(self, query: str, parameters: Sequence[object], convert: Callable[[sqlite3.Row], T]) -> list[T]:
        """Converted rows; none where there is no file, or one that cannot be read."""
        if not self._file.exists():
            return []
        try:
            return self._transact(lambda connection: [convert(row) for row in connection.execute(query, parameters)])
        except (sqlite3.Error, OSError) as error:
            logger.warning("the run registry %s cannot be read: %s; listing what the folders say", self._file, error)
            return []

    def write(self, what: str, function: Callable[[sqlite3.Connection], object]) -> None:
        """Run a transaction, all of it or nothing. `what` it records is said when that fails."""
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
