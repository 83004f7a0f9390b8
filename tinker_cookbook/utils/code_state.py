"""The state of the code: the commits of its repositories, and the uncommitted changes."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from tinker_cookbook.utils.git_rev import git_output


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
        top = git_output(folder, "rev-parse", "--show-toplevel")
        if top is None:
            others.append(f"### module: {module.__name__} (not in a git repository)\nmodule_path: {folder}\n")
        else:
            repositories.setdefault(Path(top), []).append(module.__name__)
    parts: list[str] = []
    for top, names in sorted(repositories.items()):
        commit = git_output(top, "rev-parse", "HEAD") or "UNKNOWN"
        differs = git_output(top, "diff", "--no-color", "HEAD") or "(no local changes)"
        parts.append(f"### repo: {top} @ {commit}\nmodules: {', '.join(sorted({*names}))}\n{differs}\n")
    return "\n".join([*parts, *others])


def _folder(module: ModuleType) -> Path:
    places = [*getattr(module, "__path__", [])]
    file = getattr(module, "__file__", None)
    if not places and file is None:
        raise ImportError(f"module {module.__name__} has no file")
    return Path(places[0]).resolve() if places else Path(str(file)).resolve().parent
