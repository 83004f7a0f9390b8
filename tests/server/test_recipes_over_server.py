"""Every recipe that trains or samples runs through the SDK: over our server, and with a key over the hosted service."""

import dataclasses
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import chz
import httpx
import pytest

from benchmarks.recipe_runs import Outcome, run_recipe
from benchmarks.recipe_table import RECIPES, RecipeRun
from tests.server.serving import KEY, Serving

pytestmark = pytest.mark.server

HOSTED_KEY = os.environ.get("TINKER_API_KEY")
HOSTED_MODEL = os.environ.get("TINKER_TEST_HOSTED_MODEL", "meta-llama/Llama-3.2-1B")
"""a small one that the service serves"""


def takes_a_server(run: RecipeRun) -> bool:
    config = getattr(importlib.import_module(run.module), "CLIConfig", None)
    return config is not None and {"backend", "base_url"} <= chz.chz_fields(config).keys()


NEEDS_FILES = {"recipes.export"}
"""They read a checkpoint's files, which our server gives nobody: they lie on its own disk."""
OVER_A_SERVER = [run for run in RECIPES if takes_a_server(run) and run.module not in NEEDS_FILES]


def over(run: RecipeRun, url: str | None, *keys: str) -> RecipeRun:
    """The run with its engine elsewhere."""
    place = ("backend=tinker", *([f"base_url={url}"] if url is not None else []), *keys)
    return dataclasses.replace(run, small=(*run.small, *place))


def assert_done(outcome: Outcome) -> None:
    assert outcome.returncode == 0 and not outcome.missing, outcome.output[-3000:]


@pytest.fixture(autouse=True)
def no_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recipe has a limit of its own, and it is longer."""
    monkeypatch.setenv("TINKER_API_KEY", KEY)


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    pytest.importorskip("fastapi", reason="the extra `server` is not installed")
    from tinker_cookbook.data.shipped import shipped_model

    models = ",".join(shipped_model(name) for name in ("tiny_chat", "tiny_debate", "tiny_vision"))
    # Far fewer than there are runs: each tells the server that it is done.
    with Serving(tmp_path_factory.mktemp("home"), model=None, models=models, max_models=2) as serving:
        yield serving


@pytest.fixture(scope="module")
def sl_basic(serving: Serving, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of sl_basic, which other recipes take."""
    folder = tmp_path_factory.mktemp("recipes") / "sl_basic"
    (run,) = (run for run in OVER_A_SERVER if run.module == "recipes.sl_basic")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINKER_API_KEY", KEY)
        assert_done(run_recipe(over(run, serving.url), folder, folder, small=True))
    return folder


def test_most_recipes_take_a_server() -> None:
    assert len(OVER_A_SERVER) > 10


@pytest.mark.parametrize("run", OVER_A_SERVER, ids=lambda run: run.module)
def test_over_our_server(run: RecipeRun, serving: Serving, sl_basic: Path, tmp_path: Path) -> None:
    missing = [name for name in run.needs if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed")
    assert_done(run_recipe(over(run, serving.url), tmp_path / "run", sl_basic, small=True))
    live = [line for line in httpx.get(f"{serving.url}/metrics").text.splitlines() if line.startswith("tinker_live_")]
    assert {"tinker_live_sessions 0.0", "tinker_live_models 0.0"} <= set(live), live


@pytest.mark.network
@pytest.mark.skipif(HOSTED_KEY is None, reason="TINKER_API_KEY is not set")
@pytest.mark.parametrize("module", ["recipes.sl_basic", "recipes.rl_basic", "recipes.debate_rs_grpo"])
def test_over_the_hosted_service(module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_API_KEY", str(HOSTED_KEY))
    (run,) = (run for run in RECIPES if run.module == module)
    outcome = run_recipe(over(run, None, f"model_name={HOSTED_MODEL}"), tmp_path / "run", tmp_path, small=True)
    assert_done(outcome)
