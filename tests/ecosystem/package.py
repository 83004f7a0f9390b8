"""The public recipes of tinker-cookbook, downloaded from the package index when the tests run and never kept."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

VERSIONS = ("0.5.8", "0.6.1")
"""Those that scripts are written for today; the later one's recipes have more keys."""
FOLDER = "recipes"
"""What is unpacked. Everything else that the recipes import from tinker_cookbook has to be this library's."""
NEEDED = ("termcolor", "pylatexenc")
"""Packages that recipes import and this library does not need."""


class IndexUnreachableError(RuntimeError):
    """The package could not be downloaded."""


def unpack_recipes(folder: Path, version: str) -> Path:
    """Download a version of the package and unpack its recipes into `folder`/tinker_cookbook; what they need goes beside it.

    Raises IndexUnreachableError with what pip says.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _pip("download", "--dest", str(folder), f"tinker-cookbook=={version}")
    _pip("install", "--target", str(folder), *NEEDED)
    (wheel_file,) = folder.glob("tinker_cookbook-*.whl")
    with zipfile.ZipFile(wheel_file) as wheel:
        names = [name for name in wheel.namelist() if name.split("/")[:2] == ["tinker_cookbook", FOLDER]]
        wheel.extractall(folder, names)
    return folder / "tinker_cookbook"


def unpack_wheel(folder: Path, version: str) -> Path:
    """Download a version and unpack all of it, to be read and not imported; the folder. Raises IndexUnreachableError."""
    folder.mkdir(parents=True, exist_ok=True)
    _pip("download", "--only-binary=:all:", "--dest", str(folder), f"tinker-cookbook=={version}")
    (wheel_file,) = folder.glob("tinker_cookbook-*.whl")
    with zipfile.ZipFile(wheel_file) as wheel:
        wheel.extractall(folder)
    return folder


def unpack_sources(folder: Path, version: str) -> list[Path]:
    """Download the source distribution of a version; its archive. Raises IndexUnreachableError."""
    folder.mkdir(parents=True, exist_ok=True)
    _pip("download", "--no-binary=tinker-cookbook", "--dest", str(folder), f"tinker-cookbook=={version}")
    return [*folder.glob("tinker_cookbook-*.tar.gz")]


def install(folder: Path, packages: Sequence[str]) -> None:
    """Install packages into a folder, without what they need. Raises IndexUnreachableError."""
    _pip("install", "--target", str(folder), *packages)


def _pip(command: str, *arguments: str) -> None:
    options = ["--quiet", "--no-deps", "--disable-pip-version-check"]
    done = subprocess.run(
        [sys.executable, "-m", "pip", command, *options, *arguments], capture_output=True, text=True, timeout=120
    )
    if done.returncode != 0:
        raise IndexUnreachableError(f"pip {command} {' '.join(arguments)}: {done.stderr.strip()[-300:]}")
