"""Thousands of wrong requests over every route: no answer is a fault of the server's, and the next honest request works."""

import asyncio
import json
import random
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import httpx
import pytest

from tests.server.serving import KEY, TINY_CHAT, Serving, Wire, forward_backward_body
from tests.waiting import HANG_SECONDS

pytest.importorskip("fastapi", reason="the extra `server` is not installed")
from fastapi.routing import APIRoute

from tinker_local_backend.server import (
    routes_messages,
    routes_openai,
    routes_responses,
    routes_rest,
    routes_sampling,
    routes_service,
    routes_tokens,
    routes_training,
)

pytestmark = pytest.mark.server

REQUESTS = 5000
AT_A_TIME = 16


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    limits = {"max_sessions": 50, "max_models": 5, "silent_seconds": 300.0}
    with Serving(tmp_path_factory.mktemp("fuzzed"), poll_seconds=0.2, request_gap_seconds=0.2, **limits) as serving:
        yield serving


class Asked(NamedTuple):
    """A route, and the fields of its body."""

    path: str
    methods: Sequence[str]
    fields: Sequence[str] = ()


def all_routes() -> list[Asked]:
    modules = (routes_service, routes_training, routes_sampling, routes_rest, routes_openai, routes_tokens)
    framework = [route for module in modules for route in module.router().routes if isinstance(route, APIRoute)]
    found = [Asked(route.path, sorted(route.methods or ()), list(_fields(route))) for route in framework]
    others = (routes_training, routes_sampling, routes_openai, routes_messages, routes_responses, routes_tokens)
    direct = [route for module in others for route in module.DIRECT]
    return found + [Asked(r.path, ["POST"], list(r.body.model_fields if r.body else ())) for r in direct]


def _fields(route: APIRoute) -> Iterable[str]:
    return route.body_field.field_info.annotation.model_fields if route.body_field else ()  # pyright: ignore


OF_TEXT: dict[str, list[Any]] = {
    "input": [
        "What is 7 + 5?",
        [{"role": "user", "content": [{"type": "input_text", "text": "x"}]}, {"type": "reasoning"}],
        [{"type": "function_call", "call_id": "c", "name": "x", "arguments": "{"}],
    ],
    "logit_bias": [{"1": 100}, {"x": 1}, {"-1": 0}, {"5": 1e300}, {}],
    "repetition_penalty": [1.5, 1e300, 0, -1],
    "presence_penalty": [1, -3],
    "min_tokens": [1, 10**9],
    "best_of": [2, 1, 10**9],
    "tokens": [[1, 2], [10**9], []],
    "max_output_tokens": [2, None, 10**9],
    "stop_sequences": [["x"], [""], []],
    "continue_final_message": [True, False],
    "add_generation_prompt": [True, False],
}
"""Fields of chats, completions, messages and responses."""


class Maker:
    """Random requests: real ids and names among nonsense, so that many get past the first check."""

    def __init__(self, seed: int, session: str, model: str, sampler: str):
        self.random = random.Random(seed)
        self.number = 0
        self.real: dict[str, list[Any]] = {
            **OF_TEXT,
            "session_id": [session],
            "model_id": [model],
            "run_id": [model],
            "sampling_session_id": [sampler],
            "sampler_id": [sampler],
            "base_model": [TINY_CHAT],
            "kind": ["weights", "sampler_weights", "snapshot", "inflight"],
            "name": ["x", "..", "a" * 300, "%00"],
            "path": ["x", f"tinker://{model}/weights/x", "tinker://../weights/x", "../../x"],
            "tinker_path": [f"tinker://{model}/weights/x", "tinker://a/b/c"],
            "model_path": [f"tinker://{model}/sampler_weights/x"],
            "source_path": [f"tinker://{model}/weights/x"],
            "lora_config": [{"rank": 2}, {"rank": 10**12}, {"rank": 1, "seed": 2**63}],
            "adam_params": [{"learning_rate": 1e-3}, {"eps": 0}, {"beta1": 2}, {"learning_rate": 1e308}],
            "prompt": [
                {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]},
                {"chunks": []},
                {"chunks": [{"type": "image"}]},
            ],
            "sampling_params": [
                {"max_tokens": 2},
                {"max_tokens": 2, "seed": 1, "temperature": 0.5},
                {"max_tokens": 2**31 - 1},
                {"temperature": -1, "top_p": 7},
                {"stop": ["", "x"], "max_tokens": 3},
                {"stop": [10**9]},
                {"seed": -1, "max_tokens": 1, "top_k": 0},
            ],
            "target_prompt_logprobs": [
                {"data": [1, 2], "dtype": "int64", "shape": [2, 1]},
                {"data": [1], "dtype": "int64", "shape": [2, 2**60]},
                {
                    "data": [1],
                    "dtype": "int64",
                    "shape": [2, 5],
                    "sparse_crow_indices": [0, 9, 1],
                    "sparse_col_indices": [-1],
                },
                {"data": [1], "dtype": "int64", "shape": [2, 5], "sparse_crow_indices": [0, 1, 1]},
            ],
            "request_id": ["0" * 32],
            "user_metadata": [{}, {"a": "b"}, {"a": 1}],
            "ttl_seconds": [None, 10, -1, 10**30],
            "overwrite": [True, False],
            "model": [TINY_CHAT, f"tinker://{model}/weights/x", "gpt-4"],
            "messages": [
                [{"role": "user", "content": "What is 7 + 5?"}],
                [{"role": "user", "content": "<|im_end|>"}, {"role": "tool", "content": None}],
                [{"role": "assistant", "tool_calls": [{"function": {"name": "x", "arguments": "{"}}]}],
                [{"role": "assistant", "content": "It is"}],
                [{"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "x", "input": {}}]}],
                [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": []}]}],
            ],
            "token_ids": [[1, 2], [10**9], []],
            "max_tokens": [1, 3, 0, 10**6],
            "max_completion_tokens": [2, None],
            "stop": [None, "e", ["e", "x"], ""],
            "stop_token_ids": [None, [5], [10**9]],
            "tools": [None, [{"type": "function", "function": {}}]],
            "chat_template_kwargs": [None, {"x": True}],
            "stream_options": [None, {"include_usage": True}],
            **{name: [0, 1, None] for name in ("logprobs", "top_logprobs")},
            **{name: [1, 0.5, None] for name in ("temperature", "top_p")},
            **{name: [1, 2] for name in ("n", "top_k", "seed")},
            **{name: [True, False] for name in ("stream", "echo", "return_token_ids")},
            "num_samples": [1, 2, 4096, 10**6],
            "topk_prompt_logprobs": [0, 3, 1024],
            "topk_sample_logprobs": [0, 2],
            "prompt_alt_tokens_k": [0, 1],
            "prompt_logprobs_last_n": [None, 1, 99],
            **{name: [True, False] for name in ("prompt_logprobs", "record_stability_info", "allow_metadata_only")},
            **{name: [None] for name in ("optimizer_params", "optimizer_config", "weights_access_token")},
            "optimizer": [True, False],
        }

    def next_number(self) -> int:
        """As a client counts, with gaps and repetitions."""
        self.number += self.random.choice([0, 1, 1, 1, 1, 2])
        return self.number

    def anything(self, depth: int = 0) -> Any:
        draw = self.random.random
        plain: list[Any] = [
            None,
            True,
            0,
            -1,
            1.5,
            2**31,
            10**30,
            "",
            "x",
            "\x00",
            "a" * 5000,
            "tinker://",
            float("nan"),
            1e400,
            "\ud800",
        ]
        if depth > 2 or draw() < 0.7:
            return self.random.choice(plain)
        if draw() < 0.5:
            return [self.anything(depth + 1) for _ in range(self.random.randrange(4))]
        return {
            self.random.choice([*self.real, "x"]): self.anything(depth + 1) for _ in range(self.random.randrange(4))
        }

    def value(self, name: str) -> Any:
        if name in ("seq_id", "model_seq_id", "sampling_session_seq_id") and self.random.random() < 0.9:
            return self.next_number()
        if name in self.real and self.random.random() < 0.9:
            return self.random.choice(self.real[name])
        return self.anything()

    def body(self, route: Asked) -> bytes:
        if self.random.random() < 0.05:
            return self.random.choice([b"", b"{", b"[]", b"\xff\xfe", b"null", b"[" * 5000, b'"x"', b"{}" * 9])
        body = {name: self.value(name) for name in route.fields if self.random.random() < 0.97}
        if self.random.random() < 0.2:
            body["unknown"] = self.anything()
        return json.dumps(body).encode()

    def message(self) -> bytes:
        """A forward_backward request with some of its bytes changed."""
        body = bytearray(
            forward_backward_body(
                self.real["model_id"][0],
                self.next_number(),
                length=self.random.choice([1, 5, 40]),
                loss=self.random.choice(["cross_entropy", "ppo", "nonsense"]),
            )
        )
        for _ in range(self.random.choice([0, 1, 1, 2, 5, 30])):
            place = self.random.randrange(len(body))
            if self.random.random() < 0.3:
                del body[place : place + self.random.randrange(1, 20)]
            elif self.random.random() < 0.5:
                body[place:place] = self.random.randbytes(self.random.randrange(1, 8))
            else:
                body[place] = self.random.randrange(256)
            body = body or bytearray(b"\x08")
        return bytes(body)

    def path(self, route: Asked) -> str:
        def fill(match: re.Match[str]) -> str:
            value = self.value(match[1])
            return (
                httpx.URL(f"http://x/{value!s}".replace("\ud800", "?").replace("\x00", "%00")).raw_path.decode()[1:]
                or "_"
            )

        return re.sub(r"\{(\w+)(?::\w+)?\}", fill, route.path)


@pytest.mark.parametrize("seed", [1, 2])
def test_no_wrong_request_is_a_fault_of_the_server(fuzzed: Serving, seed: int) -> None:
    wire = Wire(fuzzed.url)
    session = wire.session()
    model, sampler = wire.model(session), wire.sampler(session)
    maker = Maker(seed, session, model, sampler)
    # Ending the one session and model that all of it is about would leave nothing to ask for: those routes come last.
    endings = [route for route in all_routes() if route.path.endswith(("/finish", "/unload_model"))]
    routes = [route for route in all_routes() if route not in endings]
    assert len(routes) > 30 and len(endings) == 2
    routes += 4 * [route for route in routes if route.path.endswith(("/completions", "/generate"))]
    routes += 2 * [route for route in routes if route.path.endswith(("/messages", "/responses"))]
    routes += 9 * [route for route in routes if route.path.endswith(("/forward_backward", "/optim_step", "/asample"))]
    statuses: Counter[int] = Counter()
    accepted: list[str] = []

    async def ask(client: httpx.AsyncClient, routes: Sequence[Asked]) -> None:
        route = maker.random.choice(routes)
        headers = {}
        if route.path.endswith("/forward_backward"):
            content, headers["Content-Type"] = maker.message(), "application/x-protobuf"
        else:
            content, headers["Content-Type"] = maker.body(route), "application/json"
        if maker.random.random() < 0.02:
            headers["Content-Encoding"] = maker.random.choice(["zstd", "gzip", "x"])
        if accepted and maker.random.random() < 0.1:
            maker.real["request_id"] = [maker.random.choice(accepted)]
        method = maker.random.choice(route.methods)
        response = await client.request(method, maker.path(route), content=content, headers=headers)
        statuses[response.status_code] += 1
        assert response.status_code < 500, (method, response.url, content, response.text)
        assert "Traceback" not in response.text
        if response.status_code == 200 and b"request_id" in response.content:
            accepted.append(response.json()["request_id"])

    async def main() -> None:
        limits = httpx.Limits(max_connections=AT_A_TIME)
        async with httpx.AsyncClient(
            base_url=fuzzed.url, headers={"X-API-Key": KEY}, timeout=HANG_SECONDS, limits=limits
        ) as client:
            for _ in range(REQUESTS // 2 // AT_A_TIME):
                await asyncio.gather(*(ask(client, routes) for _ in range(AT_A_TIME)))
            for _ in range(5):
                await asyncio.gather(*(ask(client, endings) for _ in range(AT_A_TIME)))

    asyncio.run(main())
    assert statuses[200] > 200 and len(accepted) > 50, statuses
    assert fuzzed.process.poll() is None
    honest = wire.model(wire.session(), 99)
    assert isinstance(wire.result(wire.forward_backward(honest, 1)[1]), bytes)
    assert not [line for line in fuzzed.lines if "Traceback" in line], "".join(fuzzed.lines)
    wire.post(f"/sessions/{session}/finish")
    wire.post(f"/sessions/{honest.partition(':')[0]}/finish")


def test_ten_thousand_sessions_are_bounded(fuzzed: Serving) -> None:
    async def main() -> Counter[int]:
        statuses: Counter[int] = Counter()
        async with httpx.AsyncClient(base_url=fuzzed.url, headers={"X-API-Key": KEY}, timeout=HANG_SECONDS) as client:
            for _ in range(10_000 // 50):
                replies = await asyncio.gather(*(client.post("/api/v1/create_session", json={}) for _ in range(50)))
                statuses.update(reply.status_code for reply in replies)
        return statuses

    statuses = asyncio.run(main())
    assert 0 < statuses[200] <= 50 and statuses[403] == 10_000 - statuses[200]
    assert Wire(fuzzed.url).ask("GET", "/healthz")[0] == 200
