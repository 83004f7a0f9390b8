"""Back up a home into one file while programs write to it, and restore it.

    python -m tinker_local_backend.backup home=/var/lib/tinker-local file=/backups/monday.tar
    python -m tinker_local_backend.backup home=/var/lib/tinker-local file=/backups/monday.tar restore=true

Each checkpoint in the file is whole: if it is replaced meanwhile, the file has the old or the new one; if it is deleted, all or
nothing of it. Weights hardly compress, so the file is a plain tar. A home is restored into an empty folder, after every tensor
file was compared with the checksum in its checkpoint. A home does not contain the logs of runs (`log_path`).
"""

from __future__ import annotations

import io
import os
import sqlite3
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import chz

from tinker_local_backend.command import parse, run
from tinker_local_backend.errors import CheckpointError, RequestError
from tinker_local_backend.server.home_lock import LOCK_FILE
from tinker_local_backend.storage.catalog import list_run
from tinker_local_backend.storage.checkpoints import check_sums
from tinker_local_backend.storage.database import REGISTRY_FILE
from tinker_local_backend.storage.files import recover, staging_file, staging_folder, writing
from tinker_local_backend.storage.paths import CheckpointPath, local_home, names_in, run_ids_in, runs_folder


@chz.chz(typecheck=True)
class Config:
    """Keys of `python -m tinker_local_backend.backup`."""

    file: str = chz.field(doc="the tar file to write, or with restore=true to read")
    home: str | None = chz.field(default=None, doc="where checkpoints live; default: TINKER_LOCAL_HOME")
    restore: bool = chz.field(default=False, doc="restore the home from the file instead of backing it up")


def back_up(home: Path, file: Path) -> int:
    """Write the file, whole or not at all. Returns how many checkpoints it has.

    Raises:
        RequestError: the home does not exist.
        CheckpointWriteError: a write failed.
    """
    if not home.is_dir():
        raise RequestError(f"home={str(home)!r} does not exist; give the home of a server, or set TINKER_LOCAL_HOME")
    count = 0
    with writing(f"the backup {file}"), staging_file(file) as staging, tarfile.open(staging, "w") as tar:
        for tenant in _homes(home):
            if (tenant / REGISTRY_FILE).exists():
                _add_registry(tar, home, tenant / REGISTRY_FILE)
            for path in _checkpoints(tenant):
                count += _add_checkpoint(tar, home, path.folder(tenant))
    return count


def restore(file: Path, home: Path) -> int:
    """Restore the home, whole or not at all. Returns how many checkpoints it has.

    Raises:
        RequestError: the home is not empty, or the file is not a backup.
        CheckpointError: a checkpoint's files differ from those that were saved.
        CheckpointWriteError: a write failed.
    """
    if home.exists() and (not home.is_dir() or any(entry.name != LOCK_FILE for entry in home.iterdir())):
        raise RequestError(f"home={str(home)!r} is not empty; restore into another folder, or move that one away first")
    try:
        tar = tarfile.open(file)  # noqa: SIM115  (closed below; errors there are about the home)
    except (OSError, tarfile.TarError) as error:
        raise RequestError(f"file={str(file)!r} cannot be read: {error}") from None
    with tar, writing(f"home {home}"), staging_folder(home) as staging:
        try:
            tar.extractall(staging, filter="data")
        except tarfile.TarError as error:
            raise RequestError(f"file={str(file)!r} is damaged: {error}") from None
        count = 0
        for tenant in _homes(staging):
            for path in _checkpoints(tenant):
                check_sums(path.folder(tenant), path)
                count += 1
    return count


def _homes(home: Path) -> list[Path]:
    """The home itself, and the homes of a server's tenants."""
    return [home, *(home / "tenants" / name for name in names_in(home / "tenants"))]


def _checkpoints(home: Path) -> Iterator[CheckpointPath]:
    """Raises CheckpointError for a damaged one: a backup without it would look whole."""
    for run_id in run_ids_in(runs_folder(home)):
        listing = list_run(home, run_id)
        if listing.damaged:
            raise CheckpointError(f"checkpoint {listing.damaged[0]} cannot be read; delete it, or restore it first")
        yield from (entry.path for entry in listing.entries)


def _add_registry(tar: tarfile.TarFile, home: Path, database: Path) -> None:
    """Add a consistent copy, even while others write."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / REGISTRY_FILE
        with closing(sqlite3.connect(database)) as source, closing(sqlite3.connect(copy)) as target:
            source.backup(target)
        tar.add(copy, str(database.relative_to(home)))


def _add_checkpoint(tar: tarfile.TarFile, home: Path, folder: Path) -> bool:
    """Add a checkpoint. Returns whether it still existed."""
    while True:
        recover(folder)
        with ExitStack() as opened:
            try:
                # Open the files through the folder's descriptor: they belong to one checkpoint even if another takes its name.
                inside = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
                opened.callback(os.close, inside)
                names = sorted(name for name in os.listdir(inside) if not name.startswith("."))
                files = [
                    opened.enter_context(io.FileIO(os.open(name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=inside)))
                    for name in names
                ]
            except FileNotFoundError:
                if folder.exists():
                    continue  # it was replaced while its files were opened
                return False
            for name, file in zip(names, files, strict=True):
                tar.addfile(tar.gettarinfo(arcname=str(folder.relative_to(home) / name), fileobj=file), file)
            return True


def main(config: Config) -> None:
    home = Path(config.home).expanduser() if config.home else local_home()
    file = Path(config.file).expanduser()
    if config.restore:
        print(f"restored {restore(file, home)} checkpoints into {home}")
    else:
        print(f"{back_up(home, file)} checkpoints of {home} are in {file}")


if __name__ == "__main__":
    run(main, parse(Config))
