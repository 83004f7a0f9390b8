"""The home of local state, and `tinker://` paths, each of which names one folder in the home and nothing outside it."""

from __future__ import annotations

import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import platformdirs

from tinker_local_backend import environment
from tinker_local_backend.errors import RequestError

CheckpointKind = Literal["weights", "sampler_weights", "external_weights"]
KINDS: tuple[CheckpointKind, ...] = get_args(CheckpointKind)
SHAPES = tuple(f"{kind}/<name>" for kind in KINDS)
"""Forms of a checkpoint's id."""
# File systems allow 255 bytes, and the name of an unfinished folder is longer.
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,199}")
_RUN_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:\-]{0,199}")


def local_home() -> Path:
    """TINKER_LOCAL_HOME, else the user's data folder."""
    configured = environment.read("TINKER_LOCAL_HOME")
    return Path(configured).expanduser() if configured else Path(platformdirs.user_data_dir("tinker-local"))


def check_writable(home: Path) -> None:
    """Create the home and write a test file. Raises RequestError if that fails, before a save would."""
    try:
        home.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=home) as file:
            file.write(b"x")
            file.flush()
    except OSError as error:
        raise RequestError(
            f"checkpoints cannot be written to {str(home)!r} ({error.strerror}); set TINKER_LOCAL_HOME to another folder"
        ) from error


def check_name(name: str, what: str) -> str:
    """Return the name, which may have 200 letters, digits, `_`, `-`, `.`, and not start with `.` or `-`; else RequestError."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise RequestError(
            f"{what} {name!r} must be at most 200 letters, digits, '_', '-' or '.', and not start with '.' or '-'"
        )
    return name


def check_run_id(run_id: str) -> str:
    """As `check_name`, for a run id, which may contain colons, as the SDK's `<session>:train:<number>` does."""
    if not isinstance(run_id, str) or not _RUN_ID.fullmatch(run_id):
        raise RequestError(
            f"training run id {run_id!r} must be at most 200 letters, digits, '_', '-', '.' or ':', and not start with "
            "'.', '-' or ':'"
        )
    return run_id


def runs_folder(home: Path) -> Path:
    return home / "runs"


def run_ids_in(folder: Path) -> list[str]:
    """As names_in, for the folders of runs."""
    return names_in(folder, _RUN_ID)


def names_in(folder: Path, pattern: re.Pattern[str] = _NAME) -> list[str]:
    """Sorted names of a folder's real subfolders that match; none if it does not exist."""
    try:
        with os.scandir(folder) as entries:
            return sorted(e.name for e in entries if pattern.fullmatch(e.name) and e.is_dir(follow_symlinks=False))
    except (FileNotFoundError, NotADirectoryError):
        return []


@dataclass(frozen=True)
class CheckpointPath:
    """`tinker://<run_id>/<weights|sampler_weights|external_weights>/<name>`."""

    run_id: str
    kind: CheckpointKind
    name: str

    @classmethod
    def parse(cls, path: str) -> CheckpointPath:
        """Raises RequestError for any other form."""
        scheme, separator, rest = str(path).partition("://")
        parts = rest.split("/")
        is_path = scheme == "tinker" and separator and len(parts) == 3
        kind: CheckpointKind | None = next((known for known in KINDS if is_path and known == parts[1]), None)
        if kind is None:
            forms = " or ".join(f"tinker://<run_id>/{shape}" for shape in SHAPES)
            raise RequestError(f"checkpoint path {path!r} must look like {forms}")
        return cls(check_run_id(parts[0]), kind, check_name(parts[2], "checkpoint name"))

    def __str__(self) -> str:
        return f"tinker://{self.run_id}/{self.checkpoint_id}"

    @property
    def checkpoint_id(self) -> str:
        """The SDK's checkpoint id: `<kind>/<name>`, unique within its run."""
        return f"{self.kind}/{self.name}"

    def folder(self, home: Path) -> Path:
        """The checkpoint's folder. Raises RequestError if a symbolic link in the home leads elsewhere."""
        return _without_links(runs_folder(home) / self.run_id / self.kind / self.name, home, f"checkpoint {self}")

    def archive(self, home: Path) -> Path:
        """The file of its archive. Raises RequestError if a symbolic link in the home leads elsewhere."""
        folder = _without_links(home / "archives" / self.run_id / self.kind, home, f"archive of {self}")
        return folder / f"{self.name}.tar.gz"


def _without_links(folder: Path, home: Path, what: str) -> Path:
    if folder.resolve() != home.resolve() / folder.relative_to(home):
        raise RequestError(
            f"{what}: a symbolic link in {folder} leads elsewhere; remove the link", remote=f"{what} cannot be used"
        )
    return folder
