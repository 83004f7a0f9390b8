"""Runs say which code they ran."""

import importlib.metadata
import subprocess
from pathlib import Path

import pytest

from tinker_cookbook.utils import git_rev


def commit(folder: Path) -> None:
    for command in (
        ["init", "--quiet"],
        ["add", "."],
        ["-c", "user.name=t", "-c", "user.email=t@example.invalid", "commit", "--quiet", "-m", "first"],
    ):
        subprocess.run(["git", *command], cwd=folder, check=True)


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the module in it, as if the code ran from there."""
    (tmp_path / "code.py").write_text("x = 1\n")
    monkeypatch.setattr(git_rev, "__file__", str(tmp_path / "code.py"))
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    return tmp_path


def test_a_checkout_is_named_by_its_commit_and_by_whether_it_was_changed(checkout: Path) -> None:
    commit(checkout)
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=checkout, capture_output=True, text=True).stdout.strip()
    assert len(head) == 40
    assert git_rev.git_state() == {"commit": head, "dirty": False}
    (checkout / "untracked.txt").write_text("mine")
    assert git_rev.recipe_user_metadata("mine") == {"recipe_name": "mine", "git_rev": head}
    (checkout / "code.py").write_text("x = 2\n")
    assert git_rev.git_state() == {"commit": head, "dirty": True}
    assert git_rev.code_revision() == f"{head}-dirty"


def test_outside_of_git_the_installed_version_counts(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert git_rev.git_state() is None
    monkeypatch.setattr(importlib.metadata, "version", {git_rev.DISTRIBUTION: "1.2.3"}.__getitem__)
    assert git_rev.recipe_user_metadata("mine")["git_rev"] == "1.2.3"


def test_code_without_git_and_without_an_installation_is_unknown(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(git_rev, "DISTRIBUTION", "no-such-distribution-of-ours")
    assert git_rev.code_revision() == "unknown"
