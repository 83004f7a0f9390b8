"""The folder of a run or a sweep, with a lock: one process at a time writes to it.

The lock is the kernel's (flock) on the file `.lock`; it is released when its process dies, for any reason. The file
names the holder. On a filesystem without flock, the file alone is the lock: one left by a dead process of this machine
is taken over, one from another machine has to be removed by hand.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import socket
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO

from tinker_cookbook.exceptions import ConfigurationError

logger = logging.getLogger(__name__)

LOCK_BASE_NAME = ".lock"

_NO_FLOCK = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)
"""Errors of flock on a filesystem without it."""


@dataclass(frozen=True)
class Holder:
    """The process that holds a folder's lock."""

    host: str
    pid: int
    since: str

    @classmethod
    def myself(cls) -> Holder:
        return cls(socket.gethostname(), os.getpid(), datetime.now(UTC).isoformat(timespec="seconds"))

    @classmethod
    def parse(cls, content: bytes) -> Holder | None:
        """Holder named in the lock file; None if empty or half-written."""
        try:
            return cls(**json.loads(content))
        except (ValueError, TypeError):
            return None

    @property
    def has_died(self) -> bool:
        """Whether it was a process of this machine that no longer runs."""
        if self.host != socket.gethostname():
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            return False
        return False


def open_folder(path: str | Path, field: str) -> Path:
    """Create a folder, or open an existing one. Raises ConfigurationError, which names `field`, if that fails."""
    folder = Path(path).expanduser()
    if folder.exists() and not folder.is_dir():
        raise ConfigurationError(f"{field}={str(folder)!r}: is a file; give a folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(
            f"{field}={str(folder)!r}: cannot be created ({error.strerror}); give another"
        ) from error
    return folder


@contextmanager
def one_writer(folder: Path, field: str) -> Generator[None]:
    """Hold the folder's lock. Raises ConfigurationError, which names the holder, when another process (or run) has it."""
    with _open(folder, field) as file:
        has_flock = _lock(file, folder, field)
        _write_holder(file, Holder.myself())
        try:
            yield
        finally:
            # The file stays: removing it would let a third process lock a new one while a second still holds this one.
            _write_holder(file, None)
            if has_flock:
                fcntl.flock(file, fcntl.LOCK_UN)


def check_unused(folder: Path, field: str) -> None:
    """Raise ConfigurationError, which names the holder, when another process writes to an existing folder."""
    if (folder / LOCK_BASE_NAME).exists():
        with one_writer(folder, field):
            pass


def _open(folder: Path, field: str) -> BinaryIO:
    try:
        return open(folder / LOCK_BASE_NAME, "a+b")
    except OSError as error:
        raise ConfigurationError(
            f"{field}={str(folder)!r}: cannot be written to ({error.strerror}); give another folder"
        ) from error


def _lock(file: BinaryIO, folder: Path, field: str) -> bool:
    """Acquire the lock. Returns whether the kernel holds it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError as error:
        raise _in_use(_read_holder(file), folder, field, "") from error
    except OSError as error:
        if error.errno not in _NO_FLOCK:
            raise
    holder = _read_holder(file)
    if holder is not None and not holder.has_died:
        raise _in_use(holder, folder, field, f" (if it no longer exists, remove {folder / LOCK_BASE_NAME})")
    logger.warning("%s: the filesystem has no file locks, so two starts in the same second are not noticed", folder)
    return False


def _in_use(holder: Holder | None, folder: Path, field: str, note: str) -> ConfigurationError:
    who, fix = "another process", f"wait for it or stop it{note}"
    if holder is not None:
        who = f"process {holder.pid} on {holder.host} (since {holder.since})"
        if holder.has_died:
            fix = "it has ended, but a process that it started has not: stop that one"
    return ConfigurationError(f"{field}={str(folder)!r}: {who} writes to this folder; {fix}, or give another {field}")


def _read_holder(file: BinaryIO) -> Holder | None:
    file.seek(0)
    return Holder.parse(file.read())


def _write_holder(file: BinaryIO, holder: Holder | None) -> None:
    file.truncate(0)
    if holder is not None:
        file.write(json.dumps(asdict(holder)).encode())
    file.flush()
