"""What may take long is done by threads: every tenant waits for what the event loop does itself. Asked without a socket."""

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tinker
import zstandard
from pydantic import BaseModel, ValidationError, model_serializer

pytest.importorskip("fastapi", reason="the extra `server` is not installed")

from tests.server.serving import TINY_CHAT, forward_backward_body
from tests.server.stand_in import Before, before
from tinker_local_backend.futures import completed
from tinker_local_backend.rest_client import RestClient
from tinker_local_backend.server import errors, routes_openai
from tinker_local_backend.server.openai_schemas import ChatBody, CompletionBody, GenerateBody
from tinker_local_backend.server.schemas import CreateSession, Sample

ON_THREADS: list[bool] = []
"""of each listing that was written, whether that was off the event loop"""


class Watched(tinker.types.ListSessionsResponse):
    @model_serializer(mode="wrap")
    def write(self, handler: Callable[[Any], Any]) -> Any:
        ON_THREADS.append(threading.current_thread() is not threading.main_thread())
        return handler(self)


def test_listings_are_written_by_a_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not once more by the framework, on the event loop, where ten thousand rows hold it for half a second."""
    ON_THREADS.clear()
    monkeypatch.setattr(RestClient, "list_sessions", lambda *_: completed(lambda: Watched(sessions=["a", "b"])))
    monkeypatch.setattr("fastapi.routing.serialize_response", None)

    async def ask(served: Before) -> Any:
        async with served.client() as web:
            return (await web.get("/api/v1/sessions")).json()

    assert before(tmp_path, ask) == {"sessions": ["a", "b"]}
    assert ON_THREADS == [True]


MANY = 20_000


@pytest.mark.parametrize(
    ("body", "wrong"),
    [
        (ChatBody, {"model": "m", "messages": [{}] * MANY}),
        (ChatBody, {"model": "m", "messages": [{"role": "user", "content": [{}] * MANY}]}),
        (ChatBody, {"model": "m", "messages": [{"role": "user", "tool_calls": [{}] * MANY}]}),
        (ChatBody, {"model": "m", "messages": [{"role": "user"}], "tools": [{}] * MANY}),
        (ChatBody, {"model": "m", "messages": [], "chat_template_kwargs": {str(n): "x" for n in range(MANY)}}),
        (ChatBody, {"model": "m", "messages": [], "stop": [0] * MANY, "stop_token_ids": ["x"] * MANY}),
        (CompletionBody, {"model": "m", "prompt": [{}] * MANY}),
        (CompletionBody, {"model": "m", "prompt": [["x"] * MANY] * 2}),
        (GenerateBody, {"token_ids": ["x"] * MANY, "sampling_params": {"stop": [0] * MANY}}),
        (CreateSession, {"user_metadata": {str(n): n for n in range(MANY)}}),
        (Sample, {"prompt": {"chunks": [1] * MANY}, "sampling_params": {"stop": ["x", *[1] * MANY]}}),
        (Sample, {"target_prompt_logprobs": {"data": ["x"] * MANY, "dtype": "int64", "shape": ["x"] * MANY}}),
    ],
)
def test_a_body_has_few_errors_however_many_things_are_wrong(body: type[BaseModel], wrong: dict[str, Any]) -> None:
    """Each of them takes microseconds to be told, and a small body that is compressed has room for millions."""
    with pytest.raises(ValidationError) as found:
        body.model_validate_json(json.dumps(wrong))
    assert found.value.error_count() <= 16


def test_errors_are_told_by_the_thread_that_parsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []
    told = errors._problems

    def noted(*args: Any) -> str:
        threads.append(threading.current_thread())
        return told(*args)

    monkeypatch.setattr(errors, "_problems", noted)

    async def ask(served: Before) -> list[tuple[int, str]]:
        async with served.client() as web:
            large = {"model": "m", "messages": [{"role": "user", "content": "x" * 100_000}], "n": 0}
            chat = await web.post("/v1/chat/completions", json=large)
            sample = await web.post("/api/v1/asample", json={"prompt": {"chunks": []}, "x": "x" * 100_000})
        return [
            (chat.status_code, chat.json()["error"]["message"]),
            (sample.status_code, sample.json()["detail"]),
        ]

    assert before(tmp_path, ask) == [
        (400, "n: Input should be greater than or equal to 1"),
        (422, "sampling_params: Field required"),
    ]
    assert len(threads) == 2 and threading.main_thread() not in threads


def test_tools_are_measured_by_a_thread_and_not_written_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []
    measure = routes_openai._characters

    def noted(*args: Any) -> int:
        threads.append(threading.current_thread())
        return measure(*args)

    monkeypatch.setattr(routes_openai, "_characters", noted)
    tool = {"type": "function", "function": {"name": "f", "parameters": [[]] * 20_000}}
    chat = {"model": TINY_CHAT, "messages": [{"role": "user", "content": "Hi"}], "tools": [tool]}

    async def ask(served: Before) -> str:
        async with served.client() as web:
            return (await web.post("/v1/chat/completions", json=chat)).json()["error"]["message"]

    assert "at most 8192 are allowed (max_text_kib)" in before(tmp_path, ask, max_text_kib=8)
    assert len(threads) == 1 and threads[0] is not threading.main_thread()


def test_a_body_is_decompressed_and_read_in_one_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two turns it would wait in its full length, of which nobody keeps count."""
    turns: list[Any] = []

    async def ask(served: Before) -> int:
        run = served.service.parsing.run

        async def noted(tenant: Any, call: Callable[[], Any]) -> Any:
            turns.append(call)
            return await run(tenant, call)

        monkeypatch.setattr(served.service.parsing, "run", noted)
        async with served.client() as web:
            body = zstandard.ZstdCompressor().compress(forward_backward_body(await served.model(web), 1, 20_000))
            headers = {"Content-Type": "application/x-protobuf", "Content-Encoding": "zstd"}
            return (await web.post("/api/v1/forward_backward", content=body, headers=headers)).status_code

    assert before(tmp_path, ask) == 200
    assert len(turns) == 1
