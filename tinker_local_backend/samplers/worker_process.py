"""The transport to a vLLM process in a separate environment: vllm_worker.py, over pipes, in lines of JSON."""

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
from tinker_local_backend.errors import ModelLoadError
from tinker_local_backend.samplers.adapters import AdapterFiles, expert_option
from tinker_local_backend.samplers.transport import Accepts, Delta, Died, Event, Failed, OnEvent, Ready, Request
from tinker_local_backend.samplers.vllm_settings import VllmSettings

SCRIPT = Path(__file__).with_name("vllm_worker.py")

RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Largest adapter ranks that vLLM can be started for. Smaller ranks fit too."""

FITTING = -1
"""The max_model_len with which vLLM chooses the longest context that fits into its share and reports it in `Ready`."""

END_SECONDS = 10.0
"""How long a process may take to exit after the end of its input."""

_OUR_VARIABLES = ("PYTHON", "TINKER_")
"""Prefixes of variables that must not be passed on to vLLM's environment."""


def largest_rank(rank: int) -> int:
    """The max_lora_rank for adapters up to `rank`. One that is too large is returned as is, and vLLM reports it."""
    return next((size for size in RANKS if size >= rank), rank)


def engine_arguments(model: BaseModel, settings: VllmSettings, accepts: Accepts) -> dict[str, Any]:
    """The arguments of vLLM's engine that depend on the model and the settings."""
    option = expert_option(accepts.experts)
    return {
        "model": model.name,
        "dtype": str(model.dtype).removeprefix("torch."),
        "max_model_len": settings.max_model_len or (FITTING if model.device.type == "cuda" else model.context_length),
        "max_loras": settings.slots + 1,  # see LoadedAdapters
        "max_lora_rank": largest_rank(accepts.rank),
        "gpu_memory_utilization": settings.memory_share,
        "tensor_parallel_size": settings.tensor_parallel_size,
        "enforce_eager": settings.enforce_eager,
        **({"enable_sleep_mode": True} if settings.sleep else {}),
        **({option: True} if option else {}),
    }


def refuse_experts_on_cpu(model: BaseModel) -> None:
    """Raise ModelLoadError for routed experts on a CPU: with adapters enabled vLLM has only Triton kernels for them."""
    if model.experts and model.device.type == "cpu":
        raise ModelLoadError(
            f"model {model.name!r} cannot be sampled with vLLM on a CPU: it has routed experts, which vLLM computes with "
            "Triton's GPU kernels if adapters are enabled; use the engine's own sampler "
            "(TINKER_LOCAL_SAMPLER=transformers), or a GPU"
        )


def _environment(device: torch.device) -> dict[str, str]:
    settings = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # run the engine in the worker process
        "VLLM_USE_V2_MODEL_RUNNER": "0",  # vllm_sampling.py replaces the sampler of the first version
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
    if device.type == "cpu":
        settings["TORCH_COMPILE_DISABLE"] = "1"  # compiling needs a C++ compiler, and gains nothing with adapters
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(_OUR_VARIABLES)}
    return settings | inherited


class WorkerProcess:
    """A running worker. It ends when this process ends, for any reason.

    Args:
        command: starts the process.
        arguments: the first line of its input.
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
        self._slept: queue.SimpleQueue[bool] = queue.SimpleQueue()
        """the worker's answers to `sleep`, and False when it ends"""
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  (closed with the process)
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=environment,
            process_group=0,  # this process handles Ctrl-C and SIGTERM: running requests may finish first
        )
        self._lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        # A write to a full pipe blocks, so the engine's thread must not write.
        threading.Thread(target=self._write, name="tinker-local-vllm-write", daemon=True).start()
        threading.Thread(target=self._read, name="tinker-local-vllm-read", daemon=True).start()
        self._send(arguments)

    @classmethod
    def start_vllm(cls, model: BaseModel, settings: VllmSettings, accepts: Accepts, on_event: OnEvent) -> WorkerProcess:
        """Start vLLM with the engine's model, for these adapters. Raises ModelLoadError if vLLM cannot run the model."""
        refuse_experts_on_cpu(model)
        # -P: `import vllm` must not import a file of this folder.
        command = [settings.python, "-P", str(SCRIPT)]
        return cls(command, engine_arguments(model, settings, accepts), on_event, _environment(model.device))

    @property
    def pid(self) -> int:
        return self._process.pid

    def start(self, requests: Sequence[Request]) -> None:
        for request in requests:
            files = request.adapter
            adapter = files and (files.number, files.name, str(files.folder), files.is_3d)
            self._send({"op": "add", **vars(request), "adapter": adapter})

    def cancel(self, numbers: Sequence[int]) -> None:
        self._send({"op": "abort", "numbers": numbers})

    def unload(self, adapter: AdapterFiles) -> None:
        self._send({"op": "unload", "adapter": adapter.number})

    def sleep(self) -> bool:
        self._send({"op": "sleep"})
        return self._slept.get()

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
        with suppress(OSError):  # the process has died, which the reader reports
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
                if "asleep" in message:
                    self._slept.put(message["asleep"])
                    continue
                event = None if "fatal" in message else _event(message)
            except (LookupError, TypeError, ValueError) as error:
                fatal = f"its answer {line[:200]!r} is invalid ({type(error).__name__}: {error})"
                self._process.kill()
                break
            if event is None:
                fatal = message["fatal"]
            elif not self._closed:
                self._on_event(event)
        code = self._process.wait()
        self._slept.put(False)
        stdout.close()
        if not self._closed:
            self._on_event(
                Died(f"the vLLM worker (process {self.pid}) {_how_it_ended(code)}: {fatal or self._last_log_line()}")
            )
        self._log.close()

    def _last_log_line(self) -> str:
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


def _event(message: Mapping[str, Any]) -> Event:
    if "ready" in message:
        return Ready(message["ready"]["version"], message["ready"]["max_model_len"])
    if "failed" in message:
        return Failed(message["failed"], message["error"])
    return [Delta(*row) for row in message["tokens"]]
