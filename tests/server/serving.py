"""A server in a process of its own, as a user starts it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import httpx
import numpy as np
from tinker.proto import tinker_public_pb2 as pb

from tests.child import python_path
from tests.waiting import HANG_SECONDS

TINY_CHAT = str(Path(__file__).resolve().parents[2] / "example_data" / "tiny_chat")
KEY = "tml-for-tests"
TENANTS = {"tester": KEY, "alice": "tml-alice-secret", "bob": "tml-bob-secret"}
"""Who may ask the server that tests share, and with which keys."""


class Serving:
    """`python -m tinker_local_backend.server` on a free port. Use `with`, or `start` and `stop`.

    Args:
        tenants: name -> API key; None: a server without keys.
        own_group: make its processes a group of their own, as supervisors and terminals do.
    """

    def __init__(
        self,
        home: Path,
        environment: Mapping[str, str] | None = None,
        tenants: Mapping[str, str] | None = None,
        own_group: bool = False,
        **keys: Any,
    ):
        self.home = home
        self._own_group = own_group
        if tenants:
            given = ",".join(f"{name}={key}{' operator' if key == KEY else ''}" for name, key in tenants.items())
            environment = {**(environment or {}), "TINKER_LOCAL_API_KEYS": given}
        keys = {"model": TINY_CHAT, "port": 0, "home": home, **keys}
        self._command = [sys.executable, "-m", "tinker_local_backend.server"]
        self._command += [f"{key}={value}" for key, value in keys.items() if value is not None]
        self._environment = {**os.environ, "PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1", **(environment or {})}
        self.lines: list[str] = []
        self.url = ""
        self.listening = threading.Event()

    def start(self) -> Self:
        ready = self.begin()
        assert ready.wait(HANG_SECONDS) and self.url, "".join(self.lines)
        return self

    def begin(self) -> threading.Event:
        """Start it without waiting for its models. The event is set when they are loaded, or it has ended."""
        self.process = subprocess.Popen(
            self._command,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            process_group=0 if self._own_group else None,
        )
        ready = threading.Event()
        threading.Thread(target=self._read, args=(ready,), daemon=True).start()
        return ready

    def tenant_home(self, name: str) -> Path:
        return self.home / "tenants" / name

    def _read(self, ready: threading.Event) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as output:
            for line in output:
                self.lines.append(line)
                if found := re.search(r"TINKER_BASE_URL=(\S+)|(http\S+)/ready", line):
                    self.url = found[1] or found[2]
                    self.listening.set()
                if "TINKER_API_KEY" in line:
                    ready.set()
        ready.set()

    def stop(self, sign: signal.Signals = signal.SIGTERM) -> int:
        """The exit code."""
        if self.process.poll() is None:
            self.process.send_signal(sign)
        return self.process.wait(HANG_SECONDS)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *exception: object) -> None:
        self.stop()


class Wire:
    """Requests as the SDK sends them, one by one, for what the SDK itself would never send.

    Methods return (status, JSON object or bytes).
    """

    def __init__(self, url: str, key: str = KEY):
        self._client = httpx.Client(base_url=f"{url}/api/v1", headers={"X-API-Key": key}, timeout=HANG_SECONDS)

    def ask(self, method: str, path: str, **options: Any) -> tuple[int, Any]:
        response = self._client.request(method, path, **options)
        if response.content and response.headers.get("content-type", "").startswith("application/json"):
            return response.status_code, response.json()
        return response.status_code, response.content

    def post(self, route: str, /, **body: Any) -> tuple[int, Any]:
        return self.ask("POST", route, json=body)

    def session(self) -> str:
        status, reply = self.post("/create_session", tags=[], sdk_version="0.38.0")
        assert status == 200, reply
        return reply["session_id"]

    def model(self, session: str, number: int = 0, **lora: Any) -> str:
        lora = {"rank": 2, "seed": 1, **lora}
        status, reply = self.post(
            "/create_model", session_id=session, model_seq_id=number, base_model=TINY_CHAT, lora_config=lora
        )
        assert status == 200, reply
        assert "error" not in self.result(reply)
        return reply["model_id"]

    def forward_backward(
        self, model: str, seq_id: int, length: int = 5, loss: str = "cross_entropy"
    ) -> tuple[int, Any]:
        return self.ask(
            "POST",
            "/forward_backward",
            content=forward_backward_body(model, seq_id, length, loss),
            headers={"Content-Type": "application/x-protobuf"},
        )

    def optim_step(self, model: str, seq_id: int, learning_rate: float = 1e-3) -> tuple[int, Any]:
        return self.post("/optim_step", model_id=model, seq_id=seq_id, adam_params={"learning_rate": learning_rate})

    def sampler(self, session: str, number: int = 0, **of: Any) -> str:
        of = of or {"base_model": TINY_CHAT}
        status, reply = self.post("/create_sampling_session", session_id=session, sampling_session_seq_id=number, **of)
        assert status == 200, reply
        return reply["sampling_session_id"]

    def sample(self, sampler: str, seq_id: int = 0, max_tokens: int = 3, **params: Any) -> tuple[int, Any]:
        return self.post(
            "/asample",
            sampling_session_id=sampler,
            seq_id=seq_id,
            prompt={"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]},
            sampling_params={"max_tokens": max_tokens, "stop": [], **params},
        )

    def result(self, accepted: dict[str, Any]) -> Any:
        """The result of an accepted request: JSON, or bytes of a protobuf message."""
        while True:
            status, reply = self.post("/retrieve_future", request_id=accepted["request_id"])
            if status != 408:
                assert status == 200, reply
                return reply


def forward_backward_body(model: str, seq_id: int, length: int = 5, loss: str = "cross_entropy") -> bytes:
    message = pb.ForwardBackwardRequest(model_id=model, seq_id=seq_id, loss_fn=loss)
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = np.arange(length, dtype=np.int32).tobytes()
    for name, array, dtype in (
        ("target_tokens", np.arange(length, dtype=np.int64), pb.DTYPE_INT64),
        ("weights", np.ones(length, dtype=np.float32), pb.DTYPE_FLOAT32),
    ):
        datum.loss_fn_inputs[name].CopyFrom(pb.Tensor(dense=array.tobytes(), dtype=dtype, shape=[length]))
    return message.SerializeToString()
