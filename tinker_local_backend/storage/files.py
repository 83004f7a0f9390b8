"""Atomic files and folders: temporary name, fsync, rename.

Unfinished ones have names that start with a dot, which no checkpoint, run or model may have.
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
"""The two renames of an overwrite take microseconds; if one is half done for this long, its process was killed."""

STALE_SECONDS = 24 * 3600.0
"""Unfinished folders older than this belong to a killed process."""


class CheckpointWriteError(CheckpointError, OSError):
    """A write failed (full disk, read-only, ...). No partial files remain, and earlier files are intact."""


@contextmanager
def writing(what: str) -> Iterator[None]:
    """Convert operating system errors into CheckpointWriteError. The caller removes its unfinished files."""
    try:
        yield
    except Exception as error:
        # Rust libraries report system errors differently: safetensors with its own class, tokenizers only in the text.
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
    """A new folder next to `target`, which it replaces at the end of the block.
    If the block or the replacement fails or is interrupted, the new folder is removed and `target` is unchanged."""
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        yield staging
        for file in staging.iterdir():
            sync(file)
        sync(staging)
        staging.chmod(0o755)  # mkdtemp makes it private, but other programs (a vLLM server) read adapters
        _put_in_place(staging, target)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def _retirement(target: Path) -> Path:
    """The folder that holds the old `target` between the two renames of an overwrite."""
    return target.parent / f".{target.name}.old"


def _put_in_place(staging: Path, target: Path) -> None:
    retirement = _retirement(target)
    retired = None
    while retired is None and target.exists():
        retirement.mkdir(exist_ok=True)
        retired_path = retirement / uuid.uuid4().hex
        with suppress(FileNotFoundError):  # another overwrite of this name moved `target`, or removed `retirement`
            os.replace(target, retired_path)
            retired = retired_path
    try:
        os.replace(staging, target)
    except BaseException:
        if retired is not None:
            os.replace(retired, target)  # if this fails too, `recover` does it later
            _remove_empty(retirement)
        raise
    if retired is not None:
        shutil.rmtree(retired, ignore_errors=True)
        _remove_empty(retirement)
    sync(target.parent)


def _remove_empty(folder: Path) -> None:
    with suppress(OSError):  # not empty: another overwrite uses it
        folder.rmdir()


def recover(target: Path) -> bool:
    """Undo an overwrite that a killed process left between its two renames. Returns whether `target` exists."""
    retirement = _retirement(target)
    if retirement.is_dir():
        for old in retirement.iterdir():
            _bring_back(old, target)
    return target.exists()


def recover_any(target: Path) -> None:
    """As `recover`, also for overwrites by earlier versions, which requires a scan of the parent folder."""
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
    """Delete a folder if it satisfies `condition`. Returns whether it did.

    It is renamed before its files are deleted, so no process sees part of it; a rename works on a full disk. The condition is
    checked after the rename, when no process can replace the folder.
    """
    trash = folder.parent / f".{folder.name}.deleted.{uuid.uuid4().hex}"
    os.replace(folder, trash)
    matches = False
    try:
        matches = condition(trash)
    finally:
        if matches:
            shutil.rmtree(trash, ignore_errors=True)
        else:
            os.replace(trash, folder)
    sync(folder.parent)
    return matches


def remove_stale(parent: Path) -> None:
    """Delete unfinished folders of killed processes in `parent`, but never the only copy of a folder."""
    for folder in [parent / name for name in os.listdir(parent) if name.startswith(".")]:
        with suppress(OSError):
            name, _, retired = folder.name[1:].rpartition(".old")
            if name and (not retired or retired.startswith(".")):
                recover_any(parent / name)
            if time.time() > folder.stat().st_mtime + STALE_SECONDS:
                shutil.rmtree(folder, ignore_errors=True)


def write_json(file: Path, value: object) -> None:
    """Write a file of a staging folder, which syncs all its files."""
    file.write_text(json.dumps(value, indent=2) + "\n")


@contextmanager
def staging_file(target: Path) -> Iterator[Path]:
    """The path of a new file, which replaces `target` at the end of the block, and is removed if the block fails."""
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
    """fsync a file, or the entries of a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
