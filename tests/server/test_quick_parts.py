"""Parts of the server that need no process."""

import socket
from types import SimpleNamespace

import pytest

pytest.importorskip("fastapi", reason="the extra `server` is not installed")

from tinker_local_backend.server.config import ServerConfig
from tinker_local_backend.server.frames import Frame
from tinker_local_backend.server.metrics import LATEST, Metrics
from tinker_local_backend.server.run import _bind


def test_answers_are_not_held_back_by_nagles_algorithm() -> None:
    """asyncio turns it off for sockets that name their protocol. With it every answer in two pieces takes 40 ms."""
    with _bind(ServerConfig(model="any", port=0)) as sock:
        assert sock.proto == socket.IPPROTO_TCP


def test_quantiles_are_those_of_the_latest_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = Metrics()
    monkeypatch.setattr("time.monotonic", lambda: 0.0)

    def end(seconds: float) -> None:
        request = SimpleNamespace(kind="sample", created=-seconds)
        metrics.ended(request, Frame())  # pyright: ignore[reportArgumentType]

    for seconds in range(1, 101):
        end(float(seconds))
    text = metrics.text().decode()
    assert 'tinker_latest_seconds{kind="sample",quantile="0.5"} 51.0' in text
    assert 'tinker_latest_seconds{kind="sample",quantile="0.99"} 100.0' in text
    for _ in range(LATEST):
        end(0.25)
    assert 'tinker_latest_seconds{kind="sample",quantile="0.99"} 0.25' in metrics.text().decode()
