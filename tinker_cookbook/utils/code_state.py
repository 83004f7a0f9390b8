"""The state of the code: the commits of its repositories, and the uncommitted changes."""

from __future__ import annotations

import importlib
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType


def code_state(modules: Sequence[str | ModuleType] = ("tinker_cookbook",)) -> str:
    """A text with a section for each repository of the modules: its commit, and its complete `git diff HEAD`.

    A module outside of a repository gets a section that says so. Untracked files are not included.

    Args:
        modules: module names, or modules.

    Raises:
        ImportError: there is no such module.
    """
    repositories: dict[Path, list[str]] = {}
    others: list[str] = []
    for entry in modules:
        module = importlib.import_module(entry) if isinstance(entry, str) else entry
        folder = _folder(module)
        top = _git(folder, "rev-parse", "--show-toplevel")
        if top is None:
            others.append(f"### module: {module.__name__} (not in a git repository)\nmodule_path: {folder}\n")
        else:
            repositories.setdefault(Path(top.strip()), []).append(module.__name__)
    parts = []
    for top, names in sorted(repositories.items()):
        commit = (_git(top, "rev-parse", "HEAD") or "UNKNOWN").strip()
        differs = _git(top, "diff", "--no-color", "HEAD") or "(no local changes)"
        parts.append(f"### repo: {top} @ {commit}\nmodules: {', '.join(sorted({*names}))}\n{differs.rstrip()}\n")
    return "\n".join([*parts, *others])


def _folder(module: ModuleType) -> Path:
    places = [*getattr(module, "__path__", [])]
    file = getattr(module, "__file__", None)
    if not places and file is None:
        raise ImportError(f"module {module.__name__} has no file")
    return Path(places[0]).resolve() if places else Path(str(file)).resolve().parent


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
