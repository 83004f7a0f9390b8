"""The process that owns the engine: reads frames from a socket, submits them in order, and answers each when it ends.

    python -m tinker_local_backend.server.engine_process FD

It exits when the socket closes, so it never outlives its parent.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn, get_args

from tinker_local_backend.engine.engine import Engine
from tinker_local_backend.engine.model.base_model import BaseModel
from tinker_local_backend.engine.model.lora_spec import ExpertLayout
from tinker_local_backend.engine.model.memory import room_for_adapters
from tinker_local_backend.engine.models import describe, load_model
from tinker_local_backend.environment import check_environment, default_device
from tinker_local_backend.errors import (
    CheckpointError,
    EngineClosedError,
    LocalBackendError,
    ModelLoadError,
    RequestError,
)
from tinker_local_backend.samplers.choice import make_sampler
from tinker_local_backend.server.operations import Operations
from tinker_local_backend.storage.files import CheckpointWriteError
from tinker_local_backend.wire.frames import Channel, Frame

logger = logging.getLogger(__name__)

_IMMEDIATE = "stats"
"""The operation that the reading thread runs itself, even while the engine's worker is busy. The worker runs all others, because
threads that parse and compute at the same time would contend for the GIL."""

_USER_ERRORS = (RequestError, ModelLoadError, CheckpointError)


class EngineProcess:
    """The reading loop. All operations but `_IMMEDIATE` start on the engine's worker, in order."""

    def __init__(self, sock: socket.socket):
        self._socket = sock
        self._channel = Channel(sock, "tinker-local-answers")
        self._engine = Engine(make_sampler=make_sampler, load_model=self._base_model)
        self._max_tokens: int | None = None
        """limit on a sequence, if lower than the model's context"""
        self._operations = Operations(self._engine, self._send)
        self._running: dict[int, Future[Any]] = {}

    def serve(self) -> None:
        """Run until the socket closes. The first frame has the models, which are loaded before it is answered, and a limit on
        sequences."""
        first = self._channel.receive()
        if first is None:
            return
        threading.Thread(target=self._end_with_the_parent, name="tinker-local-parent", daemon=True).start()
        try:
            check_environment()
            self._max_tokens = first.fields["tokens"]
            models = [self._load(name) for name in first.fields["models"]]
            ready = Frame({"models": models, "adapter_room": room_for_adapters(default_device())})
        except LocalBackendError as error:
            ready = Frame({"error": str(error)})
        self._channel.send(lambda: ready)
        while (frame := self._channel.receive()) is not None:
            if frame.fields["op"] == _IMMEDIATE:
                self._take(frame)
            else:
                posted = self._engine.post(partial(self._take, frame), counts=True)
                posted.add_done_callback(lambda closed: self._channel.send(_die))

    def _end_with_the_parent(self) -> None:
        """Watch the socket while models are loaded, which can take minutes. Returns at the next frame."""
        with suppress(OSError):
            if self._socket.recv(1, socket.MSG_PEEK):
                return
        os._exit(0)

    def _send(self, number: int, frame: Frame) -> None:
        self._channel.send(lambda: Frame({"id": number, **frame.fields}, frame.body))

    def _base_model(self, name: str) -> BaseModel:
        model = load_model(name)
        model.context_length = min(model.context_length, self._max_tokens or model.context_length)
        return model

    def _load(self, name: str) -> dict[str, object]:
        model = self._engine.submit("models", lambda: self._engine.load(name)).result()
        return {
            "name": name,
            "arch": model.config.model_type,
            "context_length": model.context_length,
            "eos_token_ids": sorted(model.eos_token_ids),
            "execution": describe(model),
            "lora_widths": {layout: model.targets.widths(layout) for layout in get_args(ExpertLayout)},
        }

    def _take(self, frame: Frame) -> None:
        if frame.fields["op"] == "cancel":
            running = self._running.get(frame.fields["target"])
            if running is not None:
                running.cancel()
            return
        number: int = frame.fields["id"]
        try:
            reply, encode = self._operations.run(frame)
            future = reply.future()
        except Exception as error:
            future, encode = Future(), Frame
            future.set_exception(error)
        self._running[number] = future
        future.add_done_callback(partial(self._end, number, encode))

    def _end(self, number: int, encode: Callable[[Any], Frame], done: Future[Any]) -> None:
        def answer() -> Frame:
            self._running.pop(number, None)
            try:
                frame = encode(done.result())
            except (Exception, CancelledError) as error:
                frame = Frame(_failure(error))
            return Frame({"id": number, **frame.fields}, frame.body)

        self._channel.send(answer)
        if not done.cancelled() and isinstance(done.exception(), EngineClosedError):
            self._channel.send(_die)


def _die() -> NoReturn:
    logger.error("the engine has stopped; ending its process")
    os._exit(1)


def _failure(error: BaseException) -> dict[str, str]:
    """The error for the client: in full if the client caused it; a fault of the server only by type."""
    if isinstance(error, CancelledError):
        return {"error": "the request was cancelled", "category": "user"}
    if isinstance(error, LocalBackendError):
        is_user = isinstance(error, _USER_ERRORS) and not isinstance(error, CheckpointWriteError)
        if str(error) != error.remote:
            logger.warning("a request failed: %s", error)
        return {"error": error.remote, "category": "user" if is_user else "server"}
    logger.error("an operation failed", exc_info=error)
    return {"error": f"internal error ({type(error).__name__}); the server's log has the details", "category": "server"}


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s engine %(levelname)s %(message)s")
    # Ctrl-C and a supervisor's SIGTERM reach both processes; the HTTP process decides when to end.
    for sign in (signal.SIGINT, signal.SIGTERM):
        signal.signal(sign, lambda *_: None)  # not SIG_IGN, which child processes would inherit
    EngineProcess(socket.socket(fileno=int(sys.argv[1]))).serve()
    os._exit(0)  # without waiting for operations whose results can no longer be sent


if __name__ == "__main__":
    main()
