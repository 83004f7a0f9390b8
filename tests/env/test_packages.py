"""Where `load_environment` is found: entry points of installed packages, modules, files, folders, and `env.key=value`."""

import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from recipes import rl
from tests.debate.arena import TINY
from tinker_cookbook import cli_utils, env
from tinker_cookbook.env import packages
from tinker_cookbook.env.contract_dataset import LoadedEnvironment
from tinker_cookbook.env.dataset import DatasetBuilder
from tinker_cookbook.exceptions import ConfigurationError

SOURCE = """
class Env:
    def __init__(self, word):
        self.word = word
    def initial_observation(self):
        return f"Say {self.word}."
    def step(self, text):
        return float(text == self.word)

def load_environment(word="moss"):
    return Env(word)
"""


@pytest.fixture(autouse=True)
def _forget_modules(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "installed"), *sys.path])
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        del sys.modules[name]


def write(path: str, text: str = SOURCE) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(text)


def word_of(said: str, **args: Any) -> tuple[str, str]:
    builder = env.load(said, **args).dataset_builder(TINY)
    assert isinstance(builder, DatasetBuilder) and isinstance(builder.env, LoadedEnvironment)
    return builder.env.name, builder.env.loaded.word


@pytest.mark.parametrize(
    ("file", "said", "name"),
    [
        ("sand_env.py", "sand_env.py", "sand_env"),
        ("environments/dune_env/__init__.py", "environments/dune_env", "dune_env"),
        ("environments/clay_env/clay_env.py", "./environments/clay_env/", "clay_env"),
        ("environments/loam_env/loam_env/__init__.py", "environments/loam_env", "loam_env"),
        ("environments/silt_env/src/silt_env/__init__.py", "environments/silt_env", "silt_env"),
        ("installed/peat_env.py", "peat_env", "peat_env"),
        ("installed/soils/marl_env.py", "soils.marl_env", "marl_env"),
        ("installed/soils/chalk_env.py", "soils.chalk_env:load_environment", "chalk_env"),
        ("installed/soils/rock_env.py", "soils.rock_env:Env", "Env"),
    ],
)
def test_places(file: str, said: str, name: str) -> None:
    write(file)
    assert word_of(said, word="fern") == (name, "fern")


def offer(monkeypatch: pytest.MonkeyPatch, *entries: tuple[str, str]) -> None:
    found = [EntryPoint(name, value, packages.ENTRY_POINTS) for name, value in entries]
    monkeypatch.setattr(packages, "entry_points", lambda group: found if group == packages.ENTRY_POINTS else [])


def test_an_installed_package_offers_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    write("installed/mud_env.py")
    offer(monkeypatch, ("mud", "mud_env"), ("wet-mud", "mud_env:load_environment"))
    assert word_of("mud") == ("mud", "moss") and word_of("wet-mud", word="a") == ("wet-mud", "a")
    with pytest.raises(ConfigurationError, match=r"env='mudd' is unknown; use .*mud, wet-mud, guess_number"):
        env.load("mudd")


def test_two_packages_of_one_name_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, ("mud", "mud_env"), ("mud", "other_env"))
    with pytest.raises(
        ConfigurationError, match=r"env=mud: several packages offer it: \? \(mud_env\), \? \(other_env\)"
    ):
        env.load("mud")


@pytest.mark.parametrize(
    ("file", "text", "said", "message"),
    [
        (
            "empty_env.py",
            "",
            "empty_env.py",
            "empty_env has no function load_environment; define `def load_environment",
        ),
        ("three_env.py", "load_environment = 3", "three_env.py", "three_env has no function load_environment"),
        (
            "sick_env.py",
            "\n1 / 0",
            "sick_env.py",
            r"importing it failed: ZeroDivisionError: division by zero \(sick_env.py, line 2\)$",
        ),
        (
            "lone_env.py",
            "import sys\nimport nothing_here",
            "lone_env.py",
            r"ModuleNotFoundError: No module named 'nothing_here' \(lone_env.py, line 2\)$",
        ),
        (
            "torn_env.py",
            "def load_environment(:",
            "torn_env.py",
            r"importing it failed: SyntaxError: .*\(torn_env.py, line 1\)$",
        ),
        (
            "late_env.py",
            "async def load_environment():\n    return 1",
            "late_env.py",
            "it is async; only methods and reward functions may be",
        ),
        (
            "folder_env/readme.txt",
            "",
            "folder_env",
            "the folder has no module; looked for __init__.py, folder_env.py, fol",
        ),
        (
            "none_env.py",
            "def load_environment():\n    return None",
            "none_env.py",
            "env=none_env.py.*: it returned nothing; `return` an object with initial_observation and step",
        ),
        (
            "half_env.py",
            "class A:\n    dataset = [3]\nload_environment = A",
            "half_env.py",
            "lacks initial_observation and",
        ),
        (
            "half_two_env.py",
            "class A:\n    dataset = [3]\ndef load_environment(): return A()",
            "half_two_env.py",
            "for questions it has dataset and lacks rubric; for a builder of environments it lacks build$",
        ),
        ("x.py", "", "no_such_env", "env='no_such_env' is unknown; use"),
        ("x.py", "", "no/such/folder", "env='no/such/folder' is unknown; use"),
    ],
)
def test_what_is_not_there_is_said(file: str, text: str, said: str, message: str) -> None:
    write(file, text)
    with pytest.raises(ConfigurationError, match=message):
        env.load(said)


def test_the_arguments_of_a_loader_that_fails_are_told() -> None:
    write("word_env.py", "def load_environment(level: int = 1):\n    return {1: None}[level]")
    with pytest.raises(KeyError) as raised:
        env.load("word_env.py", level=3)
    assert raised.value.__notes__ == ["env=word_env.py: its arguments were {'level': 3}"]
    with pytest.raises(ConfigurationError, match=r"^env=word_env.py: levle: .*; it takes level$"):
        env.load("word_env.py", levle=3)
    with pytest.raises(ConfigurationError, match=r"^env=word_env.py: level='high': is str, but .* takes level: int$"):
        env.load("word_env.py", level="high")


def test_env_keys_on_the_command_line() -> None:
    write("reed_env.py")
    cli = cli_utils.parse(rl.CLIConfig, ["env=reed_env.py", "env.word=fern", "max_steps=2"])
    assert cli.env_args == {"word": "fern"}
    builder = rl.make_dataset_builder(rl.for_model(cli))
    assert isinstance(builder, DatasetBuilder) and isinstance(builder.env, LoadedEnvironment)
    assert builder.env.loaded.word == "fern"
