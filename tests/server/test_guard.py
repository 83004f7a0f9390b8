"""What stands before every route, asked without a socket."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

pytest.importorskip("fastapi", reason="the extra `server` is not installed")

from tests.server.serving import TENANTS
from tests.server.stand_in import Before, before


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

    async def ask(served: Before) -> int:
        async with served.client() as web:
            return (await web.post("/api/v1/client/config", json={}, headers={"Host": host})).status_code

    assert before(tmp_path, ask) == status
    assert before(tmp_path, ask, TENANTS) == 401


def test_a_tenant_cannot_keep_all_connections_busy(tmp_path: Path) -> None:
    """With requests whose bodies never end, as health checks would notice."""

    async def ask(served: Before) -> list[int]:
        ended = asyncio.Event()

        async def slow() -> AsyncIterator[bytes]:
            yield b"{"
            await ended.wait()

        async with served.client(TENANTS["alice"]) as alice, served.client(TENANTS["bob"]) as bob:
            headers = {"Content-Type": "application/json"}
            hung = [
                asyncio.create_task(alice.post("/api/v1/create_session", content=slow(), headers=headers))
                for _ in range(3)
            ]
            while served.service.memory.total < 3:
                await asyncio.sleep(0)
            statuses = [(await web.post("/api/v1/client/config", json={})).status_code for web in (alice, bob)]
            ended.set()
            await asyncio.gather(*hung)
            return [*statuses, (await alice.post("/api/v1/client/config", json={})).status_code]

    assert before(tmp_path, ask, TENANTS, max_tenant_requests=3) == [429, 200, 200]


@pytest.mark.parametrize("kind", [None, "application/x-www-form-urlencoded", "text/plain;charset=UTF-8"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/api/v1/create_session", "/api/v1/forward_backward"])
def test_a_body_of_no_known_type_is_told_which_to_send(tmp_path: Path, path: str, kind: str | None) -> None:
    """As curl sends it without a header, and as a web page can send it from its visitor's browser."""

    async def ask(served: Before) -> httpx.Response:
        async with served.client() as web:
            return await web.post(path, content=b"{}", headers={"Content-Type": kind} if kind else {})

    reply = before(tmp_path, ask)
    assert reply.status_code == 415 and "Content-Type: application/" in reply.text
