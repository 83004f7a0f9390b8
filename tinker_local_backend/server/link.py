"""The HTTP process's connection to the engine's process: start it, call it, detect its end."""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from tinker_local_backend.engine.model.lora_spec import ExpertLayout
from tinker_local_backend.engine.model.refusals import base_model_of, check_context
from tinker_local_backend.errors import EngineClosedError, ModelLoadError
from tinker_local_backend.server.errors import Refused
from tinker_local_backend.shipped import shipped_model
from tinker_local_backend.wire import frames
from tinker_local_backend.wire.frames import Frame

CLOSE_SECONDS = 10.0
"""How long the engine's process may take to end after its socket was closed; then it is killed."""


@dataclass(frozen=True)
class ServedModel:
    """A base model that the engine has loaded."""

    name: str
    arch: str
    context_length: int
    eos_token_ids: list[int]
    """each ends the model's turn"""
    execution: dict[str, str]
    """see engine.models.describe"""
    lora_widths: dict[ExpertLayout, dict[str, int]] = field(default_factory=dict)
    """by expert layout: parameters of a rank-1 adapter on attention (attn), MLPs (mlp) and the head (unembed)"""


def served(models: Sequence[ServedModel], name: str, status: int = 400) -> ServedModel:
    """The base model with this name, or a shipped one's short name. Raises Refused with `status` if it is not served."""
    known = {model.name: model for model in models}
    base = base_model_of(name)
    model = known.get(base) or known.get(shipped_model(base))
    if model is None:
        raise Refused(status, f"base model {name!r} is not served here; this server has {', '.join(known)}")
    check_context(name, model.context_length)
    return model


class EngineLink:
    """Calls the engine's process. Belongs to one event loop."""

    def __init__(self, process: subprocess.Popen[bytes], reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._process = process
        self._reader = reader
        self._writer = writer
        self._numbers = itertools.count(1)
        self._calls: dict[int, asyncio.Future[Frame]] = {}
        self._on_progress: dict[int, Callable[[Frame], None]] = {}
        self._reading: asyncio.Task[None] | None = None
        self.models: list[ServedModel] = []
        self.adapter_room = 0
        """bytes for adapters on the engine's device"""
        self.died = asyncio.Event()

    @classmethod
    async def start(cls, models: Sequence[str], max_sequence_tokens: int | None = None) -> EngineLink:
        """Start the process and load the models. Raises ModelLoadError with the process's error."""
        ours, theirs = socket.socketpair()
        # The child must import this same package, even if it is not installed.
        root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        command = [sys.executable, "-m", "tinker_local_backend.server.engine_process", str(theirs.fileno())]
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env={**os.environ, "PYTHONPATH": path})
        theirs.close()
        link = cls(process, *await asyncio.open_connection(sock=ours))
        link._write(Frame({"models": list(models), "tokens": max_sequence_tokens}))
        try:
            ready = await frames.receive_async(link._reader)
        except asyncio.CancelledError:
            await link.close()
            raise
        if ready is None or "error" in ready.fields:
            await link.close()
            raise ModelLoadError(ready.fields["error"] if ready else "the engine ended while loading; see above")
        link.models = [ServedModel(**model) for model in ready.fields["models"]]
        link.adapter_room = ready.fields["adapter_room"]
        link._reading = asyncio.create_task(link._read())
        return link

    def call(
        self, fields: Mapping[str, Any], body: bytes = b"", on_progress: Callable[[Frame], None] | None = None
    ) -> tuple[int, asyncio.Future[Frame]]:
        """Submit an operation. Returns its number, for `cancel`, and a future of its reply, which never raises."""
        number = next(self._numbers)
        reply: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()
        if self.died.is_set():
            reply.set_result(_dead())
            return number, reply
        self._calls[number] = reply
        if on_progress is not None:
            self._on_progress[number] = on_progress
        self._write(Frame({"id": number, **fields}, body))
        return number, reply

    def cancel(self, number: int) -> None:
        """Cancel a sampling request. Its reply is then an error, unless it has already ended."""
        if number in self._calls:
            self._write(Frame({"op": "cancel", "target": number}))

    def _write(self, frame: Frame) -> None:
        with suppress(ConnectionError):
            self._writer.writelines(frame.encode())

    async def _read(self) -> None:
        while (frame := await frames.receive_async(self._reader)) is not None:
            number = frame.fields["id"]
            if "progress" in frame.fields:
                if number in self._on_progress:
                    self._on_progress[number](frame)
                continue
            self._on_progress.pop(number, None)
            reply = self._calls.pop(number, None)
            if reply is not None and not reply.done():
                reply.set_result(frame)
        self.died.set()
        calls, self._calls = self._calls, {}
        for reply in calls.values():
            if not reply.done():
                reply.set_result(_dead())

    async def close(self) -> None:
        """End the process; kill it after CLOSE_SECONDS."""
        self._writer.close()
        try:
            await asyncio.to_thread(self._process.wait, CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
        if self._reading is not None:
            await self._reading


def _dead() -> Frame:
    error = EngineClosedError("the engine's process has ended; restart the server and continue from a checkpoint")
    return Frame({"error": str(error), "category": "server"})
