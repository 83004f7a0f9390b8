"""Training runs and sessions: tables of `<home>/registry.sqlite3` (database.py).

They record what folders do not: runs without a save, metadata from creation, the session, and the time of the latest save.
As for checkpoints (catalog.py), folders decide what exists: a run without a row is adopted from its checkpoints, and the row of a
run that has saved is dropped if its folder is gone. A row is written when its run is created or saves, not at every operation.
"""

from __future__ import annotations

import json
import sqlite3
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tinker_local_backend.engine.model.lora_spec import LoraSpec
from tinker_local_backend.storage.catalog import RunListing, list_runs
from tinker_local_backend.storage.database import Database
from tinker_local_backend.storage.paths import run_ids_in, runs_folder


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
    """None if the run was adopted from its folder"""
    base_model: str
    spec: LoraSpec
    user_metadata: dict[str, str]
    created: float = field(default_factory=time.time)
    last_request_time: float = field(default_factory=time.time)
    """time of its creation or latest save"""
    has_saved: bool = False


class Registry:
    """The registry of one home. Safe to use from any thread."""

    def __init__(self, home: Path):
        self.home = home
        self._database = Database(home)

    def record_session(self, session: Session) -> None:
        self._database.record("the session", lambda connection: _put_session(connection, session))

    def record_run(self, run: Run, session: Session | None) -> None:
        """Insert or replace a run and its session."""

        def put(connection: sqlite3.Connection) -> None:
            if session is not None:
                _put_session(connection, session)
            _put_run(connection, run, "REPLACE")

        self._database.record(f"run {run.run_id}", put)

    def runs(self) -> list[Run]:
        """All runs of the home, newest first, from the database and the folders."""
        known = {run.run_id: run for run in self._database.read("SELECT * FROM runs", (), _run)}
        folders = set(run_ids_in(runs_folder(self.home)))
        gone = [run.run_id for run in known.values() if run.has_saved and run.run_id not in folders]
        unknown = list_runs(self.home, sorted(folders - known.keys()))
        adopted = [run for run_id, listing in unknown.items() if (run := _adopt(run_id, listing)) is not None]
        if gone or adopted:
            self._database.record("the runs in its folders", lambda connection: _reconcile(connection, gone, adopted))
        runs = [run for run in known.values() if run.run_id not in gone] + adopted
        return sorted(runs, key=lambda run: (-run.created, run.run_id))

    def sessions(self) -> list[Session]:
        """All sessions, newest first."""
        sessions = self._database.read("SELECT * FROM sessions", (), _session)
        return sorted(sessions, key=lambda session: (-session.created, session.session_id))


def _put_session(connection: sqlite3.Connection, session: Session) -> None:
    _insert(connection, "sessions", "REPLACE", vars(session))


def _put_run(connection: sqlite3.Connection, run: Run, conflict: str) -> None:
    row, spec = dict(vars(run)), vars(run.spec)
    del row["spec"]
    renamed = {key if key.startswith("train_") else f"lora_{key}": value for key, value in spec.items()}
    _insert(connection, "runs", conflict, row | renamed)


def _insert(connection: sqlite3.Connection, table: str, conflict: str, row: dict[str, Any]) -> None:
    columns, placeholders = ", ".join(row), ", ".join(f":{key}" for key in row)
    values = {**row, "user_metadata": json.dumps(row["user_metadata"])}
    connection.execute(f"INSERT OR {conflict} INTO {table} ({columns}) VALUES ({placeholders})", values)


def _session(row: sqlite3.Row) -> Session:
    return Session(row["session_id"], row["created"], row["display_name"], json.loads(row["user_metadata"]))


def _run(row: sqlite3.Row) -> Run:
    flags = [bool(row[name]) for name in ("train_attn", "train_mlp", "train_unembed")]
    return Run(
        run_id=row["run_id"],
        session_id=row["session_id"],
        base_model=row["base_model"],
        spec=LoraSpec(row["lora_rank"], *flags, alpha=row["lora_alpha"], experts=row["lora_experts"]),
        created=row["created"],
        last_request_time=row["last_request_time"],
        has_saved=bool(row["has_saved"]),
        user_metadata=json.loads(row["user_metadata"]),
    )


def _adopt(run_id: str, listing: RunListing) -> Run | None:
    """A run rebuilt from its checkpoints, with the metadata that all share. None if no checkpoint can be read."""
    entries = listing.entries
    if not entries:
        return None
    first, last = entries[0].info, entries[-1].info
    agreed = set(first.user_metadata.items()).intersection(*(entry.info.user_metadata.items() for entry in entries))
    return Run(run_id, None, last.base_model, last.spec, dict(sorted(agreed)), first.created, last.created, True)


def _reconcile(connection: sqlite3.Connection, gone: list[str], adopted: list[Run]) -> None:
    connection.executemany("DELETE FROM runs WHERE run_id = ? AND has_saved", [(run_id,) for run_id in gone])
    connection.executemany("DELETE FROM checkpoint_states WHERE run_id = ?", [(run_id,) for run_id in gone])
    for run in adopted:
        _put_run(connection, run, "IGNORE")  # the run's own process may have written a better row
