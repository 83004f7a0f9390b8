"""Storages of files: a local folder, or anything that fsspec reaches (object stores, SSH, memory).

A path is relative to the root of its storage, uses `/` as the separator, and cannot leave the root. The stores define
the contents of files.
"""

import asyncio
import errno
import posixpath
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Protocol, Self, TypeVar, runtime_checkable
from urllib.parse import urlsplit
from urllib.request import url2pathname

from tinker_cookbook.exceptions import ConfigurationError, MissingPackageError
from tinker_cookbook.utils.files import append_bytes, is_temporary, json_bytes, parse_json_object, write_bytes

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class StorageStat:
    """Size and age of a file."""

    size: int
    """bytes"""
    mtime: float | None
    """seconds since 1970; None where the storage does not keep it"""


@runtime_checkable
class Storage(Protocol):
    """A storage for files. Every method raises ConfigurationError for a path that leaves the root.

    As a context manager it flushes on exit.
    """

    def url(self, path: str = "") -> str:
        """The URL of a file, or of the root."""
        ...

    def read(self, path: str) -> bytes:
        """Read a whole file. Raises FileNotFoundError."""
        ...

    def write(self, path: str, data: bytes) -> None:
        """Write a file; create the folders above it."""
        ...

    def append(self, path: str, data: bytes) -> None:
        """Append to a file, which is created if missing."""
        ...

    def exists(self, path: str) -> bool:
        """Whether a file or a folder with this path exists."""
        ...

    def stat(self, path: str) -> StorageStat | None:
        """Size and age of a file; None: it does not exist."""
        ...

    def read_range(self, path: str, offset: int, length: int | None = None) -> bytes:
        """Read `length` bytes from `offset`, or everything from there; fewer at the end of the file. Raises
        FileNotFoundError.
        """
        ...

    def list_dir(self, prefix: str) -> list[str]:
        """The names in a folder, sorted; empty if it does not exist."""
        ...

    def remove(self, path: str) -> None:
        """Remove a file; does nothing if it does not exist."""
        ...

    def remove_dir(self, path: str) -> None:
        """Remove an empty folder; does nothing if it does not exist or is not empty."""
        ...

    def flush(self) -> None:
        """Write buffered data. The storages here do not buffer."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.flush()


@runtime_checkable
class AsyncStorage(Protocol):
    """The methods of a `Storage` as coroutines, for programs with an event loop."""

    async def aread(self, path: str) -> bytes: ...

    async def awrite(self, path: str, data: bytes) -> None: ...

    async def aappend(self, path: str, data: bytes) -> None: ...

    async def aexists(self, path: str) -> bool: ...

    async def astat(self, path: str) -> StorageStat | None: ...

    async def aread_range(self, path: str, offset: int, length: int | None = None) -> bytes: ...

    async def alist_dir(self, prefix: str) -> list[str]: ...

    async def aremove(self, path: str) -> None: ...

    async def aremove_dir(self, path: str) -> None: ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *_: object) -> None: ...


def in_thread(method: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]:
    """A coroutine method that runs the method of that name in a thread."""

    @wraps(method)
    async def call(self: Any, *args: P.args, **kwargs: P.kwargs) -> T:
        return await asyncio.to_thread(getattr(self, method.__name__), *args, **kwargs)

    return call


class InThreads(Storage):
    """Turns a `Storage` into an `AsyncStorage`: each method runs in a thread."""

    aread = in_thread(Storage.read)
    awrite = in_thread(Storage.write)
    aappend = in_thread(Storage.append)
    aexists = in_thread(Storage.exists)
    astat = in_thread(Storage.stat)
    aread_range = in_thread(Storage.read_range)
    alist_dir = in_thread(Storage.list_dir)
    aremove = in_thread(Storage.remove)
    aremove_dir = in_thread(Storage.remove_dir)
    _aflush = in_thread(Storage.flush)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._aflush()


class LocalStorage(InThreads):
    """A local folder. Writes are atomic, appends are a single write; both are on disk when the call returns.

    Args:
        root: the folder.
        mkdir: create it now if missing; otherwise the first write does.
    """

    def __init__(self, root: str | Path, *, mkdir: bool = True) -> None:
        self.root = Path(root).expanduser().resolve()
        if mkdir:
            self.root.mkdir(parents=True, exist_ok=True)

    def _place(self, path: str) -> Path:
        place = self.root / _inside(path, self.root)
        if not place.resolve().is_relative_to(self.root):
            raise ConfigurationError(f"path {path!r}: a link leads out of {self.root}; name the file where it is")
        return place

    def url(self, path: str = "") -> str:
        """`file://` and the resolved path."""
        return self._place(path).resolve().as_uri()

    def read(self, path: str) -> bytes:
        return self._place(path).read_bytes()

    def write(self, path: str, data: bytes) -> None:
        place = self._place(path)
        place.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(place, data)

    def append(self, path: str, data: bytes) -> None:
        place = self._place(path)
        place.parent.mkdir(parents=True, exist_ok=True)
        append_bytes(place, data)

    def exists(self, path: str) -> bool:
        return self._place(path).exists()

    def stat(self, path: str) -> StorageStat | None:
        place = self._place(path)
        if not place.is_file():
            return None
        status = place.stat()
        return StorageStat(status.st_size, status.st_mtime)

    def read_range(self, path: str, offset: int, length: int | None = None) -> bytes:
        with open(self._place(path), "rb") as file:
            file.seek(offset)
            return file.read() if length is None else file.read(length)

    def list_dir(self, prefix: str) -> list[str]:
        place = self._place(prefix)
        if not place.is_dir():
            return []
        return sorted(entry.name for entry in place.iterdir() if not is_temporary(entry))

    def remove(self, path: str) -> None:
        self._place(path).unlink(missing_ok=True)

    def remove_dir(self, path: str) -> None:
        place = self._place(path)
        if place.is_dir():
            try:
                place.rmdir()
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise


class FsspecStorage(InThreads):
    """A folder of an fsspec filesystem, such as `fsspec.filesystem("s3")`.

    Object stores cannot append, so an append reads and rewrites the whole file; only one process at a time may append
    to it.

    Args:
        fs: the filesystem. A cached directory listing hides other writers' files: pass `use_listings_cache=False`.
        root: the folder there.
    """

    def __init__(self, fs: Any, root: str = "") -> None:
        self._fs = fs
        self._root = fs._strip_protocol(root).rstrip("/")

    def _place(self, path: str) -> str:
        relative = _inside(path, self.url())
        return f"{self._root}/{relative}" if relative else self._root

    def url(self, path: str = "") -> str:
        return self._fs.unstrip_protocol(self._place(path) if path else self._root)

    def read(self, path: str) -> bytes:
        return self._fs.cat_file(self._place(path))

    def write(self, path: str, data: bytes) -> None:
        place = self._place(path)
        try:
            self._fs.pipe_file(place, data)
        except FileNotFoundError:  # a filesystem with folders
            self._fs.makedirs(place.rpartition("/")[0], exist_ok=True)
            self._fs.pipe_file(place, data)

    def append(self, path: str, data: bytes) -> None:
        self.write(path, (self.read(path) if self.stat(path) is not None else b"") + data)

    def exists(self, path: str) -> bool:
        return self._fs.exists(self._place(path))

    def stat(self, path: str) -> StorageStat | None:
        place = self._place(path)
        if not self._fs.isfile(place):
            return None
        try:
            mtime = self._fs.modified(place).timestamp()
        except NotImplementedError:
            mtime = None
        return StorageStat(self._fs.size(place), mtime)

    def read_range(self, path: str, offset: int, length: int | None = None) -> bytes:
        place = self._place(path)
        size = self._fs.size(place)
        end = size if length is None else min(size, offset + length)
        # An object store raises an error beyond the end of a file.
        return self._fs.cat_file(place, start=offset, end=end) if offset < end else b""

    def list_dir(self, prefix: str) -> list[str]:
        place = self._place(prefix)
        if not self._fs.isdir(place):
            return []
        names = {str(entry).rstrip("/").rpartition("/")[2] for entry in self._fs.ls(place, detail=False)}
        return sorted(names)

    def remove(self, path: str) -> None:
        if self.stat(path) is not None:
            self._fs.rm_file(self._place(path))

    def remove_dir(self, path: str) -> None:
        if self._fs.isdir(self._place(path)) and not self.list_dir(path):
            self._fs.rmdir(self._place(path))


class FileStore:
    """Files below a folder of a storage, with names relative to it.

    Args:
        storage: the storage.
        prefix: the folder there; "" is the root.
    """

    def __init__(self, storage: Storage, prefix: str = "") -> None:
        self.storage, self.prefix = storage, prefix

    def url(self, path: str = "") -> str:
        """The URL of a file, or of the folder."""
        return self.storage.url(self._path(path))

    def stat(self, path: str) -> StorageStat | None:
        """Size and age of a file; None: it does not exist."""
        return self.storage.stat(self._path(path))

    def has(self, path: str) -> bool:
        """Whether there is a file of this name."""
        return self.stat(path) is not None

    def _read(self, path: str) -> bytes | None:
        return self.storage.read(self._path(path)) if self.has(path) else None

    def _read_json(self, path: str, fix: str) -> dict[str, Any] | None:
        content = self._read(path)
        return None if content is None else parse_json_object(content, self._label(path), fix)

    def _write(self, path: str, content: bytes) -> None:
        self.storage.write(self._path(path), content)

    def _write_json(self, path: str, content: Any, indent: int | None = 2) -> None:
        self._write(path, json_bytes(content, indent))

    def _label(self, path: str) -> str:
        """The file's name in errors."""
        return file_label(self.storage, self._path(path))

    def _path(self, *parts: str) -> str:
        return storage_join(self.prefix, *parts)


def storage_from_uri(uri: str, **kwargs: Any) -> Storage:
    """The storage of a folder: a path or `file://...` gives a LocalStorage, `s3://bucket/runs` and the like an
    FsspecStorage.

    Args:
        uri: the folder.
        kwargs: those of LocalStorage, or of the fsspec filesystem.

    Raises:
        ConfigurationError: fsspec does not know the protocol.
        MissingPackageError: its package is not installed.
    """
    protocol, separator, _ = uri.partition("://")
    if not separator:
        return LocalStorage(uri, **kwargs)
    if protocol == "file":
        return LocalStorage(url2pathname(urlsplit(uri).path), **kwargs)
    from fsspec.core import url_to_fs

    try:
        fs, root = url_to_fs(uri, **{"use_listings_cache": False, **kwargs})
    except (ImportError, ValueError) as error:
        kind = MissingPackageError if isinstance(error, ImportError) else ConfigurationError
        raise kind(f"uri={uri!r}: {error}; install the package of {protocol}://, or give a path") from error
    return FsspecStorage(fs, root)


def file_label(storage: Storage, path: str) -> str:
    """A file's name in messages: its path, or its URL if it is not on this machine."""
    return str(storage.root / path) if isinstance(storage, LocalStorage) else storage.url(path)


def storage_join(*parts: str) -> str:
    """Join and normalise a path: empty parts and dots are dropped, `..` removes the part before it."""
    joined = "/".join(stripped for part in parts if (stripped := part.strip("/")))
    return posixpath.normpath(joined) if joined else ""


def _inside(path: str, root: object) -> str:
    """The normalised path. Raises ConfigurationError if it leaves the root."""
    short = posixpath.normpath(path) if path else "."
    if short.split("/")[0] == ".." or short.startswith("/") or "\0" in short:
        raise ConfigurationError(f"path {path!r}: escapes the storage; must be a path below {root}, and not absolute")
    return "" if short == "." else short
