"""Parts of the server that need no process."""

import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra `server` is not installed")

from tinker_local_backend import shipped
from tinker_local_backend.engine.sampling.sampler import SamplerStats
from tinker_local_backend.server.access import Tenant, Terms
from tinker_local_backend.server.config import ServerConfig
from tinker_local_backend.server.errors import Refused
from tinker_local_backend.server.link import served
from tinker_local_backend.server.metrics import LATEST, Metrics
from tinker_local_backend.server.run import _bind
from tinker_local_backend.wire.frames import Frame

OPERATOR = Tenant("operator", Path("home"), Terms(operator=True))


def test_answers_are_not_held_back_by_nagles_algorithm() -> None:
    """asyncio turns it off for sockets that name their protocol. With it every answer in two pieces takes 40 ms."""
    with _bind(ServerConfig(model="any", port=0)) as sock:
        assert sock.proto == socket.IPPROTO_TCP


def test_quantiles_are_those_of_the_latest_operations() -> None:
    metrics = Metrics()

    def end(seconds: float) -> None:
        request = SimpleNamespace(kind="sample", tenant=OPERATOR)
        metrics.ended(request, Frame(), seconds)  # pyright: ignore[reportArgumentType]

    for seconds in range(1, 101):
        end(float(seconds))
    text = metrics.text(OPERATOR).decode()
    assert 'tinker_latest_seconds{kind="sample",quantile="0.5"} 51.0' in text
    assert 'tinker_latest_seconds{kind="sample",quantile="0.99"} 100.0' in text
    for _ in range(LATEST):
        end(0.25)
    assert 'tinker_latest_seconds{kind="sample",quantile="0.99"} 0.25' in metrics.text(OPERATOR).decode()


def test_what_the_engine_says_of_itself_is_shown() -> None:
    metrics = Metrics()
    stats = SamplerStats(3, 2, 10, 6, 4, 1, 0, 9.0, 0.5, 7.0, states=2, states_idle=5, state_bytes=1 << 20)
    metrics.engine.samplers = {"m": stats._asdict()}
    metrics.engine.waits = {"optim_step": {"begun": 1, "waiting": 0, "longest_seconds": 2.5}}
    lines = metrics.text(OPERATOR).decode().splitlines()
    assert 'tinker_sampling_wait_seconds{model="m",quantile="0.99"} 7.0' in lines
    assert 'tinker_sampling_wait_seconds{model="m",quantile="1"} 9.0' in lines
    assert 'tinker_sampler_waiting{model="m"} 3.0' in lines and 'tinker_sampler_pages_read{model="m"} 6.0' in lines
    for line in ('states{model="m"} 2.0', 'states_idle{model="m"} 5.0', 'state_bytes{model="m"} 1.048576e+06'):
        assert f"tinker_sampler_{line}" in lines
    assert 'tinker_operation_longest_wait_seconds{kind="optim_step"} 2.5' in lines


def test_a_shipped_model_goes_by_its_short_name() -> None:
    folder = str(shipped.EXAMPLE_DATA / "tiny_chat")
    models: list[Any] = [SimpleNamespace(name=folder, context_length=256)]
    assert served(models, "tiny_chat") is served(models, folder) is models[0]
    with pytest.raises(Refused, match="base model 'tiny_debate' is not served here; this server has /"):
        served(models, "tiny_debate")
