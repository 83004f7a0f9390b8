"""Serve this process's sampling clients to other processes that unpickled them.

The first client that is pickled opens a Unix socket in a folder that only this user can open. A snapshot lives as long as this
process keeps its SamplingClient, or another process keeps a copy from which it has sampled.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import os
import shutil
import socket
import tempfile
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import tinker

from tinker_local_backend.errors import RequestError
from tinker_local_backend.futures import EngineFuture
from tinker_local_backend.sequence import LocalSequence
from tinker_local_backend.wire import codec
from tinker_local_backend.wire.frames import Channel, Frame


class Sampler(Protocol):
    """The methods of a SamplingClient that other processes call."""

    @property
    def sample(self) -> Callable[..., EngineFuture[tinker.types.SampleResponse]]: ...

    def compute_logprobs(
        self, prompt: tinker.ModelInput, prompt_logprobs_last_n: int | None
    ) -> EngineFuture[list[float | None]]: ...

    @property
    def compute_constrained_logprobs(self) -> Callable[..., EngineFuture[list[float]]]: ...


@dataclass(frozen=True)
class SamplerHandle:
    """Names a sampling client in a process of this machine. It is not a secret: only this user can open its address."""

    address: str
    process: int
    sampler_id: str
    base_model: str

    def encode(self) -> str:
        return base64.urlsafe_b64encode(json.dumps(dataclasses.asdict(self)).encode()).decode()

    @classmethod
    def decode(cls, text: str) -> SamplerHandle:
        """Raises RequestError for text that `encode` did not make."""
        try:
            return cls(**json.loads(base64.urlsafe_b64decode(text)))
        except (ValueError, TypeError):
            raise RequestError(f"{text[:80]!r} is not a sampler handle; get_sampler_handle() makes one") from None


class SamplerHost:
    """The socket of this process, and weak references to the clients that are shared over it."""

    def __init__(self) -> None:
        self.process = os.getpid()
        folder = tempfile.mkdtemp(prefix="tinker-samplers-")  # readable only by this user
        weakref.finalize(self, _remove, folder, self.process)
        self.address = str(Path(folder) / "socket")
        self.clients: weakref.WeakValueDictionary[str, Sampler] = weakref.WeakValueDictionary()
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(self.address)
        except OSError as error:
            raise RequestError(f"cannot bind {self.address}: {error}; set TMPDIR to a shorter path") from None
        listener.listen()
        threading.Thread(target=self._accept, args=(listener,), name="tinker-samplers", daemon=True).start()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            connection, _ = listener.accept()
            peer = _Peer(Channel(connection, "tinker-samplers-answers"), self.clients)
            threading.Thread(target=peer.serve, name="tinker-samplers-requests", daemon=True).start()


class _Peer:
    """The connection to another process."""

    def __init__(self, channel: Channel, clients: weakref.WeakValueDictionary[str, Sampler]):
        self._channel = channel
        self._clients = clients
        self._copies: dict[str, Sampler] = {}
        """by a name that the peer chose, until the peer drops them or ends"""
        self._running: dict[int, Future[Any]] = {}

    def serve(self) -> None:
        while (frame := self._channel.receive()) is not None:
            fields = frame.fields
            if fields["op"] == "drop":
                self._copies.pop(fields["holder"], None)
            elif fields["op"] == "cancel":
                if (running := self._running.get(fields["id"])) is not None:
                    running.cancel()
            else:
                self._begin(fields)
        for running in list(self._running.values()):
            running.cancel()
        self._channel.close()

    def _begin(self, fields: dict[str, Any]) -> None:
        number: int = fields["id"]
        try:
            future = self._ask(fields).future()
        except Exception as error:
            future = Future()
            future.set_exception(error)
        self._running[number] = future
        future.add_done_callback(lambda done: self._channel.send(lambda: self._answer(number, done)))

    def _ask(self, fields: dict[str, Any]) -> EngineFuture[Any]:
        client = self._copies.get(fields["holder"]) or self._clients.get(fields["sampler"])
        if client is None:
            raise RequestError(
                f"the sampling client {fields['sampler']} no longer exists: process {os.getpid()}, which made it, dropped it; "
                "keep the SamplingClient there for as long as other processes sample from it"
            )
        self._copies[fields["holder"]] = client
        arguments = codec.sample_arguments(fields["request"])
        if fields["op"] == "compute_logprobs":
            return client.compute_logprobs(arguments["prompt"], arguments["prompt_logprobs_last_n"])
        if fields["op"] == "compute_constrained_logprobs":
            params, completion = arguments["sampling_params"], fields["request"]["completion"]
            return client.compute_constrained_logprobs(
                arguments["prompt"], completion, arguments["constraint"], params.temperature, params.stop
            )
        return client.sample(**arguments)

    def _answer(self, number: int, done: Future[Any]) -> Frame:
        self._running.pop(number, None)
        try:
            result = done.result()
            if isinstance(result, list):
                return Frame({"id": number, "logprobs": result})
            fields = {
                "sequence_ids": [sequence.sequence_id for sequence in result.sequences],
                "local": [_local_fields(sequence) for sequence in result.sequences],
            }
            return Frame({"id": number, **fields}, codec.encode_sample(result))
        except (Exception, CancelledError) as error:
            return Frame({"id": number, "error": str(error), "type": type(error).__name__})


def _local_fields(sequence: LocalSequence) -> list[Any]:
    """The fields that the SDK's encoding lacks: constrained logprobs and weight versions."""
    versions = sequence.weight_versions_np
    return [sequence.constrained_logprobs, None if versions is None else versions.tolist()]


def _remove(folder: str, process: int) -> None:
    if os.getpid() == process:  # not when a forked child exits
        shutil.rmtree(folder, ignore_errors=True)


_host: SamplerHost | None = None
_lock = threading.Lock()


def share(sampler_id: str, base_model: str, client: Sampler) -> SamplerHandle:
    """Share a client with other processes. Raises RequestError if no socket can be made."""
    global _host
    with _lock:
        _host = _host or SamplerHost()
    _host.clients[sampler_id] = client
    return SamplerHandle(_host.address, _host.process, sampler_id, base_model)


def find(handle: SamplerHandle) -> Sampler | None:
    """The client that a handle names, if it belongs to this process."""
    if _host is None or handle.address != _host.address or os.getpid() != _host.process:
        return None
    return _host.clients.get(handle.sampler_id)
