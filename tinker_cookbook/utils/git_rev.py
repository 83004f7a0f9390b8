"""The version of the running code, for the records of a run and for a service's metadata."""

from __future__ import annotations

import importlib.metadata
import subprocess
from pathlib import Path
from typing import Any

DISTRIBUTION = "tinker-cookbook-local"


def git_state() -> dict[str, Any] | None:
    """Commit of the checkout that this code runs from, and whether tracked files differ from it; None outside of git."""
    folder = Path(__file__).parent
    commit = git_output(folder, "rev-parse", "HEAD")
    if commit is None:
        return None
    return {"commit": commit, "dirty": bool(git_output(folder, "status", "--porcelain", "--untracked-files=no"))}


def code_revision() -> str:
    """The commit, with "-dirty" if tracked files differ from it; outside of git the installed version."""
    state = git_state()
    if state is not None:
        return state["commit"] + ("-dirty" if state["dirty"] else "")
    return installed_version()


def installed_version() -> str:
    """The installed version of this project; "unknown" if it is not installed."""
    try:
        return importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def recipe_user_metadata(recipe_name: str) -> dict[str, str]:
    """The metadata that a recipe sends to a service, `ServiceClient(user_metadata=...)`: its name and the code's
    revision.
    """
    return {"recipe_name": recipe_name, "git_rev": code_revision()}


def git_output(folder: Path, *arguments: str) -> str | None:
    """The output of a git command in a folder, without trailing whitespace; None if git fails."""
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.rstrip() if done.returncode == 0 else None
