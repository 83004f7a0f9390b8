"""A dead, wrong or silent server is named within 5 seconds, and so is its recovery."""

import asyncio
import http.server
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import tinker
from tinker.lib.base_url import resolve_base_url

from tests.child import ROOT, python_path
from tests.waiting import HANG_SECONDS, loop_until, start_serving, until
from tinker_cookbook import backends, server_watch
from tinker_cookbook.exceptions import ConfigurationError, ServerLostError
from tinker_cookbook.server_watch import ServerWatch, ask, server_address


class Health(http.server.BaseHTTPRequestHandler):
    """Answers GETs with `code` and `body`, and counts them."""

    code, body, asked = 200, b'{"status": "ok"}', 0

    def do_GET(self) -> None:
        type(self).asked += 1
        self.send_response(self.code)
        self.end_headers()
        self.wfile.write(self.body)

    def log_message(self, format: str, *args: Any) -> None: ...


@pytest.fixture
def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


@pytest.fixture
def serve() -> Iterator[Callable[..., http.server.HTTPServer]]:
    """A server of these answers, on this port."""
    servers = []

    def start(code: int = 200, body: bytes = Health.body, port: int = 0) -> http.server.HTTPServer:
        handler = type("Handler", (Health,), {"code": code, "body": body, "asked": 0})
        server = http.server.ThreadingHTTPServer(("127.0.0.1", port), handler)
        start_serving(server)
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


class Clock(threading.local):
    """A watch's own: time passes only while it sleeps, and an answer may take as long as it likes."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        time.sleep(0.001)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_watch, "time", Clock())
    monkeypatch.setattr(server_watch, "ANSWER_SECONDS", HANG_SECONDS)


def address_of(server: http.server.HTTPServer) -> str:
    return f"http://127.0.0.1:{server.server_port}"


def handler_of(server: http.server.HTTPServer) -> Any:
    return vars(server)["RequestHandlerClass"]


def until_asked(server: http.server.HTTPServer, times: int = 3) -> None:
    """So often from now on: what followed from the earlier answers has happened."""
    before = handler_of(server).asked
    until(lambda: handler_of(server).asked >= before + times)


class TestAsk:
    def test_a_server_that_is_well(self, serve: Callable[..., http.server.HTTPServer]) -> None:
        assert ask(address_of(serve())) == (None, True)

    def test_one_that_guards_its_health_route_answers(self, serve: Callable[..., http.server.HTTPServer]) -> None:
        assert ask(address_of(serve(401))) == (None, True)

    @pytest.mark.parametrize(
        ("code", "body", "problem", "answered"),
        [
            (404, b"", "HTTP 404", True),
            (200, b"<html>", "does not answer with JSON", True),
            (503, b"", "HTTP 503", False),
        ],
    )
    def test_wrong_answers(
        self, serve: Callable[..., http.server.HTTPServer], code: int, body: bytes, problem: str, answered: bool
    ) -> None:
        found = ask(address_of(serve(code, body)))
        assert found[0] is not None and problem in found[0] and found[1] is answered

    def test_nobody_there(self, free_port: int) -> None:
        problem, answered = ask(f"http://127.0.0.1:{free_port}")
        assert problem is not None and "refused" in problem and not answered

    def test_one_that_says_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(server_watch, "ANSWER_SECONDS", 0.2)
        with socket.socket() as silent:
            silent.bind(("127.0.0.1", 0))
            silent.listen()
            problem, answered = ask(f"http://127.0.0.1:{silent.getsockname()[1]}")
        assert problem is not None and "timed out" in problem and not answered


def test_the_address_is_the_one_that_the_sdk_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TINKER_BASE_URL", raising=False)
    assert server_address("http://mine/") == ("http://mine", "base_url=http://mine/")
    assert server_address(None)[1].startswith("the hosted service (https://")
    monkeypatch.setenv("TINKER_BASE_URL", "http://other")
    assert server_address(None) == ("http://other", "TINKER_BASE_URL=http://other")
    for given in ("http://mine/", None):
        assert server_address(given)[0] == resolve_base_url(given)


def is_watched() -> bool:
    return any(thread.name == "server-watch" for thread in threading.enumerate())


async def forever() -> None:
    await asyncio.Event().wait()


class Client:
    """Stands for the SDK's."""

    _session_holder: Any = None


class TestWatch:
    def test_silence_is_named_repeated_and_its_end_told(
        self,
        clock: None,
        free_port: int,
        serve: Callable[..., http.server.HTTPServer],
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        client = Client()
        ServerWatch(f"http://127.0.0.1:{free_port}", "base_url=mine", client)
        until(lambda: len(caplog.messages) >= 3)
        first, second, third = caplog.messages[:3]
        assert first.startswith("base_url=mine does not answer (ConnectionRefusedError")
        assert "asked 1 times in 0 s" in first
        assert "asked 6 times in 10 s" in second and "asked 16 times in 30 s" in third
        serve(port=free_port)
        until(lambda: "base_url=mine answers again after" in caplog.messages[-1])
        del client

    def test_a_wrong_server_is_named_and_one_that_was_right_may_answer_what_it_likes(
        self, clock: None, serve: Callable[..., http.server.HTTPServer], caplog: pytest.LogCaptureFixture
    ) -> None:
        client, server = Client(), serve(404)
        ServerWatch(address_of(server), "base_url=mine", client)
        until(lambda: caplog.messages)
        assert caplog.messages[0].startswith("base_url=mine is not a server of the Tinker protocol (HTTP 404")
        handler_of(server).code = 200
        until(lambda: "answers again" in caplog.messages[-1])
        handler_of(server).code = 404
        count = len(caplog.messages)
        until_asked(server, 10)
        assert len(caplog.messages) == count
        del client

    def test_it_ends_with_the_client_and_its_sessions(
        self, clock: None, monkeypatch: pytest.MonkeyPatch, serve: Callable[..., http.server.HTTPServer]
    ) -> None:
        until(lambda: not is_watched())
        monkeypatch.setattr(tinker, "ServiceClient", lambda base_url, display_name: Client())
        server = serve()
        client: Any = backends.create_service_client("tinker", address_of(server))
        session = client._session_holder = Client()
        until_asked(server)
        del client
        until_asked(server)
        assert is_watched(), "a training client may still use the session"
        del session
        until(lambda: not is_watched())

    def test_the_sdk_keeps_its_sessions_where_the_watch_looks_for_them(self) -> None:
        client = tinker.ServiceClient(base_url="http://127.0.0.1:9", api_key="tml-test")
        assert vars(client)["_session_holder"] is None and vars(client)["_rest_holder"] is None


class TestTheEndOfARun:
    """With a server that is gone."""

    def run(self, limit: float, body: Callable[[], Any], address: str) -> None:
        client = Client()
        ServerWatch(address, "base_url=mine", client)

        async def main() -> None:
            async with server_watch.ended_when_lost(client, limit):
                await body()

        asyncio.run(main())

    def test_what_is_said_of_the_silence_has_the_limit_that_ends_it(
        self, clock: None, free_port: int, caplog: pytest.LogCaptureFixture
    ) -> None:
        def is_told() -> bool:
            return any("until server_timeout_seconds=1e+06 have passed" in message for message in caplog.messages)

        self.run(1e6, lambda: loop_until(is_told), f"http://127.0.0.1:{free_port}")
        assert "5 minutes" not in caplog.text

    def test_it_is_ended_and_told_why(self, clock: None, free_port: int, caplog: pytest.LogCaptureFixture) -> None:
        with pytest.raises(ServerLostError, match=r"^base_url=mine has not answered for server_timeout_seconds=7\.5"):
            self.run(7.5, forever, f"http://127.0.0.1:{free_port}")
        assert "base_url=mine: gave up after 8 s without an answer" in caplog.messages

    def test_what_it_asks_on_its_way_out_is_cancelled_too(
        self, clock: None, free_port: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(server_watch, "CANCEL_AGAIN_SECONDS", 0.01)
        seen: list[str] = []

        async def stubborn() -> None:
            try:
                await forever()
            finally:
                try:
                    await forever()  # saving, say
                finally:
                    seen.append("left")

        with pytest.raises(ServerLostError):
            self.run(0.1, stubborn, f"http://127.0.0.1:{free_port}")
        assert seen == ["left"]

    def test_errors_of_its_own_and_short_silences_are_none_of_its_business(
        self, clock: None, serve: Callable[..., http.server.HTTPServer]
    ) -> None:
        server = serve()
        # Three of eight answers in a row: four seconds of silence, again and again.
        handler_of(server).code = property(lambda answer: 503 if type(answer).asked % 8 < 3 else 200)

        async def fail() -> None:
            await loop_until(lambda: handler_of(server).asked > 40)
            raise ValueError("own")

        with pytest.raises(ValueError, match="own"):
            self.run(5.0, fail, address_of(server))

    def test_clients_that_nobody_watches(self) -> None:
        async def main() -> int:
            async with server_watch.ended_when_lost(object(), 0.0):
                return 1

        assert asyncio.run(main()) == 1


class TestKey:
    def test_one_that_is_not_taken_is_told_at_once(
        self, serve: Callable[..., http.server.HTTPServer], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("TINKER_API_KEY", "tml-wrong")
        address = address_of(serve(401))
        with pytest.raises(ConfigurationError, match=rf"^base_url={address} rejects the key in TINKER_API_KEY"):
            backends.create_service_client("tinker", address)

    def test_other_answers_and_silence_say_nothing_of_the_key(
        self, serve: Callable[..., http.server.HTTPServer], free_port: int
    ) -> None:
        for address in (address_of(serve()), address_of(serve(404)), f"http://127.0.0.1:{free_port}"):
            server_watch.check_key(address, "base_url", "tml-any")


PROGRAM = """
import sys
import tinker
from tinker_cookbook import backends
service = backends.create_service_client("tinker", sys.argv[1])
service.create_lora_training_client(base_model="m", rank=4)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dead", "wrong"])
def test_with_the_sdk_itself_it_is_told_while_that_retries(
    kind: str, free_port: int, serve: Callable[..., http.server.HTTPServer]
) -> None:
    """Which it does for minutes, and without a word."""
    address = f"http://127.0.0.1:{free_port}" if kind == "dead" else address_of(serve(404))
    env = {**os.environ, "PYTHONPATH": python_path(), "TINKER_API_KEY": "tml-test"}
    env.pop("TINKER_BASE_URL", None)
    child = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, address], env=env, cwd=ROOT, stderr=subprocess.PIPE, text=True
    )
    assert child.stderr is not None
    try:
        line = child.stderr.readline()
        assert child.poll() is None, "it is still trying"
    finally:
        child.kill()
        child.wait()
        child.stderr.close()
    assert f"base_url={address}" in line
    assert ("refused" if kind == "dead" else "404") in line
    assert server_watch.INTERVAL_SECONDS + server_watch.ANSWER_SECONDS < 5, "which is how long it takes at most"
