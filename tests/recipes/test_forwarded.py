"""`python -m tinker_cookbook.recipes.NAME`: our recipes under the public package's path, and that package's own before ours."""

import ast
import importlib
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

import recipes.__main__
from recipes import chat_sl, sl_basic
from tests.child import ROOT, python_path, run_forked
from tests.waiting import HANG_SECONDS
from tinker_cookbook.recipes import MOVED

KNOWN = recipes.__main__.recipes().keys()


@pytest.mark.parametrize("name", [*KNOWN, *MOVED])
def test_every_recipe_is_there_under_the_name_of_the_public_package(name: str) -> None:
    """Found without being imported; a recipe of MOVED is not also one of ours."""
    before = set(sys.modules)
    spec = importlib.util.find_spec(f"tinker_cookbook.recipes.{name}")
    assert spec is not None and spec.loader is not None
    target = MOVED.get(name, name)
    assert not {new for new in set(sys.modules) - before if new.startswith("recipes.")}
    assert target in KNOWN and (name not in MOVED or name not in KNOWN)


def test_what_is_imported_is_the_recipe_s() -> None:
    forwarded = importlib.import_module("tinker_cookbook.recipes.sl_basic")
    assert forwarded.CLIConfig is sl_basic.CLIConfig and forwarded.main is sl_basic.main
    # A recipe that is a file here and a folder there is both.
    assert importlib.import_module("tinker_cookbook.recipes.chat_sl").CLIConfig is chat_sl.CLIConfig
    assert importlib.import_module("tinker_cookbook.recipes.chat_sl.train").CLIConfig is chat_sl.CLIConfig
    with pytest.raises(ImportError, match="cannot import name 'nothing'"):
        exec("from tinker_cookbook.recipes.chat_sl import nothing")


@pytest.mark.parametrize("name", ["sl_basic", "chat_sl", "chat_sl.train", "preference.rlhf.rlhf_pipeline"])
def test_it_is_run(name: str) -> None:
    done = run_forked(["-m", f"tinker_cookbook.recipes.{name}", "--help"], env={})
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"usage: python -m recipes.{MOVED.get(name, name)} key=value")


@pytest.mark.parametrize("name", ["sl_basix", "preference.nope", "math_rl.math_env"])
def test_a_name_that_is_none_is_told_which_there_are(name: str) -> None:
    with pytest.raises(
        ModuleNotFoundError,
        match=rf"there is no recipe '{name}'; there are anchor_study, .*sl_basic.*chat_sl\.train",
    ):
        importlib.import_module(f"tinker_cookbook.recipes.{name}")


def test_loading_it_imports_no_recipe_and_the_public_package_s_recipes_come_first(tmp_path: Path) -> None:
    """In a process of its own, with another package's recipes behind this library on the path."""
    theirs = tmp_path / "tinker_cookbook" / "recipes"
    (theirs / "chat_sl").mkdir(parents=True)
    (theirs / "sl_basic.py").write_text("OWNER = 'them'\nfrom tinker_cookbook.recipes import rl_basic\n")
    (theirs / "chat_sl" / "train.py").write_text("OWNER = 'them'\n")
    program = """if True:
        import sys, tinker_cookbook.recipes
        found = [sorted(name for name in sys.modules if name.partition(".")[0] == "recipes")]
        from tinker_cookbook.recipes import rl_basic, sl_basic
        from tinker_cookbook.recipes.chat_sl import train
        import tinker_cookbook.recipes.preference.train as dpo
        found += [sl_basic.OWNER, train.OWNER, sl_basic.rl_basic is rl_basic]
        print([*found, sorted(name for name in sys.modules if name.partition(".")[0] == "recipes")])
        print(rl_basic.RECIPE, dpo.RECIPE)
    """
    path = f"{python_path()}:{tmp_path}"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert ast.literal_eval(first) == [[], "them", "them", True, []]
    assert second == "rl_basic preference_dpo"
