"""What stands before every route, asked without a socket."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("fastapi", reason="the extra `server` is not installed")

from tests.server.test_room import Link
from tinker_local_backend.server.access import Access
from tinker_local_backend.server.app import make_app
from tinker_local_backend.server.config import ServerConfig
from tinker_local_backend.server.metrics import Metrics
from tinker_local_backend.server.service import Service

KEYS = {"alice": "tml-alice-secret", "bob": "tml-bob-secret"}


def asking(home: Path, keys: dict[str, str], ask: Callable[[httpx.AsyncClient], Awaitable[Any]], **config: Any) -> Any:
    """What `ask` gets from an app over an engine that makes models and nothing else."""

    async def main() -> Any:
        service = Service(ServerConfig(model="m", home=str(home), **config), Link(), Metrics())  # pyright: ignore[reportArgumentType]
        transport = httpx.ASGITransport(make_app(service, Access(keys, home)))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost:8000") as web:
            return await ask(web)

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:8000", 200),
        ("localhost", 200),
        ("[::1]:8000", 200),
        ("[::1]", 200),
        ("evil.example:8000", 403),
        ("127.0.0.1.evil.example", 403),
        ("192.168.1.2", 403),
        ("", 403),
    ],
)
def test_without_keys_only_names_of_this_machine_are_answered(tmp_path: Path, host: str, status: int) -> None:
    """A web page whose name was pointed at 127.0.0.1 gets nothing; with keys it would need one."""

    async def ask(web: httpx.AsyncClient) -> httpx.Response:
        return await web.post("/api/v1/client/config", json={}, headers={"Host": host})

    assert asking(tmp_path, {}, ask).status_code == status
    assert asking(tmp_path, KEYS, ask).status_code == 401
