"""Every recipe runs from the command line with small settings; none is missing here or in docs/recipes.md."""

import ast
import importlib.util
import re
import sys
from pathlib import Path

import pytest

from benchmarks.recipe_runs import ROOT, run_recipe, spawned
from benchmarks.recipe_table import NOT_SMOKED, RECIPES, RecipeRun
from recipes.__main__ import recipes
from tests.child import run_forked

PAGE = (ROOT / "docs" / "recipes.md").read_text()


def test_every_recipe_is_in_the_table() -> None:
    listed = {f"recipes.{name}" for name in recipes()}
    assert listed == {run.module for run in RECIPES} | NOT_SMOKED.keys()


@pytest.mark.parametrize("run", RECIPES, ids=lambda run: run.module)
def test_every_recipe_is_documented(run: RecipeRun) -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith(f"| `{run.module}` |")]
    assert len(rows) == 1, f"the table of docs/recipes.md has {len(rows)} rows for {run.module}"
    what, expected = [cell.strip() for cell in rows[0].split("|")[2:4]]
    assert len(what) > 10 and len(expected) > 10
    spec = importlib.util.find_spec(run.module)
    assert spec is not None and spec.origin is not None
    documentation = ast.get_docstring(ast.parse(Path(spec.origin).read_text())) or ""
    assert re.search(rf"python -m {re.escape(run.module)}\b", documentation)


@pytest.fixture(scope="module")
def sl_basic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of sl_basic, which other recipes take."""
    folder = tmp_path_factory.mktemp("recipes") / "sl_basic"
    (run,) = (run for run in RECIPES if run.module == "recipes.sl_basic")
    outcome = run_recipe(run, folder, folder, small=True)
    assert outcome.returncode == 0, outcome.output[-3000:]
    return folder


SLOW = {
    "recipes.chat",
    "recipes.compare",
    "recipes.debate_judge.create_data",
    "recipes.debate_judge.decisions",
    "recipes.debate_judge.rl",
    "recipes.debate_judge.sl",
    "recipes.debate_study",
    "recipes.decisions",
    "recipes.demo",
    "recipes.distillation.off_policy",
    "recipes.distillation.on_policy",
    "recipes.rl",
    "recipes.export",
    "recipes.forecasting",
    "recipes.guess_number",
    "recipes.preference.rlhf_pipeline",
    "recipes.preference.train",
    "recipes.rl_basic",
    "recipes.sl_basic",
    "recipes.sweep",
    "recipes.tool_use",
    "recipes.twenty_questions",
    "recipes.validate_gpu",
}


REAL = {"recipes.chat", "recipes.export", "recipes.preference.train", "recipes.rl_basic"}
"""With sl_basic, one of each kind that starts as a user starts it; the others are forked. `make smoke` starts all of them."""


def forked(command: list[str], env: dict[str, str], typed: str) -> tuple[int, str]:
    done = run_forked(command[1:], env=env, typed=typed)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(
    "run",
    [pytest.param(run, marks=pytest.mark.slow if run.module in SLOW else (), id=run.module) for run in RECIPES],
)
def test_smoke(run: RecipeRun, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    for package in run.needs:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package}")
    start = spawned if run.module in REAL else forked
    other = request.getfixturevalue("sl_basic") if any("{sl_basic}" in key for key in run.arguments) else tmp_path
    outcome = run_recipe(run, tmp_path / "run", other, small=True, start=start)
    assert outcome.returncode == 0, outcome.output[-3000:]
    assert "Traceback" not in outcome.output
    assert outcome.missing == ()
    # Two steps need not move a number the right way, but each number that the recipe reports on must be there.
    for measure, values in zip(run.measures, outcome.values, strict=True):
        assert values is not None, f"{measure.key} is not in {measure.folder or 'the run'}'s metrics"


@pytest.mark.parametrize("run", RECIPES, ids=lambda run: run.module)
def test_help_names_every_key(run: RecipeRun, capsys: pytest.CaptureFixture[str]) -> None:
    module = importlib.import_module(run.module)
    with pytest.MonkeyPatch.context() as patched, pytest.raises(SystemExit) as exit_info:
        patched.setattr(sys, "argv", [run.module, "--help"])
        from tinker_cookbook.cli_utils import run_recipe as run_command

        config = getattr(module, "CLIConfig", None) or module.DemoConfig
        run_command(config, module.main)
    assert exit_info.value.code == 0
    shown = capsys.readouterr().out
    assert f"python -m {run.module}" in shown
