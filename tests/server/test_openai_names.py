"""vLLM's routes of texts and tokens, and the newest checkpoint of a run as a model."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import tinker
from transformers import AutoTokenizer

from tests.server.data import DATA
from tests.server.serving import KEY, TENANTS, TINY_CHAT, Serving
from tests.server.tools_model import QUESTION
from tests.waiting import HANG_SECONDS

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    pytest.importorskip("fastapi", reason="the extra `server` is not installed")
    with Serving(tmp_path_factory.mktemp("names-home"), tenants=TENANTS) as serving:
        yield serving


@pytest.fixture(scope="module")
def web(serving: Serving) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=serving.url, headers={"Authorization": f"Bearer {KEY}"}, timeout=HANG_SECONDS) as client:
        yield client


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(TINY_CHAT)


def post(web: httpx.Client, route: str, status: int = 200, **body: Any) -> Any:
    response = web.post(route, json=body)
    assert response.status_code == status, response.text
    return response.json()


def test_a_text_and_a_chat_become_the_tokens_of_their_routes(web: httpx.Client, tokenizer: Any) -> None:
    text = post(web, "/tokenize", model=TINY_CHAT, prompt="What is é?", return_token_strs=True)
    ids = tokenizer.encode("What is é?")
    assert text == {
        "count": len(ids),
        "max_model_len": 1024,
        "tokens": ids,
        "token_strs": tokenizer.convert_ids_to_tokens(ids),
    }
    bare = post(web, "/tokenize", prompt="What", add_special_tokens=False)["tokens"]
    assert bare == tokenizer.encode("What", add_special_tokens=False)
    chat = post(web, "/tokenize", messages=QUESTION)
    assert chat["token_strs"] is None
    sampled = post(web, "/v1/chat/completions", model=TINY_CHAT, messages=QUESTION, max_tokens=1, return_token_ids=True)
    assert chat["tokens"] == sampled["prompt_token_ids"]
    assert post(web, "/detokenize", model=TINY_CHAT, tokens=chat["tokens"]) == {
        "prompt": tokenizer.decode(chat["tokens"])
    }


@pytest.mark.parametrize(
    ("route", "body", "message"),
    [
        ("/tokenize", {}, "give exactly one of prompt and messages"),
        ("/tokenize", {"prompt": "x", "messages": QUESTION}, "give exactly one of prompt and messages"),
        ("/tokenize", {"messages": QUESTION, "add_special_tokens": True}, "add_special_tokens is for a prompt"),
        ("/tokenize", {"prompt": "x", "truncate": 3}, "truncate is unknown here"),
        ("/detokenize", {"tokens": [10**6]}, "tokens has 1000000; this tokenizer has"),
        ("/detokenize", {"tokens": [1] * 1025}, "more than the context of 1024"),
        ("/detokenize", {"tokens": [-1]}, "an id is negative"),
    ],
    ids=str,
)
def test_mistakes(web: httpx.Client, route: str, body: dict[str, Any], message: str) -> None:
    assert message in post(web, route, status=400, **body)["error"]["message"]


def test_version_and_health(web: httpx.Client) -> None:
    assert web.get("/version").json()["version"]
    assert web.get("/health").json() == {"status": "ok"}


def test_latest_is_the_newest_checkpoint_of_its_kind_at_each_request(web: httpx.Client, serving: Serving) -> None:
    service = tinker.ServiceClient(base_url=serving.url, api_key=KEY)
    client = service.create_lora_training_client(TINY_CHAT, rank=4, seed=3).result()
    run = client.save_state("only").result().path.removeprefix("tinker://").partition("/")[0]
    latest = f"tinker://{run}/sampler_weights/latest"

    def asked(**fields: Any) -> dict[str, Any]:
        fields = {"messages": QUESTION, "max_tokens": 1, "temperature": 0, "logprobs": True, **fields}
        return post(web, "/v1/chat/completions", model=latest, **fields)

    missing = web.post("/v1/chat/completions", json={"model": latest, "messages": QUESTION})
    assert missing.status_code == 404 and "has no checkpoint of kind" in missing.json()["error"]["message"]
    replies = []
    for name in ("z", "a"):
        client.forward_backward(DATA, "cross_entropy").result()
        client.optim_step(tinker.AdamParams(learning_rate=1e-2)).result()
        path = client.save_weights_for_sampler(name).result().path
        replies.append(asked())
        assert replies[-1]["model"] == path == web.get(f"/v1/models/{latest}").json()["id"]
    scores = [reply["choices"][0]["logprobs"]["content"][0]["logprob"] for reply in replies]
    assert scores[0] != scores[1]
    named = client.save_weights_for_sampler("latest").result().path
    client.save_weights_for_sampler("later").result()
    assert asked()["model"] == named, "a checkpoint of this name is itself"
    assert post(web, "/v1/completions", model=f"tinker://{run}/weights/latest", prompt="x", max_tokens=1)["model"] == (
        f"tinker://{run}/weights/only"
    )
    other = {"Authorization": f"Bearer {TENANTS['alice']}"}
    refused = web.post("/v1/chat/completions", json={"model": latest, "messages": QUESTION}, headers=other)
    assert refused.status_code == 404
