"""Which calls of the clients `openai` and `anthropic` work here: the tables of docs/server_clients.md."""

# pyright: reportMissingImports=false

import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
import tinker

from tests.server.client_calls import CALLS, OPENAI, REFUSED, Asked, table
from tests.server.serving import KEY, Serving
from tests.server.tools_model import model_with_tools
from tests.waiting import HANG_SECONDS

pytestmark = pytest.mark.server

PAGE = Path(__file__).parents[2] / "docs" / "server_clients.md"


@pytest.mark.parametrize("client", CALLS)
def test_the_page_has_the_table(client: str) -> None:
    assert table(client) in PAGE.read_text()
    assert REFUSED[client].keys() <= CALLS[client].keys()


def test_most_calls_work() -> None:
    assert len(OPENAI) >= 49 and len(REFUSED["openai"]) <= 8


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return model_with_tools(tmp_path_factory.mktemp("models") / "with_tools")


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory, model: str) -> Iterator[Serving]:
    pytest.importorskip("fastapi", reason="the extra `server` is not installed")
    pytest.importorskip("llguidance", reason="needs the extra `constrain` (llguidance)")
    with Serving(tmp_path_factory.mktemp("calls-home"), model=model) as serving:
        yield serving


@pytest.fixture(scope="module")
def latest(serving: Serving, model: str) -> str:
    """The newest weights of a run."""
    service = tinker.ServiceClient(base_url=serving.url, api_key=KEY)
    trained = service.create_lora_training_client(model, rank=2, seed=1).result()
    path = trained.save_weights_for_sampler("first").result().path
    return path.removesuffix("first") + "latest"


@pytest.mark.parametrize(("client", "name"), [(client, name) for client, calls in CALLS.items() for name in calls])
def test_a_call(serving: Serving, model: str, latest: str, client: str, name: str) -> None:
    library = pytest.importorskip(client)
    url = f"{serving.url}/v1" if client == "openai" else serving.url
    kinds = {"openai": ("OpenAI", "AsyncOpenAI"), "anthropic": ("Anthropic", "AsyncAnthropic")}[client]
    plain, sibling = (
        getattr(import_module(client), kind)(base_url=url, api_key=KEY, max_retries=0, timeout=HANG_SECONDS)
        for kind in kinds
    )
    asked = Asked(plain, sibling, model, latest)
    if name not in REFUSED[client]:
        assert CALLS[client][name](asked)
        return
    with pytest.raises(library.APIStatusError, match=re.escape(REFUSED[client][name])) as refused:
        CALLS[client][name](asked)
    assert refused.value.status_code in (400, 404, 415)
