"""Talking to a checkpoint through the served report: real weights, and who may ask."""

import http.client
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.report.made import write_run
from tests.waiting import HANG_SECONDS, start_serving
from tinker_cookbook import backends
from tinker_cookbook.data.shipped import shipped_model
from tinker_cookbook.report.serve import Reports, Server
from tinker_cookbook.utils.files import append_jsonl
from tinker_cookbook.utils.lazy import tinker

ASKED = {"name": "base model", "messages": [{"role": "user", "content": "What is 2 + 3?"}], "temperature": 0.0}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("TINKER_BACKEND", raising=False)
    monkeypatch.setenv("TINKER_LOCAL_HOME", str(tmp_path / "home"))
    config = {"model_name": shipped_model("tiny_chat"), "backend": "local", "max_tokens": 24, "temperature": 0.5}
    return write_run(tmp_path / "run", config, [])


@pytest.fixture
def server(run: Path) -> Iterator[Server]:
    with Server(Reports([str(run)]), "title") as server:
        thread = start_serving(server)
        yield server
        server.shutdown()
        thread.join()


def ask(server: Server, body: Any, headers: dict[str, str] | None = None, run: str = "0") -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=HANG_SECONDS)
    content = body if isinstance(body, str) else json.dumps(body)
    connection.request("POST", f"/api/chat/{run}", content, {"Content-Type": "application/json"} | (headers or {}))
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, json.loads(text) if answer.headers["Content-Type"] == "application/json" else text


def described(server: Server) -> dict[str, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=HANG_SECONDS)
    connection.request("GET", "/api/chats/0")
    found = json.loads(connection.getresponse().read())
    connection.close()
    return found


def save_checkpoint(run: Path) -> None:
    """One that was trained hard to say something else than the base model."""
    service: Any = backends.create_service_client("local", None)

    async def train() -> str:
        client = await service.create_lora_training_client_async(shipped_model("tiny_chat"), rank=4, seed=0)
        tokenizer = client.get_tokenizer()
        ids = tokenizer.encode(
            "<|im_start|>user\nWhat is 2 + 3?<|im_end|>\n<|im_start|>assistant\nno no no no<|im_end|>"
        )
        inputs: Any = {"target_tokens": ids[1:], "weights": [1.0] * (len(ids) - 1)}
        datum = tinker.Datum(model_input=tinker.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=inputs)
        for _ in range(8):
            await client.forward_backward_async([datum], "cross_entropy")
            await client.optim_step_async(tinker.AdamParams(learning_rate=0.02))
        future = await client.save_weights_for_sampler_async("final")
        return (await future.result_async()).path

    import asyncio

    path = asyncio.run(train())
    append_jsonl(run / "checkpoints.jsonl", {"name": "000008", "batch": 8, "sampler_path": path})


@pytest.mark.slow
def test_a_checkpoint_and_its_base_model_answer(run: Path, server: Server) -> None:
    assert described(server) == {"names": ["base model"], "system": None, "temperature": 0.5, "max_tokens": 24}
    save_checkpoint(run)
    assert described(server)["names"] == ["000008", "base model"]  # of a run that goes on
    status, base = ask(server, ASKED)
    assert status == 200 and "".join(base["tokens"]).startswith(base["content"]) and base["stop"] == "stop"
    assert len(base["tokens"]) == len(base["ids"]) == len(base["sampled"]) and all(x <= 0 for x in base["sampled"])
    status, trained = ask(server, ASKED | {"name": "000008", "max_tokens": 4})
    assert status == 200 and trained["ids"] != base["ids"] and len(trained["ids"]) <= 4
    one, other = (ask(server, ASKED | {"temperature": 1.0, "seed": 7})[1] for _ in range(2))
    assert one["ids"] == other["ids"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"name": "tinker://x/sampler_weights/y"}, "the run has base model"),
        ({"messages": []}, "messages: give at least one"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages: give at least one"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "the last one must be the user's"),
        ({"temperature": -1}, "temperature=-1"),
        ({"temperature": "hot"}, "temperature='hot': must be a number"),
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"max_tokens": 2.5}, "max_tokens=2.5: must be a whole number"),
        ({"top_k": 3}, "top_k: no field"),
    ],
)
def test_a_mistake_is_named_before_anything_loads(server: Server, change: dict[str, Any], said: str) -> None:
    status, body = ask(server, ASKED | change)
    assert status == 400 and said in body


def test_only_the_page_itself_may_ask(server: Server) -> None:
    assert ask(server, ASKED, {"Origin": "http://evil.example"})[0] == 404
    assert ask(server, ASKED, {"Host": "evil.example"})[0] == 404
    assert ask(server, ASKED, {"Content-Type": "text/plain"}) == (400, "Content-Type: must be application/json")
    assert ask(server, "{", {"Origin": f"http://127.0.0.1:{server.server_port}"})[1].startswith(
        "the request is not JSON"
    )
    assert ask(server, ASKED, {"Content-Length": "9999999"})[0] == 400
    assert ask(server, ASKED, run="7")[0] == ask(server, ASKED, run="x")[0] == 404
