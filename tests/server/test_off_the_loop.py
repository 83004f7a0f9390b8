"""What may take long is done by threads: every tenant waits for what the event loop does itself. Asked without a socket."""

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tinker
from pydantic import BaseModel, ValidationError, model_serializer

pytest.importorskip("fastapi", reason="the extra `server` is not installed")

from tests.server.stand_in import Before, before
from tinker_local_backend.futures import completed
from tinker_local_backend.rest_client import RestClient
from tinker_local_backend.server import errors
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
