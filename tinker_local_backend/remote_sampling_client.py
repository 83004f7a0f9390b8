"""The client that a pickled local SamplingClient becomes in another process: it sends requests to the engine's process."""

from __future__ import annotations

import dataclasses
import itertools
import os
import socket
import threading
import uuid
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, ClassVar

import numpy as np
import tinker
from tinker.proto.response_conv import deserialize_sample_response
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tinker_local_backend import errors, sampler_host
from tinker_local_backend.constraint import Constraint
from tinker_local_backend.futures import EngineFuture, as_coroutine, awaited, resolve
from tinker_local_backend.sampler_host import Sampler, SamplerHandle
from tinker_local_backend.sequence import LocalSequence
from tinker_local_backend.wire import codec
from tinker_local_backend.wire.frames import Channel, Frame

_Pending = dict[int, Callable[[Callable[[], Frame]], None]]
"""Pending calls by number. Each callback takes a function that returns the answer's frame or raises its error."""


def connect(handle: SamplerHandle) -> Sampler:
    """The client that the handle names: itself in the process that made it, elsewhere a remote one. Connects on first use."""
    return sampler_host.find(handle) or RemoteSamplingClient(handle)


class RemoteSamplingClient:
    """A frozen snapshot whose engine runs in another process of this machine. It can be pickled again.

    The snapshot lives until the process that made it drops its SamplingClient and all processes that sampled drop their copies.
    A request's errors are raised by its future. EngineClosedError (the other process has ended) may also be raised by the call.
    """

    def __init__(self, handle: SamplerHandle):
        self._handle = handle
        self._link: _Link | None = None
        self._holder = uuid.uuid4().hex

    def sample(
        self,
        prompt: tinker.ModelInput,
        num_samples: int,
        sampling_params: tinker.SamplingParams,
        include_prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
        topk_sample_logprobs: int = 0,
        target_prompt_logprobs: tinker.TensorData | None = None,
        prompt_alt_tokens_k: int = 0,
        prompt_logprobs_last_n: int | None = None,
        *,
        constraint: Constraint | None = None,
    ) -> EngineFuture[tinker.types.SampleResponse]:
        """As SamplingClient.sample, whose `on_progress` works only in the engine's process."""
        request = codec.sample_request(
            prompt,
            num_samples,
            sampling_params,
            include_prompt_logprobs,
            topk_prompt_logprobs,
            topk_sample_logprobs,
            target_prompt_logprobs,
            prompt_alt_tokens_k,
            prompt_logprobs_last_n,
            constraint,
        )
        return self._ask("sample", request, _sampled)

    sample_async = awaited(sample)

    def compute_logprobs(
        self, prompt: tinker.ModelInput, prompt_logprobs_last_n: int | None = None
    ) -> EngineFuture[list[float | None]]:
        """As SamplingClient.compute_logprobs."""
        request = codec.sample_request(
            prompt, 1, tinker.SamplingParams(), prompt_logprobs_last_n=prompt_logprobs_last_n
        )
        return self._ask("compute_logprobs", request, lambda frame: frame.fields["logprobs"])

    compute_logprobs_async = awaited(compute_logprobs)

    def compute_constrained_logprobs(
        self,
        prompt: tinker.ModelInput,
        completion: Sequence[int],
        constraint: Constraint,
        temperature: float = 1.0,
        stop: str | Sequence[str | int] | None = None,
    ) -> EngineFuture[list[float]]:
        """As SamplingClient.compute_constrained_logprobs."""
        params = tinker.SamplingParams.model_construct(temperature=temperature, stop=stop)
        request = codec.sample_request(prompt, 1, params, constraint=constraint)
        request["completion"] = [int(token) for token in completion]
        return self._ask("compute_constrained_logprobs", request, lambda frame: frame.fields["logprobs"])

    compute_constrained_logprobs_async = awaited(compute_constrained_logprobs)

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        return AutoTokenizer.from_pretrained(self._handle.base_model)

    def get_base_model(self) -> str:
        return self._handle.base_model

    get_base_model_async = as_coroutine(get_base_model)

    def get_sampler_handle(self) -> str:
        """As SamplingClient.get_sampler_handle."""
        return self._handle.encode()

    def __reduce__(self) -> tuple[Any, ...]:
        return connect, (self._handle,)

    def _ask(self, op: str, request: dict[str, Any], convert: Callable[[Frame], Any]) -> EngineFuture[Any]:
        if self._link is None or self._link.is_closed or self._link.process != os.getpid():
            self._link = _Link.to(self._handle)
            weakref.finalize(self, self._link.drop, self._holder).atexit = False
        fields = {"op": op, "sampler": self._handle.sampler_id, "holder": self._holder, "request": request}
        return EngineFuture(self._link.call(fields, convert), cancellable=True)


class _Link:
    """The connection from this process to an engine's process. All clients share it; it closes with the last of them."""

    _open: ClassVar[weakref.WeakValueDictionary[tuple[int, str], _Link]] = weakref.WeakValueDictionary()
    _opening: ClassVar = threading.Lock()

    def __init__(self, handle: SamplerHandle):
        self.process = os.getpid()
        self._owner = handle.process
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(handle.address)
        except OSError:
            connection.close()
            raise _ended(self._owner) from None
        self._channel = Channel(connection, "tinker-sampler-requests")
        self._numbers = itertools.count(1)
        self._pending: _Pending = {}
        self._closed = threading.Event()
        weakref.finalize(self, self._channel.close).atexit = False
        args = (self._channel, self._pending, self._closed, self._owner)
        threading.Thread(target=_read, args=args, name="tinker-sampler-answers", daemon=True).start()

    @classmethod
    def to(cls, handle: SamplerHandle) -> _Link:
        """Connect, or return the open connection. Raises EngineClosedError if the other process has ended."""
        with cls._opening:
            key = (os.getpid(), handle.address)
            link = cls._open.get(key)
            if link is None or link.is_closed:
                link = cls._open[key] = cls(handle)
            return link

    @property
    def is_closed(self) -> bool:
        return self._closed.is_set()

    def call(self, fields: dict[str, Any], convert: Callable[[Frame], Any]) -> Future[Any]:
        number, future, channel = next(self._numbers), Future(), self._channel

        def on_answer(answer: Callable[[], Frame], link: object = self) -> None:  # keeps the link until the answer
            resolve(future, lambda: convert(answer()))

        self._pending[number] = on_answer
        if self.is_closed and self._pending.pop(number, None) is not None:  # the reader may have taken it
            raise _ended(self._owner)
        channel.send(lambda: Frame({"id": number, **fields}))
        future.add_done_callback(
            lambda done: channel.send(lambda: Frame({"op": "cancel", "id": number})) if done.cancelled() else None
        )
        return future

    def drop(self, holder: str) -> None:
        """Tell the other process to release a copy. Called by finalizers."""
        self._channel.send(lambda: Frame({"op": "drop", "holder": holder}))


def _read(channel: Channel, pending: _Pending, closed: threading.Event, owner: int) -> None:
    """Deliver the answers. Not a method: the thread must not keep the link alive."""
    while (frame := channel.receive()) is not None:
        pending.pop(frame.fields["id"])(lambda frame=frame: _checked(frame))

    def end() -> Frame:
        raise _ended(owner)

    closed.set()
    with suppress(KeyError):
        while True:
            pending.popitem()[1](end)
    channel.close()


def _checked(frame: Frame) -> Frame:
    """Return the frame; if it holds an error, raise that, with its type in the other process."""
    if "error" not in frame.fields:
        return frame
    kind = getattr(errors, frame.fields["type"], None)
    if isinstance(kind, type) and issubclass(kind, errors.LocalBackendError):
        raise kind(frame.fields["error"])
    raise errors.LocalBackendError(f"{frame.fields['type']}: {frame.fields['error']}")


def _sampled(frame: Frame) -> tinker.types.SampleResponse:
    response = deserialize_sample_response(frame.body)
    named = zip(response.sequences, frame.fields["sequence_ids"], strict=True)
    local = frame.fields["local"]
    sequences = [
        LocalSequence(
            **{**vars(sequence), "sequence_id": name},
            constrained_logprobs=constrained,
            weight_versions_np=None if versions is None else np.array(versions, dtype=np.int32),
        )
        for (sequence, name), (constrained, versions) in zip(named, local, strict=True)
    ]
    return dataclasses.replace(response, sequences=sequences)


def _ended(owner: int) -> errors.EngineClosedError:
    return errors.EngineClosedError(
        f"process {owner}, in which the engine of this sampling client ran, has ended; a copy of a local client works as long "
        "as its process runs, and on the same machine"
    )
