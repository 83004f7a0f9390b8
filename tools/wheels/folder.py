"""The folder of wheels: filled through pip, described by a manifest, checked before it is used."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from email import message_from_string
from pathlib import Path

from pip._vendor.packaging.requirements import Requirement
from pip._vendor.packaging.specifiers import SpecifierSet
from pip._vendor.packaging.utils import canonicalize_name

from tools.wheels.needs import Package, Target, WheelsError

MANIFEST = "wheels.json"
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input")


@dataclass(frozen=True)
class Wheel(Package):
    """A package as a wheel at `path`; `python` is its `Requires-Python`."""

    path: Path = Path()
    python: str = ""


@dataclass(frozen=True)
class Entry:
    """A wheel in the manifest; `size` in bytes."""

    name: str
    version: str
    file: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The contents of a folder, the target machine, and the requested extras of the project."""

    python: str
    platform: str
    extras: tuple[str, ...]
    wheels: tuple[Entry, ...]

    @property
    def size(self) -> int:
        """Size of all wheels together, in bytes."""
        return sum(entry.size for entry in self.wheels)


def read_wheel(path: Path) -> Wheel:
    """Name, version and requirements from a wheel's own metadata."""
    with zipfile.ZipFile(path) as archive:
        member = next(name for name in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", name))
        metadata = message_from_string(archive.read(member).decode("utf-8"))
    requires = tuple(metadata.get_all("Requires-Dist", []))
    name = canonicalize_name(metadata["Name"])
    return Wheel(name, metadata["Version"], requires, path, metadata["Requires-Python"] or "")


class Index:
    """The package index that pip is configured for, as seen from a machine like `target`.

    Each wheel is downloaded once, into the caller's folder `cache`.
    """

    def __init__(self, target: Target, cache: Path) -> None:
        self._target = target
        self._cache = cache
        self._wheels: dict[str, Wheel] = {}

    def find(self, requirement: str, by: str) -> Wheel:
        """Download the newest wheel for the target that meets `requirement`; errors name `by`, which needs it.

        A package that is published only as a source archive is built here, if the result is a pure Python wheel.

        Raises:
            WheelsError: there is none; the message quotes pip.
        """
        if requirement not in self._wheels:
            folder = Path(tempfile.mkdtemp(dir=self._cache))
            error = self._download(requirement, folder)
            if error:
                raise WheelsError(
                    f"no wheel of {requirement}, which {by} needs, for Python {self._target.python} on "
                    f"{self._target.platform}: {error}\nCheck the network and pip's index; name the glibc that the target "
                    "has with --platform; or pin another version in constraints.txt."
                )
            self._wheels[requirement] = read_wheel(next(folder.glob("*.whl")))
        return self._wheels[requirement]

    def _download(self, requirement: str, folder: Path) -> str | None:
        """Put one wheel into `folder`. Returns the error, or None."""
        platforms = [f"--platform={tag}" for tag in self._target.platforms()]
        for_target = (
            "--only-binary=:all:",
            "--implementation=cp",
            f"--python-version={self._target.python}",
            *platforms,
        )
        error = _pip("download", *for_target, "--no-deps", f"--dest={folder}", requirement)
        if error is None or "No matching distribution" not in error:
            return error
        name = Requirement(requirement).name
        error = _pip("wheel", "--no-deps", f"--no-binary={name}", f"--wheel-dir={folder}", requirement)
        if error:
            return error
        built = read_wheel(next(folder.glob("*.whl")))
        if not re.search(r"-(py2\.)?py3-none-any\.whl$", built.path.name):
            return f"its source builds to {built.path.name}, for machines like this one"
        # pip checked this for the running Python, not for the target's.
        if not SpecifierSet(built.python).contains(f"{self._target.python}.0"):
            return f"it needs Python {built.python}"
        return None


def _pip(*arguments: str) -> str | None:
    """Run pip. Returns the errors that it printed, or None if it succeeded."""
    done = subprocess.run([*PIP, *arguments], capture_output=True, text=True)
    if done.returncode == 0:
        return None
    lines = done.stderr.splitlines()
    return (
        "\n".join([line for line in lines if "ERROR" in line] or lines[-5:])
        or f"pip ended with status {done.returncode}"
    )


def write_folder(folder: Path, wheels: Sequence[Wheel], target: Target, extras: Sequence[str]) -> Manifest:
    """Copy `wheels` to `folder` with their manifest. A folder from an earlier download is replaced as a whole."""
    with _replacing(folder) as new:
        entries: list[Entry] = []
        for wheel in wheels:
            shutil.copyfile(wheel.path, new / wheel.path.name)
            content = wheel.path.read_bytes()
            digest = hashlib.sha256(content).hexdigest()
            entries.append(Entry(wheel.name, wheel.version, wheel.path.name, len(content), digest))
        manifest = Manifest(target.python, target.platform, tuple(extras), tuple(entries))
        (new / MANIFEST).write_text(json.dumps(asdict(manifest), indent=2) + "\n", encoding="utf-8")
    return manifest


def read_folder(folder: Path) -> Manifest:
    """The manifest of `folder`, after checking its wheels against it.

    Raises:
        WheelsError: there is no manifest, or a wheel is missing or differs from it.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise WheelsError(f"{folder}: no {MANIFEST} here; name a folder that `python -m tools.wheels download` wrote")
    fields = json.loads(path.read_text(encoding="utf-8"))
    entries = tuple(Entry(**entry) for entry in fields["wheels"])
    for entry in entries:
        wheel = folder / entry.file
        if not wheel.is_file():
            raise WheelsError(f"{wheel} is missing; copy the whole folder again")
        if hashlib.sha256(wheel.read_bytes()).hexdigest() != entry.sha256:
            raise WheelsError(f"{wheel} is not what was downloaded (its sha256 differs); copy the folder again")
    return Manifest(fields["python"], fields["platform"], tuple(fields["extras"]), entries)


def install_folder(folder: Path, manifest: Manifest, target: Path) -> None:
    """Unpack the wheels of `folder` into `target` without a network; a `target` from an earlier run is replaced as a whole.

    Raises:
        WheelsError: pip refused; the message quotes it.
    """
    wheels = [str(folder / entry.file) for entry in manifest.wheels]
    with _replacing(target) as new:
        # Isolated: ignore settings for this machine's pip (an index, a user folder).
        offline = ("--isolated", "install", "--no-index", "--no-deps", "--no-compile", f"--target={new}")
        error = _pip(*offline, *wheels)
        if error:
            raise WheelsError(f"pip could not install the wheels of {folder}, made for {manifest.platform}: {error}")
        shutil.copyfile(folder / MANIFEST, new / MANIFEST)


@contextmanager
def _replacing(folder: Path) -> Iterator[Path]:
    """A new folder that replaces `folder` if the block succeeds. Refuses a folder that this tool did not write."""
    folder = folder.absolute()
    if folder.exists() and not (folder / MANIFEST).is_file() and not (folder.is_dir() and not any(folder.iterdir())):
        raise WheelsError(f"{folder} holds something else; name a new or an empty folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{folder.name}-", dir=folder.parent) as scratch:
        new = Path(scratch) / "new"
        new.mkdir()
        yield new
        if folder.exists():
            os.replace(folder, Path(scratch) / "old")
        os.replace(new, folder)
