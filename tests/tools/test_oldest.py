"""Constraints of the oldest versions are those of pyproject.toml, each stated there."""

import subprocess
import sys
import tomllib

import pytest

from tools.oldest import ROOT, constraints, stated


def test_each_lower_bound_becomes_a_pin() -> None:
    given = ["a>=1.2", "b-c >= 3,<4", 'd.e>=0.1; sys_platform != "win32"']
    assert constraints(given) == ["a==1.2", "b-c==3", 'd.e==0.1; sys_platform != "win32"']


@pytest.mark.parametrize("requirement", ["a", "a==1", "a<2", "a[b]", "a~=1.0"])
def test_a_requirement_without_one_is_an_error(requirement: str) -> None:
    with pytest.raises(ValueError, match="states no oldest version"):
        constraints(["b>=1", requirement])


def test_the_projects_own_are_all_stated() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert stated() == [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    command = [sys.executable, "-S", "-m", "tools.oldest"]  # nothing is installed yet where it runs
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == constraints(stated())
    names = [line.partition("==")[0] for line in done.stdout.splitlines()]
    assert "torch" in names and "transformers" in names and "pytest" in names
