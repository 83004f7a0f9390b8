"""A server of a model whose template takes tools, and a checkpoint that calls one."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.frameworks.calls import Served
from tests.server.serving import KEY, Serving
from tests.server.test_clients import trained_caller
from tests.server.tools_model import model_with_tools


@pytest.fixture(scope="session")
def serving_tools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Serving, str, str]]:
    pytest.importorskip("fastapi", reason="the extra `server` is not installed")
    model = model_with_tools(tmp_path_factory.mktemp("models") / "with_tools")
    home = tmp_path_factory.mktemp("home")
    # The caller below is trained, and the client of verifiers renders, by the template.
    with pytest.MonkeyPatch.context() as patch, Serving(home, model=model, chat="template") as serving:
        patch.setenv("TINKER_TELEMETRY", "0")
        yield serving, model, trained_caller(serving, model)


@pytest.fixture
def served(serving_tools: tuple[Serving, str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Served:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LOCAL_KEY", KEY)
    serving, model, caller = serving_tools
    return Served(serving, model, caller, tmp_path)
