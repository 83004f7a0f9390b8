"""What ships is found from every folder, in a checkout and in an installation, under the names that the pages use."""

import importlib.util
import shutil
from pathlib import Path
from types import ModuleType

import pytest

from tinker_cookbook.data import hub, rows
from tinker_cookbook.data.shipped import EXAMPLE_DATA, shipped_model, shipped_path
from tinker_cookbook.env.packages import find_loader
from tinker_local_backend import shipped


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_names_in_the_project_are_found_from_elsewhere() -> None:
    assert shipped_path("example_data/conversations.jsonl") == str(EXAMPLE_DATA / "conversations.jsonl")
    assert shipped_path(Path("configs/mixture.toml")) == str(EXAMPLE_DATA.parent / "configs" / "mixture.toml")
    assert shipped_model("example_data/tiny_chat") == shipped_model("tiny_chat") == str(EXAMPLE_DATA / "tiny_chat")


@pytest.mark.parametrize(
    "name", ["owner/name", "mine.jsonl", "example_data/none.jsonl", "/etc/hosts", "docs/README.md", ""]
)
def test_other_names_stay(name: str) -> None:
    assert shipped_path(name) == name


def test_what_lies_here_comes_first(tmp_path: Path) -> None:
    (tmp_path / "example_data").mkdir()
    (tmp_path / "example_data" / "conversations.jsonl").touch()
    assert shipped_path("example_data/conversations.jsonl") == "example_data/conversations.jsonl"


def test_data_and_environments_go_by_them() -> None:
    questions = rows.read_file("example_data/qa/test.jsonl", lambda row: row.text("question"), "{...}")
    assert len(questions) == 8
    assert find_loader("example_data/environments/sums") is not None
    assert hub.find("example_data") is None


def test_an_installation_keeps_them_in_a_package(tmp_path: Path) -> None:
    """And a folder of anybody's with the plain name beside it is not taken for it."""
    (tmp_path / "tinker_local_backend").mkdir()
    for folder in ("example_data", "tinker_local_data/example_data"):
        (tmp_path / folder / "qa").mkdir(parents=True)
    file = shutil.copy(str(shipped.__file__), tmp_path / "tinker_local_backend" / "shipped.py")
    spec = importlib.util.spec_from_file_location("installed_shipped", file)
    assert spec is not None and spec.loader is not None
    module = ModuleType("installed_shipped")
    module.__file__ = str(file)
    spec.loader.exec_module(module)
    assert tmp_path / "tinker_local_data" / "example_data" == module.EXAMPLE_DATA
