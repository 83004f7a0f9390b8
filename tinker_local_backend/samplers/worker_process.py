"""A vLLM in a process and an environment of its own: vllm_worker.py, spoken to in lines of JSON over pipes."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import torch

from tinker_local_backend.engine.model.base_model import BaseModel
from tinker_local_backend.samplers.adapters import AdapterFiles
from tinker_local_backend.samplers.transport import Died, Event, Failed, OnEvent, Order, Part, Ready, Tokens
from tinker_local_backend.samplers.vllm_settings import VllmSettings

SCRIPT = Path(__file__).with_name("vllm_worker.py")

RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""of adapters, that vLLM can be started for; a smaller one fits"""

END_SECONDS = 10.0
"""How long a process whose input has ended may take to end itself."""

_OUR_VARIABLES = ("PYTHON", "TINKER_")
"""How variables begin that are ours, and would only confuse the other environment."""


def largest_rank(rank: int) -> int:
    """What vLLM is started for, for adapters up to `rank`; for one that is too large, that: vLLM's error says so."""
    return next((size for size in RANKS if size >= rank), rank)


def engine_arguments(model: BaseModel, settings: VllmSettings, rank: int) -> dict[str, Any]:
    """Of vLLM's engine, as far as they depend on ours."""
    return {
        "model": model.name,
        "dtype": str(model.dtype).removeprefix("torch."),
        "max_model_len": settings.max_model_len or model.context_length,
        "max_loras": settings.slots + 1,  # see AdapterShelf
        "max_lora_rank": largest_rank(rank),
        "gpu_memory_utilization": settings.memory_share,
        "tensor_parallel_size": settings.tensor_parallel_size,
        "enforce_eager": settings.enforce_eager,
    }


def _environment(device: torch.device) -> dict[str, str]:
    settings = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in the worker itself
        "VLLM_USE_V2_MODEL_RUNNER": "0",  # vllm_sampling.py takes the place of the first one's sampler
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
    if device.type == "cpu":
        settings["TORCH_COMPILE_DISABLE"] = "1"  # compiling needs a C++ compiler, and gains nothing with adapters
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(_OUR_VARIABLES)}
    return settings | inherited


class WorkerProcess:
    """One run of the script. It ends when this process does, however that ends.

    Args:
        command: of the process.
        arguments: the first line that it gets.
    """

    def __init__(
        self,
        command: Sequence[str],
        arguments: Mapping[str, Any],
        on_event: OnEvent,
        environment: Mapping[str, str] | None = None,
    ):
        self._on_event = on_event
        self._closed = False
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  (closed with the process)
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=environment,
            process_group=0,  # Ctrl-C and a supervisor's SIGTERM are ours to answer: what is under way may end first
        )
        self._lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        # Pipes hold little; whoever writes into a full one waits for the process, and that must not be the engine.
        threading.Thread(target=self._write, name="tinker-local-vllm-write", daemon=True).start()
        threading.Thread(target=self._read, name="tinker-local-vllm-read", daemon=True).start()
        self._send(arguments)

    @classmethod
    def start_vllm(cls, model: BaseModel, settings: VllmSettings, rank: int, on_event: OnEvent) -> WorkerProcess:
        """vLLM on the engine's model, for adapters up to this rank."""
        # -P: `import vllm` must not find a file of this folder.
        command = [settings.python, "-P", str(SCRIPT)]
        return cls(command, engine_arguments(model, settings, rank), on_event, _environment(model.device))

    @property
    def pid(self) -> int:
        return self._process.pid

    def start(self, orders: Sequence[Order]) -> None:
        for order in orders:
            self._send(
                {
                    "op": "add",
                    "id": str(order.number),
                    "prompt": order.prompt,
                    "seed": order.seed,
                    "temperature": order.temperature,
                    "top_k": order.top_k,
                    "top_p": order.top_p,
                    "min_p": order.min_p,
                    "max_tokens": order.max_tokens,
                    "stop": order.stop,
                    "topk": order.topk,
                    "adapter": _triple(order.adapter),
                    "salt": order.salt,
                }
            )

    def cancel(self, numbers: Sequence[int]) -> None:
        self._send({"op": "abort", "ids": [str(number) for number in numbers]})

    def unload(self, adapter: AdapterFiles) -> None:
        self._send({"op": "unload", "adapter": adapter.number})

    def close(self) -> None:
        self._closed = True
        self._lines.put(None)
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _send(self, message: Mapping[str, Any]) -> None:
        self._lines.put(json.dumps(message).encode() + b"\n")

    def _write(self) -> None:
        stdin = self._process.stdin
        assert stdin is not None
        with suppress(OSError):  # it has died; the reader sees that too
            while (line := self._lines.get()) is not None:
                stdin.write(line)
                if self._lines.empty():
                    stdin.flush()
        with suppress(OSError):
            stdin.close()

    def _read(self) -> None:
        stdout = self._process.stdout
        assert stdout is not None
        fatal = None
        for line in stdout:
            try:
                message = json.loads(line)
                event = None if "fatal" in message else _event(message)
            except (LookupError, TypeError, ValueError) as error:
                fatal = f"its answer {line[:200]!r} is not understood ({type(error).__name__}: {error})"
                self._process.kill()
                break
            if event is None:
                fatal = message["fatal"]
            elif not self._closed:
                self._on_event(event)
        code = self._process.wait()
        stdout.close()
        if not self._closed:
            self._on_event(Died(f"the vLLM worker (process {self.pid}) {_how_it_ended(code)}: {fatal or self._last()}"))
        self._log.close()

    def _last(self) -> str:
        """The last line of its log."""
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it wrote nothing"


def _how_it_ended(code: int) -> str:
    if code >= 0:
        return f"ended with code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = str(-code)
    return f"was ended by signal {name}"


def _triple(adapter: AdapterFiles | None) -> tuple[int, str, str] | None:
    return None if adapter is None else (adapter.number, adapter.name, str(adapter.folder))


def _event(message: Mapping[str, Any]) -> Event:
    if "ready" in message:
        return Ready(message["ready"]["version"], message["ready"]["max_model_len"])
    if "failed" in message:
        return Failed(int(message["failed"]), message["error"])
    return Tokens([Part(int(row[0]), *row[1:]) for row in message["tokens"]])
