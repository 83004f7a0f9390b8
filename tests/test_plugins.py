"""Parts of one's own: registered names, modules, files, objects; and errors that show what is wanted."""

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.waiting import HANG_SECONDS
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.plugins import Kind, Registry, describe, parameter_problem

EXAMPLE = "def score(question, reply, answer):\n    return float(answer in reply)"
KIND = Kind(
    key="reward_fn",
    wanted="def score(question: str, reply: str, answer: str) -> float",
    example=EXAMPLE,
    problem=lambda found: parameter_problem(found, ("question", "reply", "answer")),
)


def shipped(question: str, reply: str, answer: str) -> float:
    return 1.0


@pytest.fixture
def registry() -> Registry:
    return Registry(KIND, {"shipped": shipped})


@pytest.fixture(autouse=True)
def path_and_modules_as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        del sys.modules[name]


def write(path: Path, source: str) -> Path:
    path.write_text(textwrap.dedent(source))
    return path


def test_a_registered_name(registry: Registry):
    assert registry.resolve("shipped") is shipped
    mine = lambda question, reply, answer: 0.5  # noqa: E731
    registry.register("mine", mine)
    assert registry.resolve("mine") is mine
    assert registry.names() == ["shipped", "mine"]
    registry.unregister("mine")
    assert "mine" not in registry


@pytest.mark.parametrize("name", ["shipped", "", "a:b", "a,b"])
def test_a_name_that_cannot_be_registered(registry: Registry, name: str):
    with pytest.raises(ConfigurationError, match="taken" if name == "shipped" else "is not a name"):
        registry.register(name, shipped)
    assert registry.resolve("shipped") is shipped


def test_registering_something_else_is_an_error(registry: Registry):
    with pytest.raises(ConfigurationError, match=r"reward_fn='two': takes \(a, b\)"):
        registry.register("two", lambda a, b: 0.0)


def test_a_file_with_its_neighbours(registry: Registry, tmp_path: Path):
    write(tmp_path / "own_neighbour.py", "WORTH = 0.25")
    file = write(
        tmp_path / "own_rewards.py",
        """
        from own_neighbour import WORTH

        def score(question, reply, answer):
            return WORTH

        class Rewards:
            @staticmethod
            def nested(question, reply, answer):
                return 2 * WORTH
        """,
    )
    found = registry.resolve(f"{file}:score")
    assert found("q", "r", "a") == 0.25
    assert registry.resolve(f"{file}:score") is found, "a file is imported once"
    assert registry.resolve(f"{file}:Rewards.nested")("q", "r", "a") == 0.5


def test_a_module(registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    package = tmp_path / "own_package"
    package.mkdir()
    write(package / "__init__.py", "")
    write(package / "rewards.py", EXAMPLE)
    monkeypatch.syspath_prepend(tmp_path)
    assert registry.resolve("own_package.rewards:score")("2+2", "it is 4", "4") == 1.0


def test_what_a_file_gives_can_be_pickled_to_another_process(tmp_path: Path):
    file = write(tmp_path / "own_pickled.py", EXAMPLE)
    program = f"""
import concurrent.futures, multiprocessing
from tests.test_plugins import KIND
from tinker_cookbook.plugins import Registry
if __name__ == "__main__":
    score = Registry(KIND, {{}}).resolve({str(file) + ":score"!r})
    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        print(pool.submit(score, "q", "4", "4").result())
"""
    script = write(tmp_path / "program.py", program)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=HANG_SECONDS
    )
    assert done.stdout == "1.0\n", done.stderr


def test_an_object_from_python(registry: Registry):
    mine = lambda question, reply, answer: 0.5  # noqa: E731
    assert registry.resolve(mine) is mine
    with pytest.raises(ConfigurationError, match="is not a function, but int"):
        registry.resolve(3)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ("shiped", "reward_fn='shiped' is unknown; use shipped, package.module:object or path/file.py:object"),
        ("nowhere.py:score", "there is no file"),
        ("no_such_module_at_all:score", "reward_fn='no_such_module_at_all:score' is unknown; use shipped, package"),
        ("json.no_such_module:score", r"importing json\.no_such_module failed: ModuleNotFoundError"),
        ("json:score", "json has no score"),
        ("json:dumps.deeper", "json has no dumps.deeper"),
        ("json:loads", "will be called with"),
        ("json:__name__", "is not a function, but str"),
        ("json:", "is unknown"),
        (":dumps", "is unknown"),
        ("json:dumps()", "is unknown"),
    ],
)
def test_a_wrong_one_is_named(registry: Registry, said: str, message: str):
    with pytest.raises(ConfigurationError, match=message):
        registry.resolve(said)


@pytest.mark.parametrize("said", ["shiped", "json:score", "json:__name__"])
def test_the_error_shows_signature_and_example(registry: Registry, said: str):
    with pytest.raises(ConfigurationError) as raised:
        registry.resolve(said)
    assert KIND.wanted in str(raised.value)
    assert textwrap.indent(EXAMPLE, "    ") in str(raised.value)


def test_an_error_while_importing_keeps_its_traceback(registry: Registry, tmp_path: Path):
    file = write(tmp_path / "own_broken.py", "x = 1\nx / 0")
    message = r"importing .* failed: ZeroDivisionError: division by zero \(own_broken.py, line 2\)$"
    with pytest.raises(ConfigurationError, match=message) as raised:
        registry.resolve(f"{file}:score")
    assert isinstance(raised.value.__cause__, ZeroDivisionError)


def test_a_file_called_like_another_module_is_refused(registry: Registry, tmp_path: Path):
    file = write(tmp_path / "json.py", EXAMPLE)
    with pytest.raises(ConfigurationError, match="a module called json exists already; rename the file"):
        registry.resolve(f"{file}:score")


def test_parameters():
    names = ("question", "reply", "answer")
    assert parameter_problem(lambda *anything: 0, names) is None
    assert parameter_problem(lambda a, b, c, d=1: 0, names) is None
    assert parameter_problem(lambda a, b, c, *, key: 0, names) == (
        "takes (a, b, c, *, key), but will be called with (question, reply, answer)"
    )


def test_describe():
    assert describe(shipped) == "tests.test_plugins:shipped"
    assert describe(3) == "?:int"
