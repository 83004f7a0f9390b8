"""A checkpoint's adapter as a tar, generated in chunks: the whole archive is never in memory nor on disk.

The files are opened before the first byte is sent. A checkpoint is written whole and then renamed, so open files do not change
while it is overwritten, deleted or expires, and the archive is consistent.
"""

from __future__ import annotations

import io
import os
import stat
import tarfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from tinker_local_backend.errors import CheckpointError
from tinker_local_backend.storage.catalog import read_entry
from tinker_local_backend.storage.encryption import SUFFIX
from tinker_local_backend.storage.info import ADAPTER_FILE, CONFIG_FILE
from tinker_local_backend.storage.paths import CheckpointPath

CHUNK_BYTES = 1 << 20


def adapter_files(folder: Path) -> dict[str, Path]:
    """The adapter's files in a checkpoint, plain or encrypted, by name."""
    names = [f"{name}{suffix}" for suffix in ("", SUFFIX) for name in (ADAPTER_FILE, CONFIG_FILE)]
    return {name: folder / name for name in names if (folder / name).is_file()}


@dataclass(frozen=True)
class _Member:
    name: str
    size: int
    file: io.FileIO


class TarStream:
    """The tar of a checkpoint's adapter, PEFT's two files at its top level. Close it, or use `with`.

    Raises CheckpointError if the checkpoint is missing, expired, damaged, or overwritten while its files were opened.
    """

    def __init__(self, home: Path, path: CheckpointPath):
        entry = read_entry(home, path)
        self._path, self._created = path, entry.info.created
        self.expires_at = entry.expires_at
        """when the checkpoint expires, in seconds since 1970; None: never"""
        with ExitStack() as opening:
            files = adapter_files(path.folder(home))
            self._members = [_Member(name, *_open(path, file, opening)) for name, file in files.items()]
            if not self._members:
                raise CheckpointError(f"checkpoint {path} has no adapter files; save it again")
            if read_entry(home, path).info.created != self._created:
                raise CheckpointError(f"checkpoint {path} was overwritten while it was read; try again")
            self._open = opening.pop_all()

    @property
    def size(self) -> int:
        """Bytes of the archive."""
        content = sum(tarfile.BLOCKSIZE + _padded(member.size, tarfile.BLOCKSIZE) for member in self._members)
        return _padded(content + 2 * tarfile.BLOCKSIZE, tarfile.RECORDSIZE)

    def chunks(self) -> Iterator[bytes]:
        """The archive, `size` bytes in chunks of about CHUNK_BYTES. Raises CheckpointError if a file became shorter."""
        sent = 0
        for member in self._members:
            info = tarfile.TarInfo(member.name)
            info.size, info.mode, info.mtime = member.size, 0o644, int(self._created)
            pending, left = info.tobuf(tarfile.GNU_FORMAT), member.size
            while left:
                chunk = member.file.read(min(CHUNK_BYTES, left))
                if not chunk:
                    raise CheckpointError(f"checkpoint {self._path}: {member.name} became shorter while it was read")
                left -= len(chunk)
                sent += len(pending) + len(chunk)
                yield pending + chunk
                pending = b""
            pending += bytes(-member.size % tarfile.BLOCKSIZE)
            sent += len(pending)
            yield pending
        yield bytes(self.size - sent)

    def close(self) -> None:
        self._open.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _open(path: CheckpointPath, file: Path, opening: ExitStack) -> tuple[int, io.FileIO]:
    """Size and open file. Raises CheckpointError for anything but a plain file, such as a link."""
    try:
        opened = opening.enter_context(io.FileIO(os.open(file, os.O_RDONLY | os.O_NOFOLLOW)))
    except OSError as error:
        raise CheckpointError(f"checkpoint {path}: {file.name} cannot be read ({error.strerror})") from error
    status = os.fstat(opened.fileno())
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"checkpoint {path}: {file.name} is not a plain file; remove or replace it")
    return status.st_size, opened


def _padded(size: int, block: int) -> int:
    return size + -size % block
