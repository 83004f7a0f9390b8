"""Look up `load_environment` in installed packages, importable modules, files and folders.

reasoning_gym:leg_counting       an environment of the library that takes names after a colon
ghost_words                      an entry point of the group tinker_cookbook.environments, or a module of that name
my_package.tasks.sums            a module
environments/sums, sums.py       a folder with a package, or a file
"""

import importlib
import importlib.util
import os
from collections.abc import Callable
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from tinker_cookbook.data.shipped import shipped_path
from tinker_cookbook.env.verifiers.stand_in import verifiers_stands_in
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.plugins import load_file, what_failed

ENTRY_POINTS = "tinker_cookbook.environments"
LOADER = "load_environment"

SHIPPED: dict[str, str] = {"reasoning_gym": "tinker_cookbook.env.reasoning.environment"} | {
    name: f"tinker_cookbook.env.shipped.{folder}.{name}"
    for folder, names in {
        "games": ("kuhn_poker", "proposer_solver", "shared_sum"),
        "model_aware": (
            "ghost_trace",
            "self_prediction",
            "entropy_intuition",
            "gradient_prophet",
            "gradient_intuition",
        ),
    }.items()
    for name in names
}
"""The library's environments by name: modules with a load_environment."""
TAKES_NAMES = ("reasoning_gym",)
"""Environments that take names after a colon, the first argument of their load_environment."""


def installed_environments() -> list[str]:
    """The names of the environments that the library and installed packages offer."""
    return [*SHIPPED, *sorted({entry.name for entry in entry_points(group=ENTRY_POINTS)})]


def find_loader(name: str) -> Callable[..., Any] | None:
    """The `load_environment` of a name, module, file or folder; None if there is no such thing.

    Raises ConfigurationError: it exists but cannot be imported, or has no load_environment.
    """
    first, colon, names = name.partition(":")
    if colon and first in TAKES_NAMES:
        return partial(_loader_of(importlib.import_module(SHIPPED[first]), first), names)
    if name in SHIPPED:
        return _loader_of(importlib.import_module(SHIPPED[name]), name)
    entries = [entry for entry in entry_points(group=ENTRY_POINTS) if entry.name == name]
    if len({entry.value for entry in entries}) > 1:
        raise ConfigurationError(f"env={name}: several packages offer it: {', '.join(map(_whose, entries))}")
    if entries:
        return _loader_of(_imported(name, entries[0].load), name)
    place = Path(shipped_path(name)).expanduser()
    if place.suffix == ".py" and place.is_file():
        return _loader_of(_imported(name, lambda: load_file(place)), name)
    if place.is_dir():
        file = _main_file(place)
        return _loader_of(_imported(name, lambda: load_file(file)), name)
    if _is_module(name):
        return _loader_of(_imported(name, lambda: importlib.import_module(name)), name)
    return None


def load_environment(env_id: str, **args: Any) -> Any:
    """Call the `load_environment` of a name, module, file or folder. Raises ConfigurationError if there is none."""
    loader = find_loader(env_id)
    if loader is None:
        raise ConfigurationError(
            f"env={env_id!r}: there is no such environment; known are {', '.join(installed_environments())}"
        )
    with verifiers_stands_in(load_environment):
        return loader(**args)


def _whose(entry: EntryPoint) -> str:
    return f"{entry.dist.name if entry.dist is not None else '?'} ({entry.value})"


def _main_file(folder: Path) -> Path:
    name = folder.resolve().name
    tried = [
        folder / "__init__.py",
        folder / f"{name}.py",
        folder / name / "__init__.py",
        folder / "src" / name / "__init__.py",
    ]
    main = next((file for file in tried if file.is_file()), None)
    if main is None:
        paths = ", ".join(os.path.relpath(file, folder) for file in tried)
        raise ConfigurationError(f"env={folder}: the folder has no module; looked for {paths}")
    return main


def _is_module(name: str) -> bool:
    if not all(part.isidentifier() for part in name.split(".")):
        return False
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):  # the package above it cannot be imported, or does not exist
        return False


def _imported(name: str, load: Callable[[], Any]) -> Any:
    try:
        with verifiers_stands_in(load_environment):
            return load()
    except ConfigurationError:
        raise
    except Exception as error:  # any error of the user's code
        raise ConfigurationError(f"env={name}: importing it failed: {what_failed(error)}") from error


def _loader_of(loaded: Any, name: str) -> Callable[..., Any]:
    loader = getattr(loaded, LOADER, None) if isinstance(loaded, ModuleType) else loaded
    if not callable(loader):
        what = (
            f"{loaded.__name__} has no function {LOADER}"
            if isinstance(loaded, ModuleType)
            else f"{loaded!r} is not a function"
        )
        raise ConfigurationError(f"env={name}: {what}; define `def {LOADER}(**args)`, which returns the environment")
    return loader
