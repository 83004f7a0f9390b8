"""What a server does at its end and says of itself, without a process of its own."""

import asyncio
import json
import os
import socket
from collections.abc import Awaitable, Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from threading import Event
from typing import Any

import httpx
import pytest

pytest.importorskip("fastapi", reason="the extra `server` is not installed")

from tests.child import preloaded
from tests.waiting import HANG_SECONDS, loop_at_rest
from tinker_local_backend.errors import RequestError
from tinker_local_backend.server.access import Access, Tenant, read_keys
from tinker_local_backend.server.access_log import AccessLog
from tinker_local_backend.server.config import ServerConfig
from tinker_local_backend.server.engine_process import EngineProcess
from tinker_local_backend.server.gateway import Gateway
from tinker_local_backend.server.home_lock import LOCK_FILE, one_server
from tinker_local_backend.server.metrics import Metrics
from tinker_local_backend.server.run import drain
from tinker_local_backend.server.service import Service
from tinker_local_backend.server.sessions import Request, Session
from tinker_local_backend.wire.frames import Frame

LONG = 3600.0
"""A test that waits for it never ends."""


class Link:
    """An engine that never answers."""

    def __init__(self) -> None:
        self.died = asyncio.Event()
        self.adapter_room = 1 << 30

    def call(self, *arguments: Any) -> tuple[int, asyncio.Future[Frame]]:
        return 0, asyncio.get_running_loop().create_future()


class Draining:
    """A service with one session, and what its event loop complained of."""

    def __init__(self, home: Path, log: AccessLog | None = None, **keys: Any):
        config = ServerConfig(model="m", **{"shutdown_seconds": LONG, "fetch_seconds": LONG, **keys})
        self.service = Service(config, Link(), Metrics(), log or AccessLog(None), Access({}, home))  # pyright: ignore[reportArgumentType]
        self.tenant = Tenant("a", home)
        self.complaints: list[dict[str, Any]] = []

    async def session(self) -> Session:
        return await self.service.create_session(self.tenant, {}, None)

    def request(self, session: Session, ended: bool = False) -> Request:
        request = self.service.requests.new(session, {"op": "sample"})
        if ended:
            request.resolve(Frame())
        return request


def run(test: Callable[[Draining], Awaitable[None]], draining: Draining) -> None:
    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: draining.complaints.append(context))
        await test(draining)

    asyncio.run(main())
    assert draining.complaints == []


def test_it_goes_on_until_what_was_accepted_has_ended_and_was_fetched(tmp_path: Path) -> None:
    async def test(draining: Draining) -> None:
        session = await draining.session()
        before, later = draining.request(session, ended=True), draining.request(session)
        ending = asyncio.create_task(drain(draining.service))
        for step in (lambda: later.resolve(Frame()), later.fetch):
            await loop_at_rest()
            assert not ending.done() and draining.service.requests.closing
            step()
        await loop_at_rest()
        assert not ending.done()
        before.fetch()
        await ending

    run(test, Draining(tmp_path))


def test_nobody_waits_for_what_no_client_will_fetch(tmp_path: Path) -> None:
    async def test(draining: Draining) -> None:
        silent, closed, standing = [await draining.session() for _ in range(3)]
        for session in (silent, closed, standing):
            draining.request(session, ended=True)
        silent.seen -= draining.service.config.silent_seconds + 1
        standing.seen = float("inf")
        draining.service.end_session(closed, "it was closed")
        await drain(draining.service)

    run(test, Draining(tmp_path))


@pytest.mark.parametrize("keys", [{"shutdown_seconds": 0.0, "fetch_seconds": 0.0}, {}], ids=["time", "hurry"])
def test_what_does_not_end_fails_and_nothing_complains(tmp_path: Path, keys: dict[str, float]) -> None:
    async def test(draining: Draining) -> None:
        running = draining.request(await draining.session())
        if not keys:
            draining.service.stop_now.set()
        await drain(draining.service)
        assert running.reply is not None and "shut down before" in running.reply.fields["error"]

    run(test, Draining(tmp_path, None, **keys))


def test_health_tells_loading_serving_and_stopping_apart(tmp_path: Path) -> None:
    async def test(draining: Draining) -> None:
        gateway = Gateway(AccessLog(None))
        client = httpx.AsyncClient(transport=httpx.ASGITransport(app=gateway), base_url="http://localhost")

        async def told() -> tuple[str, list[int]]:
            answers = [await client.get(path) for path in ("/health", "/ready", "/api/v1/healthz", "/api/v1/audit")]
            return answers[0].json()["status"], [answer.status_code for answer in answers]

        assert await told() == ("loading", [200, 503, 503, 503])
        gateway.open(draining.service, Access({}, tmp_path))
        assert await told() == ("ok", [200, 200, 200, 400])
        draining.service.requests.closing = True
        assert await told() == ("stopping", [503, 503, 503, 400])
        draining.service.requests.closing = False
        draining.service.link.died.set()
        assert await told() == ("stopping", [503, 503, 503, 400])

    run(test, Draining(tmp_path))


def test_the_access_log_says_who_did_what_and_no_key(tmp_path: Path) -> None:
    file = tmp_path / "access.jsonl"
    log = AccessLog(str(file))

    async def test(draining: Draining) -> None:
        gateway = Gateway(log)
        headers = {"X-API-Key": "tml-secret", "Authorization": "Bearer tml-secret"}
        client = httpx.AsyncClient(transport=httpx.ASGITransport(app=gateway), base_url="http://local", headers=headers)
        await client.post("/early")
        gateway.open(draining.service, Access({"alice": "tml-secret"}, tmp_path))
        await client.get('/v1/a%0A"b?key=tml-secret')
        request = draining.request(await draining.session())
        log.ended(request, Frame({"tokens": 7}), 0.5)
        log.ended(request, Frame({"error": "tml-secret", "category": "user"}), 0.5)

    run(test, Draining(tmp_path, log))
    file.rename(tmp_path / "rotated")
    log.answered({"method": "GET", "path": "/later", "client": None}, 0, 0.0)
    log.close()
    assert json.loads(file.read_text())["path"] == "/later"
    text = (tmp_path / "rotated").read_text()
    early, refused, ended, failed = (json.loads(line) for line in text.splitlines())
    assert (early["tenant"], early["status"], early["method"]) == (None, 503, "POST")
    assert (refused["tenant"], refused["status"], refused["path"]) == ("alice", 404, '/v1/a\n"b')
    assert (ended["tenant"], ended["kind"], ended["outcome"], ended["tokens"]) == ("a", "sample", "ok", 7)
    assert failed["outcome"] == "user" and "secret" not in text
    with pytest.raises(RequestError, match="access_log='/nowhere/at/all' cannot be written"):
        AccessLog("/nowhere/at/all")


def test_a_home_has_one_server(tmp_path: Path) -> None:
    home = tmp_path / "home"
    told = rf"is in use by another server: process {os.getpid()} on .*, since 20"
    with one_server(home), pytest.raises(RequestError, match=told), one_server(home):
        pass
    (home / LOCK_FILE).write_text("what a dead process left")
    with one_server(home):
        pass
    (tmp_path / "file").write_text("")
    with pytest.raises(RequestError, match="cannot be written to"), one_server(tmp_path / "file"):
        pass


@pytest.mark.parametrize("mode", [0o604, 0o602, 0o644])
def test_a_keys_file_that_others_can_open_is_refused(tmp_path: Path, mode: int) -> None:
    file = tmp_path / "keys"
    file.write_text("alice=tml-abcdefgh\n")
    file.chmod(mode)
    with pytest.raises(RequestError, match=rf"open to every user .*mode {mode:o}.*chmod 600") as caught:
        read_keys(str(file), {})
    assert "abcdefgh" not in str(caught.value)
    file.chmod(0o640)
    assert read_keys(str(file), {}) == {"alice": "tml-abcdefgh"}


class Loading(EngineProcess):
    """Its models are never loaded."""

    def _load(self, name: str) -> dict[str, object]:
        Event().wait()
        raise AssertionError


def load(sock: socket.socket) -> None:
    Loading(sock).serve()


def test_an_engine_that_loads_ends_with_its_parent() -> None:
    ours, theirs = socket.socketpair()
    process: BaseProcess = preloaded().Process(target=load, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    ours.sendall(b"".join(Frame({"models": ["m"], "tokens": None}).encode()))
    ours.close()  # as the kernel does it for a process that is killed
    process.join(HANG_SECONDS)
    code = process.exitcode
    process.kill()
    assert code == 0
