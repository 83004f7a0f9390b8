"""The errors that the library raises on purpose: their kinds, and what they refine."""

import pickle
import subprocess
import sys
import tomllib

import pytest

import tinker_cookbook
from tests.child import ROOT, python_path
from tinker_cookbook import exceptions
from tinker_cookbook.exceptions import TinkerCookbookError

KINDS = {
    "BenchmarkNotFoundError": (exceptions.EvalError, KeyError),
    "CheckpointError": (exceptions.TrainingError, RuntimeError),
    "EvalError": (TinkerCookbookError, RuntimeError),
    "EvalGradingError": (exceptions.EvalError,),
    "EvalTimeoutError": (exceptions.EvalError, TimeoutError),
    "SandboxError": (TinkerCookbookError, RuntimeError),
    "WeightsAdapterError": (exceptions.WeightsError, exceptions.CheckpointError, ValueError),
    "WeightsDownloadError": (exceptions.WeightsError, exceptions.CheckpointError),
    "WeightsError": (TinkerCookbookError,),
    "WeightsMergeError": (exceptions.WeightsError, ValueError),
}


@pytest.mark.parametrize("name", exceptions.__all__)
def test_an_error_refines_what_it_says_and_can_go_to_another_process(name: str) -> None:
    kind = getattr(exceptions, name)
    error = kind("field=3: must be 2")
    assert isinstance(error, (TinkerCookbookError, *KINDS.get(name, ())))
    assert all(isinstance(error, base) for base in KINDS.get(name, ()))
    copied = pickle.loads(pickle.dumps(error))
    assert (type(copied), str(copied)) == (kind, "field=3: must be 2"), "also of a KeyError, without quotes"


def test_all_is_complete() -> None:
    found = {n for n, value in vars(exceptions).items() if isinstance(value, type) and issubclass(value, Exception)}
    assert found == set(exceptions.__all__)


def test_the_library_shows_the_errors_that_scripts_import_and_its_versions() -> None:
    named = [name for name in tinker_cookbook.__all__ if not name.startswith("__")]
    assert len(named) == 18
    assert all(getattr(tinker_cookbook, name) is getattr(exceptions, name) for name in named)
    assert tinker_cookbook.__upstream__ == "0.6.1"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert tinker_cookbook.__version__ == project["version"]
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = tinker_cookbook.nothing


def test_the_library_itself_imports_nothing_large() -> None:
    check = "import sys, tinker_cookbook; print(sorted({name.split('.')[0] for name in sys.modules}))"
    command = [sys.executable, "-S", "-c", check]
    done = subprocess.run(command, env={"PYTHONPATH": python_path()}, capture_output=True, text=True, check=True)
    for large in ("tinker'", "torch", "numpy", "transformers", "chz", "subprocess", "importlib.metadata"):
        assert large not in done.stdout
    assert "'tinker_cookbook'" in done.stdout
