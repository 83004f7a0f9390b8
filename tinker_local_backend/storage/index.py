"""What checkpoint folders said when they were last read, so that a listing opens none of their files again.

A row holds for as long as its folder is the same and nothing has been put into it or taken out, which its inode and its time
of change tell. The folders stay the truth: rows may be lost at any time, and a folder without a valid row is read.
"""

from __future__ import annotations

import json
import os
import sqlite3
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tinker_local_backend.storage.database import Database
from tinker_local_backend.storage.info import CheckpointInfo
from tinker_local_backend.storage.paths import KINDS, CheckpointPath

SETTLED_SECONDS = 2.0
"""A folder that has changed more recently gets no row: a second change may have the same time, as coarse as clocks of file
systems are."""


@dataclass(frozen=True)
class CheckpointEntry:
    """A line of a listing."""

    path: CheckpointPath
    info: CheckpointInfo
    expires_at: float | None
    """as it stands now; `info` has what it was saved with"""
    public: bool
    size_bytes: int


@dataclass(frozen=True)
class Stamp:
    """Which state of which folder it was."""

    inode: int
    changed_ns: int

    @classmethod
    def of(cls, folder: str | Path) -> Stamp:
        """Raises OSError where there is none."""
        found = os.lstat(folder)
        return cls(found.st_ino, found.st_mtime_ns)

    @property
    def settled(self) -> bool:
        return time.time() - self.changed_ns / 1e9 > SETTLED_SECONDS

    def __str__(self) -> str:
        return f"{self.inode}:{self.changed_ns}"


Row = tuple[str | None, str | None]
"""A stamp and the entry that went with it, as JSON; None where only the expiry is known."""


class CheckpointIndex:
    """The index of one home."""

    def __init__(self, home: Path):
        self._database = Database(home)

    def rows(self, run_ids: Sequence[str]) -> dict[CheckpointPath, Row]:
        """Of these runs."""
        # One run is asked for by name; for several of them there is one query all the same.
        where, parameters = (" WHERE run_id = ?", run_ids) if len(run_ids) == 1 else ("", ())
        found = self._database.read(
            f"SELECT run_id, kind, name, stamp, entry FROM checkpoints{where}",
            parameters,
            lambda row: ((row["run_id"], row["kind"], row["name"]), (row["stamp"], row["entry"])),
        )
        wanted = set(run_ids)
        return {CheckpointPath(*key): row for key, row in found if key[0] in wanted and key[1] in KINDS}

    def update(
        self, read: Mapping[CheckpointPath, tuple[Stamp, CheckpointEntry]], gone: Sequence[CheckpointPath]
    ) -> None:
        """Keep what has been read of these folders, and forget those that are gone."""
        if not read and not gone:
            return
        rows = [
            (path.run_id, path.kind, path.name, str(stamp), _to_json(entry), entry.expires_at)
            for path, (stamp, entry) in read.items()
        ]

        def write(connection: sqlite3.Connection) -> None:
            connection.executemany(_DELETE, [(path.run_id, path.kind, path.name) for path in gone])
            connection.executemany("INSERT OR REPLACE INTO checkpoints VALUES (?, ?, ?, ?, ?, ?)", rows)

        self._database.write("what its checkpoints say", write)

    def expect(self, path: CheckpointPath, expires_at: float | None) -> None:
        """Say when a checkpoint expires, for `due`. What else its row says must be read anew."""
        row = (path.run_id, path.kind, path.name, None, None, expires_at)
        self._database.write(
            f"when {path} expires",
            lambda connection: connection.execute("INSERT OR REPLACE INTO checkpoints VALUES (?, ?, ?, ?, ?, ?)", row),
        )

    def due(self, run_id: str) -> list[CheckpointPath]:
        """Checkpoints of a run that have expired, as far as is known."""
        return self._database.read(
            "SELECT kind, name FROM checkpoints WHERE run_id = ? AND expires_at <= ?",
            (run_id, time.time()),
            lambda row: CheckpointPath(run_id, row["kind"], row["name"]),
        )


_DELETE = "DELETE FROM checkpoints WHERE run_id = ? AND kind = ? AND name = ?"


def _to_json(entry: CheckpointEntry) -> str:
    fields = {"expires_at": entry.expires_at, "public": entry.public, "size_bytes": entry.size_bytes}
    return json.dumps({"info": entry.info.to_json(), **fields})


def entry_of(path: CheckpointPath, row: Row | None, stamp: Stamp) -> CheckpointEntry | None:
    """What a row says of a folder that has this stamp now; None where it does not hold, or was written by another version."""
    if row is None or row[0] != str(stamp) or row[1] is None:
        return None
    try:
        fields = json.loads(row[1])
        return CheckpointEntry(path, CheckpointInfo.from_json(fields.pop("info")), **fields)
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
