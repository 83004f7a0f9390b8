"""Which checkpoints there are, read from their folders, and what can be done to one besides saving and loading it."""

from __future__ import annotations

import json
import os
import shutil
import tarfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from tinker_local_backend.errors import CheckpointError, RequestError
from tinker_local_backend.storage import files
from tinker_local_backend.storage.index import CheckpointEntry, CheckpointIndex, Stamp, entry_of
from tinker_local_backend.storage.info import (
    EXPIRY_FILE,
    INFO_FILE,
    CheckpointInfo,
    expires_at_in,
    expiry,
    info_in,
    is_expired,
    missing,
    read_info,
    read_object,
)
from tinker_local_backend.storage.paths import (
    KINDS,
    CheckpointPath,
    check_run_id,
    names_in,
    runs_folder,
)

PUBLIC_FILE = "public.json"


@dataclass(frozen=True)
class RunListing:
    """A run's checkpoints, oldest first."""

    entries: list[CheckpointEntry]
    damaged: list[CheckpointPath]
    """whose description cannot be read; they can still be deleted"""


def list_run(home: Path, run_id: str) -> RunListing:
    """The checkpoints that a run has now; expired ones are deleted on the way. Empty for an unknown run."""
    return list_runs(home, [run_id])[run_id]


def list_runs(home: Path, run_ids: Sequence[str]) -> dict[str, RunListing]:
    """As list_run, of several runs. Files are opened only in folders that have changed since they were last listed."""
    if not run_ids:
        return {}
    index = CheckpointIndex(home)
    known = index.rows(run_ids)
    read: dict[CheckpointPath, tuple[Stamp, CheckpointEntry]] = {}
    listings = {}
    for run_id in run_ids:
        entries, damaged = [], []
        for path, folder in _folders(home, run_id):
            try:
                stamp = Stamp.of(folder)
                entry = entry_of(path, known.get(path), stamp)
                is_known = entry is not None
                entry = entry or _entry(path, Path(folder))
            except (CheckpointError, OSError):
                if os.path.exists(folder):  # else somebody deleted it while we looked
                    damaged.append(path)
                continue
            if _has_passed(entry.expires_at) and _remove_expired(home, path, Path(folder)):
                continue
            entries.append(entry)
            known.pop(path, None)
            if not is_known and stamp.settled:
                read[path] = stamp, entry
        listings[run_id] = RunListing(sorted(entries, key=lambda e: (e.info.created, str(e.path))), damaged)
    index.update(read, list(known))
    return listings


def _entry(path: CheckpointPath, folder: Path) -> CheckpointEntry:
    """What the files in a checkpoint's folder say. Raises CheckpointError or OSError where they cannot be read."""
    info = info_in(folder, path)
    size = sum(file.stat().st_size for file in folder.iterdir() if not file.is_symlink())
    return CheckpointEntry(path, info, expires_at_in(folder), _is_public(folder), size)


def remove(home: Path, path: CheckpointPath) -> None:
    """Delete a checkpoint, also a damaged one, and its archive. Raises CheckpointError when there is none."""
    folder = path.folder(home)
    if not folder.is_dir():
        files.recover_any(folder)
    if not folder.is_dir():
        raise missing(folder, path)
    with files.writing(f"the deletion of checkpoint {path}"):
        files.discard(folder)
    path.archive(home).unlink(missing_ok=True)


def remove_due(home: Path, run_id: str) -> None:
    """Delete a run's expired checkpoints, as far as it is known which they are, without looking at the others."""
    index = CheckpointIndex(home)
    gone = []
    for path in index.due(run_id):
        with suppress(RequestError):  # a symbolic link leads elsewhere
            folder = path.folder(home)
            if _remove_expired(home, path, folder) or not folder.exists():
                gone.append(path)
            else:  # its files know better
                index.expect(path, expires_at_in(folder))
    index.update({}, gone)


def _has_passed(expires_at: float | None) -> bool:
    return expires_at is not None and expires_at <= time.time()


def _remove_expired(home: Path, path: CheckpointPath, folder: Path) -> bool:
    """Delete a checkpoint if it has expired. Returns whether it did."""
    # Deleting is a courtesy of whoever comes by; one that cannot be deleted stays refused as expired.
    with suppress(OSError):
        if is_expired(folder) and files.discard(folder, is_expired):
            path.archive(home).unlink(missing_ok=True)
            return True
    return False


def _folders(home: Path, run_id: str) -> Iterator[tuple[CheckpointPath, str]]:
    """A run's checkpoints and their folders, as strings: a Path takes as long to make as all that is done with it.

    What killed processes left unfinished is cleared away first.
    """
    run = runs_folder(home) / check_run_id(run_id)
    # What is reached through a symbolic link is not ours to list or clean.
    real = [] if run.is_symlink() else names_in(run)
    for kind in KINDS:
        if kind in real:
            files.remove_stale(run / kind)
            for name in names_in(run / kind):
                yield CheckpointPath(run_id, kind, name), f"{run}/{kind}/{name}"


def set_ttl(home: Path, path: CheckpointPath, ttl_seconds: float | None) -> None:
    """Let a checkpoint expire `ttl_seconds` from now; None: never."""
    expires_at = expiry(ttl_seconds, time.time())
    _change(home, path, EXPIRY_FILE, {"expires_at": expires_at})
    CheckpointIndex(home).expect(path, expires_at)


def set_public(home: Path, path: CheckpointPath, public: bool) -> None:
    """Mark it as published, which on one's own machine is a mark and nothing more."""
    _change(home, path, PUBLIC_FILE, {"public": public})


def _change(home: Path, path: CheckpointPath, name: str, value: object) -> None:
    """Replace one of the small files. Raises CheckpointError when there is no such checkpoint."""
    read_info(home, path)
    with files.writing(f"{name} of checkpoint {path}"), files.staging_file(path.folder(home) / name) as file:
        file.write_text(json.dumps(value) + "\n")


def _is_public(folder: Path) -> bool:
    try:
        return read_object(folder / PUBLIC_FILE)["public"] is True
    except (OSError, ValueError, KeyError):
        return False


def copy(home: Path, source: CheckpointPath, run_id: str, ttl_seconds: float | None) -> CheckpointPath:
    """Copy a checkpoint's files into another run, with a ttl of its own. Returns the copy's path."""
    now = time.time()
    info = read_info(home, source)
    copied = replace(info, created=now, expires_at=expiry(ttl_seconds, now))
    target = CheckpointPath(run_id, source.kind, source.name)
    with files.writing(f"checkpoint {target}"), files.staging_folder(target.folder(home)) as staging:
        for file in _files(home, source):
            if file.name not in (EXPIRY_FILE, PUBLIC_FILE, INFO_FILE):
                shutil.copyfile(file, staging / file.name)
        files.write_json(staging / INFO_FILE, copied.to_json())
        _check_unchanged(home, source, info)
    if copied.expires_at is not None:
        CheckpointIndex(home).expect(target, copied.expires_at)
    return target


def archive(home: Path, path: CheckpointPath) -> Path:
    """Write the checkpoint's files into a .tar.gz, without a folder around them. Returns its path."""
    info = read_info(home, path)
    target = path.archive(home)
    with files.writing(f"the archive of checkpoint {path}"):
        target.parent.mkdir(parents=True, exist_ok=True)
        # Weights hardly compress: the fastest level loses nothing.
        with files.staging_file(target) as staging, tarfile.open(staging, "w:gz", compresslevel=1) as tar:
            for file in _files(home, path):
                tar.add(file, arcname=file.name, recursive=False)
            _check_unchanged(home, path, info)
    return target


def _files(home: Path, path: CheckpointPath) -> list[Path]:
    """The files to copy. Raises CheckpointError for anything that is not a plain file: it could lead out of the home."""
    found = sorted(file for file in path.folder(home).iterdir() if not file.name.startswith("."))
    for file in found:
        if file.is_symlink() or not file.is_file():
            raise CheckpointError(
                f"checkpoint {path}: {file.name} is not a plain file; remove it or put the file itself there"
            )
    return found


def _check_unchanged(home: Path, path: CheckpointPath, before: CheckpointInfo) -> None:
    """Raise CheckpointError when it was overwritten in between: the files would be of two checkpoints."""
    if read_info(home, path).created != before.created:
        raise CheckpointError(f"checkpoint {path} was overwritten while it was read; try again")
