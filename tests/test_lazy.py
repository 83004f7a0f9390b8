"""Packages show the names of their modules, and import a module when its name is asked for."""

import importlib
import subprocess
import sys

import pytest

from tests.child import python_path
from tests.waiting import HANG_SECONDS
from tinker_cookbook.utils.lazy import exports

PACKAGES = (
    *(f"tinker_cookbook.{name}" for name in ("rl", "supervised", "eval", "preference", "distillation", "stores")),
    "tinker_local_backend",
)
LIGHT = ("environment", "engine.model.refusals", "storage.registry", "storage.info")
"""Modules of the engine that answer without it."""


@pytest.mark.parametrize("package", PACKAGES)
def test_every_name_that_is_shown_is_there(package: str) -> None:
    module = importlib.import_module(package)
    shown = dir(module)
    assert len(shown) >= 4
    for name in shown:
        assert getattr(module, name) is not None
    with pytest.raises(AttributeError, match=f"'{package}' has no attribute 'nothing'"):
        _ = module.nothing


def test_a_name_comes_from_its_module_and_a_module_from_itself() -> None:
    from tinker_cookbook.distillation import sdft
    from tinker_cookbook.rl import Env, FailFast, types

    assert Env is types.Env and FailFast.__module__ == "tinker_cookbook.rl.rollout_strategy"
    assert sdft.__name__ == "tinker_cookbook.distillation.sdft"
    get, shown = exports("tinker_cookbook.utils", {"lazy": "LazyModule torch", "seeds": ""})
    assert shown() == ["LazyModule", "seeds", "torch"] and get("seeds").derive_seed


def test_importing_the_packages_imports_nothing_large() -> None:
    names = ", ".join([*PACKAGES, *(f"tinker_local_backend.{name}" for name in LIGHT)])
    code = f"import sys, {names}; print([m for m in ('torch', 'tinker', 'transformers', 'chz') if m in sys.modules])"
    child = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": python_path()},
        timeout=HANG_SECONDS,
    )
    assert (child.stdout.strip(), child.returncode) == ("[]", 0), child.stderr
