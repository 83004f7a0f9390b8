"""What stands in for the engine's process where only the process before it is tested."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, get_args

import httpx

from tests.server.serving import TINY_CHAT
from tinker_local_backend.engine.model.lora_spec import ExpertLayout
from tinker_local_backend.server.access import Access
from tinker_local_backend.server.access_log import AccessLog
from tinker_local_backend.server.chat_format import ChatFormats
from tinker_local_backend.server.config import ServerConfig
from tinker_local_backend.server.gateway import Gateway
from tinker_local_backend.server.link import ServedModel
from tinker_local_backend.server.metrics import Metrics
from tinker_local_backend.server.service import Service
from tinker_local_backend.wire.frames import Frame

MADE = {"base_model": "m", "rank": 1, "arch": "a", "execution": {}}


class Link:
    """An engine that makes every model at once, and never ends anything else, unless `answers`."""

    def __init__(self, answers: bool = True, context_length: int = 1000) -> None:
        self.dropped: list[str] = []
        self.frames: list[Frame] = []
        self.waiting: list[asyncio.Future[Frame]] = []
        self._answers = answers
        widths = {"attn": 1 << 10, "mlp": 0, "unembed": 0}
        self.models = [
            ServedModel(TINY_CHAT, "qwen3", context_length, [0], {}, dict.fromkeys(get_args(ExpertLayout), widths))
        ]
        self.adapter_room = 1 << 30

    def call(self, fields: dict[str, Any], body: bytes = b"", on_progress: Any = None) -> tuple[int, asyncio.Future]:
        self.dropped += fields.get("model_ids", [])
        self.frames.append(Frame(fields, body))
        reply: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()
        if self._answers or fields["op"] == "create_model":
            reply.set_result(Frame(MADE))
        else:
            self.waiting.append(reply)
        return len(self.frames), reply

    def cancel(self, number: int) -> None:
        pass


class Before:
    """A service over a stand-in, and what asks it without a socket."""

    def __init__(
        self, home: Path, keys: Mapping[str, str], link: Link, formats: ChatFormats | None = None, **config: Any
    ) -> None:
        self.link = link
        settings = ServerConfig(model=TINY_CHAT, home=str(home), **config)
        self.access = Access(keys, home)
        self.service = Service(settings, link, Metrics(), AccessLog(None), self.access, formats)  # pyright: ignore[reportArgumentType]
        self._app = Gateway(AccessLog(None))
        self._app.open(self.service, self.access)

    def client(self, key: str = "tml-anything") -> httpx.AsyncClient:
        return httpx.AsyncClient(
            transport=httpx.ASGITransport(self._app), base_url="http://localhost:8000", headers={"X-API-Key": key}
        )

    async def leave(self, path: str, body: bytes, key: str = "tml-anything") -> None:
        """Post a body of JSON and be gone before there is an answer."""
        messages = iter([{"type": "http.request", "body": body}, {"type": "http.disconnect"}])
        headers = {"host": "localhost:8000", "content-type": "application/json", "x-api-key": key}
        scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        }

        async def receive() -> dict[str, Any]:
            return next(messages)

        async def send(message: Any) -> None:
            pass

        await self._app(scope, receive, send)

    async def model(self, web: httpx.AsyncClient) -> str:
        session = (await web.post("/api/v1/create_session", json={})).json()["session_id"]
        asked = {"session_id": session, "model_seq_id": 0, "base_model": TINY_CHAT}
        model_id = (await web.post("/api/v1/create_model", json=asked)).json()["model_id"]
        await asyncio.sleep(0)  # without sockets nothing else would let the reply arrive
        return model_id

    async def sampler(self, web: httpx.AsyncClient) -> str:
        session = (await web.post("/api/v1/create_session", json={})).json()["session_id"]
        asked = {"session_id": session, "sampling_session_seq_id": 0, "base_model": TINY_CHAT}
        return (await web.post("/api/v1/create_sampling_session", json=asked)).json()["sampling_session_id"]


def before(
    home: Path,
    ask: Callable[[Before], Awaitable[Any]],
    keys: Mapping[str, str] | None = None,
    link: Link | None = None,
    **config: Any,
) -> Any:
    """What `ask` returns."""

    async def main() -> Any:
        return await ask(Before(home, keys or {}, link or Link(), **config))

    return asyncio.run(main())
