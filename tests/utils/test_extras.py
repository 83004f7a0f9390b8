"""Hints name what can be installed, as pyproject.toml has it."""

import shlex
import tomllib
from pathlib import Path

import pytest

from tinker_cookbook.utils.extras import APART, EXTRAS, install_command
from tinker_local_backend.server import __main__ as server

ROOT = Path(__file__).parents[2]
DECLARED = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def test_the_table_is_that_of_the_project() -> None:
    assert {name: list(packages) for name, packages in EXTRAS.items()} == {name: DECLARED[name] for name in EXTRAS}
    assert not APART.keys() & DECLARED.keys()


def test_a_command_is_pasted_as_it_is() -> None:
    assert install_command("plot") == "pip install 'matplotlib>=3.8'"
    assert install_command("neptune") == "pip install 'neptune-scale>=0.10'"
    assert shlex.split(install_command("verifiers")) == ["pip", "install", "verifiers>=0.4,<0.5"]


def test_the_server_names_what_it_needs() -> None:
    assert shlex.split(server.INSTALL)[2:] == [name.partition(";")[0] for name in DECLARED["server"]]


@pytest.mark.parametrize("package", ["tinker_cookbook", "tinker_local_backend", "recipes"])
def test_no_hint_names_an_extra_of_this_project(package: str) -> None:
    """It is in no index, where `pip install 'tinker-cookbook-local[plot]'` would look for it."""
    files = list((ROOT / package).rglob("*.py"))
    assert len(files) > 40 and [file for file in files if "tinker-cookbook-local[" in file.read_text()] == []
