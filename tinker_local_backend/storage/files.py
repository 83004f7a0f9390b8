"""Files and folders that are whole or absent: temporary names, fsync, rename; and what is said when the disk refuses.

Everything unfinished has a name that starts with a dot, which no checkpoint, run or model may have.
"""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError

from tinker_local_backend.errors import CheckpointError

SWAP_SECONDS = 1.0
"""The two renames of an overwrite take microseconds; one that has stood half-done this long belongs to a killed process."""

STALE_SECONDS = 24 * 3600.0
"""Unfinished folders older than this were left by a killed process."""


class CheckpointWriteError(CheckpointError, OSError):
    """The disk refused (full, read-only, ...): nothing was left behind, and what was there before is intact."""


@contextmanager
def writing(what: str) -> Iterator[None]:
    """Turn the system's errors into CheckpointWriteError. The caller removes what it had begun."""
    try:
        yield
    except Exception as error:
        # The libraries in Rust report the system's errors in their own ways: safetensors has a class, tokenizers none.
        if not isinstance(error, OSError | SafetensorError | sqlite3.Error) and "(os error " not in str(error):
            raise
        raise CheckpointWriteError(
            f"{what} could not be written: {error}. Nothing was left behind and nothing was replaced; make room there "
            "(or correct the permissions), or choose another disk (TINKER_LOCAL_HOME for checkpoints)",
            remote=f"{what} could not be written: the server's disk refused. Nothing was left behind and nothing was replaced; "
            "delete checkpoints that are no longer needed, or try again later",
        ) from error


@contextmanager
def staging_folder(target: Path) -> Iterator[Path]:
    """A new folder beside `target`, which takes its place when the block ends, replacing what is there.

    When the block or the replacement fails, or is interrupted, the new folder is removed and `target` is as it was.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        yield staging
        for file in staging.iterdir():
            sync(file)
        sync(staging)
        staging.chmod(0o755)  # mkdtemp makes it private, but other programs (a vLLM server) read adapters too
        _put_in_place(staging, target)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def _retirement(target: Path) -> Path:
    """The folder that holds what `target` was, between the two renames of an overwrite."""
    return target.parent / f".{target.name}.old"


def _put_in_place(staging: Path, target: Path) -> None:
    retirement = _retirement(target)
    retired = None
    while retired is None and target.exists():
        retirement.mkdir(exist_ok=True)
        place = retirement / uuid.uuid4().hex
        with suppress(FileNotFoundError):  # another overwrite of the same name took it, or cleared away behind itself
            os.replace(target, place)
            retired = place
    try:
        os.replace(staging, target)
    except BaseException:
        if retired is not None:
            os.replace(retired, target)  # where even this fails, `recover` does it later
            _remove_empty(retirement)
        raise
    if retired is not None:
        shutil.rmtree(retired, ignore_errors=True)
        _remove_empty(retirement)
    sync(target.parent)


def _remove_empty(folder: Path) -> None:
    with suppress(OSError):  # it is not empty: another overwrite uses it
        folder.rmdir()


def recover(target: Path) -> bool:
    """Undo an overwrite of `target` that a killed process left between its two renames. Returns whether there is a target."""
    retirement = _retirement(target)
    if retirement.is_dir():
        for old in retirement.iterdir():
            _bring_back(old, target)
    return target.exists()


def recover_any(target: Path) -> None:
    """As `recover`, also of an overwrite by an earlier version, for which all names beside `target` must be looked at."""
    recover(target)
    prefix = f".{target.name}.old."
    for old in target.parent.glob(".*.old.*/x"):
        if old.parent.name.startswith(prefix) and "." not in old.parent.name.removeprefix(prefix):
            _bring_back(old, target)


def _bring_back(old: Path, target: Path) -> None:
    with suppress(OSError):  # another process finished or recovered it first
        while not target.exists() and time.time() < old.parent.stat().st_mtime + SWAP_SECONDS:
            time.sleep(SWAP_SECONDS / 20)
        if not target.exists():
            os.replace(old, target)
            _remove_empty(old.parent)


def discard(folder: Path, condition: Callable[[Path], bool] = lambda _: True) -> bool:
    """Delete a folder if `condition` holds for it. Returns whether it did.

    It disappears as a whole before its files go, so that nobody sees half of it; a rename needs no room on a full disk. The
    condition is asked once it is out of the way, when nobody can replace the folder any more.
    """
    grave = folder.parent / f".{folder.name}.deleted.{uuid.uuid4().hex}"
    os.replace(folder, grave)
    is_meant = False
    try:
        is_meant = condition(grave)
    finally:
        if is_meant:
            shutil.rmtree(grave, ignore_errors=True)
        else:
            os.replace(grave, folder)
    sync(folder.parent)
    return is_meant


def remove_stale(parent: Path) -> None:
    """Delete what killed processes left unfinished in `parent`, but never the only copy of something."""
    for folder in [parent / name for name in os.listdir(parent) if name.startswith(".")]:
        with suppress(OSError):
            name, _, retired = folder.name[1:].rpartition(".old")
            if name and (not retired or retired.startswith(".")):
                recover_any(parent / name)
            if time.time() > folder.stat().st_mtime + STALE_SECONDS:
                shutil.rmtree(folder, ignore_errors=True)


def write_json(file: Path, value: object) -> None:
    """Within a staging folder, which is synced as a whole."""
    file.write_text(json.dumps(value, indent=2) + "\n")


@contextmanager
def staging_file(target: Path) -> Iterator[Path]:
    """The path of a new file that takes the place of `target` when the block ends, and is removed when the block fails."""
    descriptor, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    os.close(descriptor)
    staging = Path(name)
    try:
        yield staging
        sync(staging)
        staging.chmod(0o644)
        os.replace(staging, target)
        sync(target.parent)
    except BaseException:
        staging.unlink(missing_ok=True)
        raise


def sync(path: Path) -> None:
    """Wait until a file or a folder's list of names is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
