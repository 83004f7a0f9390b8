"""What may take long is done by threads: every tenant waits for what the event loop does itself. Asked without a socket."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tinker
from pydantic import model_serializer

pytest.importorskip("fastapi", reason="the extra `server` is not installed")

from tests.server.stand_in import Before, before
from tinker_local_backend.futures import completed
from tinker_local_backend.rest_client import RestClient

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
