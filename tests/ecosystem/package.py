"""Releases of tinker-cookbook, downloaded from the package index when the tests run and never kept."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.waiting import HANG_SECONDS

FOLDER = "recipes"
"""What of a release runs on this library. What else the recipes import from tinker_cookbook has to be this library's."""
NEEDED = (
    "aiohappyeyeballs", "aiohttp", "aiosignal", "attrs", "blobfile", "certifi", "charset-normalizer", "click", "cloudpickle",
    "contourpy", "cycler", "docutils", "filelock", "fonttools", "frozenlist", "idna", "itsdangerous", "jedi", "kiwisolver",
    "loro", "lxml", "marimo", "markdown", "matplotlib", "msgspec", "multidict", "narwhals", "nltk", "parso", "pillow",
    "propcache", "psutil", "pycryptodomex", "pygments", "pylatexenc", "pymdown-extensions", "pyparsing", "pyrage",
    "python-dateutil", "regex", "requests", "six", "starlette", "termcolor", "textarena", "tiktoken", "tml-renderers",
    "tomlkit", "urllib3", "websockets", "yarl",
)  # fmt: skip
"""Packages that the programs and their own library import and this library does not need, with what they need in turn."""


class IndexUnreachableError(RuntimeError):
    """The package could not be downloaded."""


@dataclass(frozen=True)
class Release:
    """A release on disk.

    Attributes:
        library: the folder that holds tinker_cookbook, whole.
        recipes: one that holds a tinker_cookbook with nothing but its recipes.
        sources: the source distribution, which has tests and tutorials as well.
    """

    library: Path
    recipes: Path
    sources: Path


def unpack_release(folder: Path, version: str) -> Release:
    """Download a version's wheel and sources into `folder`, which is empty. Raises IndexUnreachableError with what pip says."""
    library = unpack_wheel(folder / "library", version)
    shutil.copytree(library / "tinker_cookbook" / FOLDER, folder / "recipes" / "tinker_cookbook" / FOLDER)
    (archive,) = unpack_sources(folder / "sources", version)
    with tarfile.open(archive) as tar:
        tar.extractall(folder / "sources", filter="data")
    (sources,) = (path for path in (folder / "sources").iterdir() if path.is_dir())
    return Release(library, folder / "recipes", sources)


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
        [sys.executable, "-m", "pip", command, *options, *arguments],
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
    )
    if done.returncode != 0:
        raise IndexUnreachableError(f"pip {command} {' '.join(arguments)}: {done.stderr.strip()[-300:]}")
