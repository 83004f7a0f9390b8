"""vLLM by URL, against a stand-in for the server: which routes are asked for what, and its errors and its death."""

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import tinker

from tests.engine.helpers import prompt
from tests.samplers.stand_in import LOGPROB, NOT_A_NUMBER, REFUSED
from tests.waiting import start_serving
from tinker_local_backend import ModelLoadError, RequestError, SamplingClient, ServiceClient
from tinker_local_backend.errors import SamplingError


class Handler(BaseHTTPRequestHandler):
    """The routes of a vLLM that this project asks."""

    @property
    def own(self) -> "Server":
        assert isinstance(self.server, Server)
        return self.server

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def reply(self, body: object, status: int = 200) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def knows(self) -> bool:
        if self.own.api_key is None or self.headers["authorization"] == f"Bearer {self.own.api_key}":
            return True
        self.reply({"error": "Unauthorized"}, 401)
        return False

    def do_GET(self) -> None:
        if not self.knows():
            return
        if self.path == "/version":
            self.reply({"version": "0"})
        else:
            adapter = {"id": "some-adapter", "parent": "served", "max_model_len": None}
            self.reply({"data": [adapter, {"id": "served", "parent": None, "max_model_len": 64}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if not self.knows():
            return
        self.own.asked.append((self.path, body))
        if self.path != "/v1/completions":
            if self.own.without_adapters:
                self.reply({"detail": "Not Found"}, 404)
            else:
                self.reply("Success")
        elif body["prompt"][0] == REFUSED:
            self.reply({"error": {"message": "this is too long"}}, 400)
        else:
            self.complete(body)

    def complete(self, body: dict[str, Any]) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        self.connection.settimeout(5)
        tokens, values = self.own.completion(body)
        for i, (token, value) in enumerate(zip(tokens, values, strict=True)):
            logprobs = {"token_logprobs": [value], "top_logprobs": [{f"token_id:{token}": value}]}
            ended = "length" if i == len(tokens) - 1 else None
            choice = {"token_ids": [token], "logprobs": logprobs, "finish_reason": ended, "text": "?"}
            self.wfile.write(f"data: {json.dumps({'choices': [choice]})}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")


class Server(ThreadingHTTPServer):
    """Every token is the one after the prompt's last, plus one each time."""

    daemon_threads = True

    def __init__(self, likeliest: list[float]):
        super().__init__(("127.0.0.1", 0), Handler)
        self.likeliest = likeliest
        self.without_adapters = False
        self.api_key: str | None = None
        self.asked: list[tuple[str, dict[str, Any]]] = []
        start_serving(self)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def completion(self, body: dict[str, Any]) -> tuple[list[int], list[float | None]]:
        token, plain, tempered, limited = self.likeliest
        if body["max_tokens"] == 1:  # the questions at the start
            return [int(token)], [plain if body["temperature"] == 1 else tempered if body["top_k"] < 0 else limited]
        tokens = [body["prompt"][-1] + 1 + i for i in range(body["max_tokens"])]
        return tokens, [None if body["prompt"][0] == NOT_A_NUMBER else LOGPROB] * len(tokens)

    def told(self, path: str) -> list[dict[str, Any]]:
        return [body for asked, body in self.asked if asked == path]

    def die(self) -> None:
        self.shutdown()
        self.server_close()


@pytest.fixture
def server(likeliest: list[float], monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    server = Server(likeliest)
    monkeypatch.setenv("TINKER_LOCAL_SAMPLER", "vllm")
    monkeypatch.setenv("TINKER_LOCAL_VLLM_URL", server.url)
    yield server
    server.die()


@pytest.fixture
def service(server: Server) -> Iterator[ServiceClient]:
    with ServiceClient() as service:
        yield service


@pytest.fixture
def client(service: ServiceClient, model: str) -> SamplingClient:
    training = service.create_lora_training_client(model, rank=4, seed=0).result()
    return training.save_weights_and_get_sampling_client().result()


def ask(client: SamplingClient, tokens: list[int], **fields: Any) -> list[tinker.SampledSequence]:
    params = tinker.SamplingParams(**{"max_tokens": 3, "stop": [], "seed": 5, **fields})
    return list(client.sample(prompt(tokens), 1, params).result().sequences)


def test_an_adapter_is_loaded_used_and_unloaded(
    service: ServiceClient, client: SamplingClient, server: Server, tmp_path: Path
) -> None:
    (sequence,) = ask(client, [1, 40], temperature=0.7, stop=[99])
    assert (sequence.tokens, sequence.logprobs) == ([41, 42, 43], [LOGPROB] * 3)
    blank, loaded = server.told("/v1/load_lora_adapter")
    folder = Path()
    for body in (blank, loaded):
        folder = Path(body["lora_path"])
        assert (
            folder.name == body["lora_name"]
            and folder.exists()
            and folder.is_relative_to(tmp_path / "home" / "vllm_adapters")
        )
    order = server.told("/v1/completions")[-1]
    assert order.pop("seed") >= 0
    assert order == {
        "model": loaded["lora_name"],
        "prompt": [1, 40],
        "max_tokens": 3,
        "temperature": 0.7,
        "top_k": -1,
        "top_p": 1.0,
        "min_p": 0.0,
        "stop_token_ids": [99],
        "ignore_eos": True,
        "logprobs": 0,
        "stream": True,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "skip_special_tokens": False,
    }
    with ServiceClient() as other:
        other.create_sampling_client(base_model=client.get_base_model()).result()
    assert folder.exists()  # another engine at the same server takes away only what is its own
    service.close()
    assert not folder.exists()
    names = {body["lora_name"] for body in server.told("/v1/unload_lora_adapter")}
    assert names >= {blank["lora_name"], loaded["lora_name"]}


def test_the_base_model_goes_through_an_adapter_that_changes_nothing(
    service: ServiceClient, model: str, server: Server
) -> None:
    """A server never empties its slots, and on a CPU rows without an adapter go through the last."""
    base = service.create_sampling_client(base_model=model).result()
    assert ask(base, [1, 40])[0].tokens == [41, 42, 43]
    (blank,) = server.told("/v1/load_lora_adapter")
    assert {order["model"] for order in server.told("/v1/completions")} == {blank["lora_name"]}


def test_its_context_is_the_limit(client: SamplingClient) -> None:
    with pytest.raises(RequestError, match=r"context of vLLM of 64 tokens; .*raise the server's --max-model-len"):
        ask(client, [1, 40], max_tokens=63)


def test_its_errors_fail_their_requests(client: SamplingClient) -> None:
    with pytest.raises(SamplingError, match=r"vLLM server at http.* refused the request: HTTP 400: this is too long"):
        ask(client, [REFUSED, 1])
    with pytest.raises(RequestError, match="diverged"):
        ask(client, [NOT_A_NUMBER, 1])
    assert ask(client, [1, 40])[0].tokens == [41, 42, 43]


def test_one_that_loads_no_adapters_says_how(server: Server, service: ServiceClient, model: str) -> None:
    server.without_adapters = True
    with pytest.raises(ModelLoadError, match=r"was not loaded: HTTP 404.*VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"):
        service.create_sampling_client(base_model=model).result()


def test_its_death_is_named_and_a_new_one_at_its_place_is_used(
    client: SamplingClient, server: Server, caplog: pytest.LogCaptureFixture, likeliest: list[float]
) -> None:
    assert ask(client, [1, 40])[0].tokens == [41, 42, 43]
    server.die()
    with pytest.raises(SamplingError, match=rf"the vLLM server at {server.url} cannot be reached \(ConnectError"):
        ask(client, [1, 40])
    assert any("cannot be reached" in record.getMessage() for record in caplog.records if record.levelname == "ERROR")


def test_one_that_is_not_there(monkeypatch: pytest.MonkeyPatch, model: str, server: Server) -> None:
    server.die()
    with ServiceClient() as service, pytest.raises(ModelLoadError, match="cannot be reached"):
        service.create_sampling_client(base_model=model).result()


def test_other_weights(server: Server, service: ServiceClient, model: str) -> None:
    server.likeliest = [server.likeliest[0], server.likeliest[1] + 0.1, 0.0, 0.0]
    with pytest.raises(
        ModelLoadError, match=rf"the vLLM server at {server.url} gives token .* it serves other weights"
    ):
        service.create_sampling_client(base_model=model).result()


class TestItsKey:
    def test_every_request_carries_it(
        self, server: Server, service: ServiceClient, model: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        server.api_key = "a key"
        monkeypatch.setenv("TINKER_LOCAL_VLLM_API_KEY", "a key")
        training = service.create_lora_training_client(model, rank=4, seed=0).result()
        client = training.save_weights_and_get_sampling_client().result()
        assert ask(client, [3])[0].tokens == [4, 5, 6]
        assert server.told("/v1/load_lora_adapter")

    @pytest.mark.parametrize("key", ["", "another key"])
    def test_a_server_that_wants_another(
        self, key: str, server: Server, service: ServiceClient, model: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        server.api_key = "a key"
        monkeypatch.setenv("TINKER_LOCAL_VLLM_API_KEY", key)
        with pytest.raises(ModelLoadError, match=r"401.*set TINKER_LOCAL_VLLM_API_KEY to the key") as caught:
            service.create_sampling_client(base_model=model).result()
        assert "another key" not in str(caught.value)


def test_a_key_without_a_server_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_LOCAL_SAMPLER", "vllm")
    monkeypatch.setenv("TINKER_LOCAL_VLLM_API_KEY", "a key")
    with pytest.raises(RequestError, match="TINKER_LOCAL_VLLM_API_KEY is set without TINKER_LOCAL_VLLM_URL"):
        ServiceClient()
