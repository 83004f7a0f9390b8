"""A server that is wrong in one way: a proxy before a right one, which alters requests or replies."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx

from tests.waiting import HANG_SECONDS, start_serving

PREFIX = "/api/v1"
_PASSED_ON = ("content-type", "accept", "x-api-key", "x-idempotency-key", "content-encoding")


@dataclass
class Exchange:
    """A request that the proxy passes on, and its reply."""

    method: str
    path: str
    """below /api/v1, without the query"""
    body: bytes
    status: int = 0
    reply: bytes = b""
    content_type: str = ""
    location: str | None = None
    kind: str = ""
    """of the operation whose result is retrieved: its route, such as asample"""

    def alter_body(self, change: Callable[[dict[str, Any]], object]) -> None:
        """Change the JSON object that is sent."""
        sent = json.loads(self.body)
        change(sent)
        self.body = json.dumps(sent).encode()

    def alter_reply(self, change: Callable[[dict[str, Any]], object]) -> None:
        """Change the JSON object of the reply."""
        answer = json.loads(self.reply)
        change(answer)
        self.reply = json.dumps(answer).encode()

    def alter_message(self, message: Any, change: Callable[[Any], object]) -> None:
        """Change the reply, a protobuf message of this type."""
        parsed = message.FromString(self.reply)
        change(parsed)
        self.reply = parsed.SerializeToString()


@dataclass(frozen=True)
class Fault:
    """A way of being wrong. `going` sees each request before it is sent, `coming` each reply."""

    going: Callable[[Exchange], object] = lambda exchange: None
    coming: Callable[[Exchange], object] = lambda exchange: None
    swallows: Callable[[Exchange], bool] = lambda exchange: False
    """answered with 204, and never sent on"""


@dataclass
class _State:
    url: str
    fault: Fault
    kinds: dict[str, str] = field(default_factory=dict)
    """request id -> route that was asked"""


@contextmanager
def altered(url: str, fault: Fault) -> Iterator[str]:
    """The address of a server like that at `url`, but for the fault."""
    state = _State(url, fault)

    class Handler(_Handler):
        shared = state

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = start_serving(server)
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    shared: _State
    protocol_version = "HTTP/1.1"

    def _answer(self) -> None:
        fault, state = self.shared.fault, self.shared
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path, _, query = self.path.partition("?")
        exchange = Exchange(self.command, path.removeprefix(PREFIX), body)
        if fault.swallows(exchange):
            exchange.status = 204
        else:
            fault.going(exchange)
            headers = {name: value for name in _PASSED_ON if (value := self.headers.get(name)) is not None}
            response = httpx.request(
                self.command, f"{state.url}{path}", params=query, content=exchange.body, headers=headers,
                timeout=HANG_SECONDS,
            )  # fmt: skip
            exchange.status, exchange.reply = response.status_code, response.content
            exchange.content_type = response.headers.get("content-type", "")
            exchange.location = response.headers.get("location")
            self._follow(exchange)
            fault.coming(exchange)
        self.send_response(exchange.status)
        if exchange.content_type:
            self.send_header("Content-Type", exchange.content_type)
        if exchange.location:
            self.send_header("Location", exchange.location)
        if exchange.status != 204:
            self.send_header("Content-Length", str(len(exchange.reply)))
        self.end_headers()
        self.wfile.write(exchange.reply)

    def _follow(self, exchange: Exchange) -> None:
        """Note which operation a request id stands for, and say it of its result."""
        if exchange.path == "/retrieve_future":
            exchange.kind = self.shared.kinds.get(json.loads(exchange.body)["request_id"], "")
        elif exchange.content_type.startswith("application/json") and exchange.status == 200:
            answer = json.loads(exchange.reply)
            if isinstance(answer, dict) and "request_id" in answer:
                self.shared.kinds[answer["request_id"]] = exchange.path.strip("/")

    do_GET = do_POST = do_PUT = do_DELETE = _answer

    def log_message(self, format: str, *args: object) -> None: ...
