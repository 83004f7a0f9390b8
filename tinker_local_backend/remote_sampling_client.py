"""A SamplingClient in another process than its engine's: what a pickled local SamplingClient becomes there."""

from __future__ import annotations

import dataclasses
import itertools
import os
import socket
import threading
import uuid
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, ClassVar

import tinker
from tinker.proto.response_conv import deserialize_sample_response
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tinker_local_backend import errors, sampler_host
from tinker_local_backend.futures import EngineFuture, as_coroutine, awaited, settle
from tinker_local_backend.sampler_host import Sampler, SamplerHandle
from tinker_local_backend.wire import codec
from tinker_local_backend.wire.channel import Channel
from tinker_local_backend.wire.frames import Frame


def connect(handle: SamplerHandle) -> Sampler:
    """The client that the handle names: itself in the process that made it, elsewhere one that asks it. Nothing is asked yet."""
    return sampler_host.find(handle) or RemoteSamplingClient(handle)


class RemoteSamplingClient:
    """A frozen snapshot whose engine runs in another process of this machine. It may be pickled on.

    It is there as long as the process that made it keeps its SamplingClient, or one that has sampled keeps its copy.
    What is wrong with a request is told by the future; that the other process has ended (EngineClosedError), also at the call.
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
    ) -> EngineFuture[tinker.types.SampleResponse]:
        """As SamplingClient.sample, whose `on_progress` works in the engine's own process alone."""
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
        place = {"op": op, "sampler": self._handle.sampler_id, "holder": self._holder}
        return EngineFuture(self._link.call({**place, "request": request}, convert), cancellable=True)


class _Link:
    """The connection of this process to one that has engines. All clients share it; it ends with the last of them."""

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
        self._calls = _Calls()
        weakref.finalize(self, self._channel.close).atexit = False
        reading = (self._channel, self._calls, self._owner)
        threading.Thread(target=_read, args=reading, name="tinker-sampler-answers", daemon=True).start()

    @classmethod
    def to(cls, handle: SamplerHandle) -> _Link:
        """Raises EngineClosedError when nobody is there."""
        with cls._opening:
            place = (os.getpid(), handle.address)
            link = cls._open.get(place)
            if link is None or link.is_closed:
                link = cls._open[place] = cls(handle)
            return link

    @property
    def is_closed(self) -> bool:
        return self._calls.is_closed

    def call(self, fields: dict[str, Any], convert: Callable[[Frame], Any]) -> Future[Any]:
        number, future, channel = next(self._numbers), Future(), self._channel

        def tell(answer: Callable[[], Frame], kept: object = self) -> None:  # also where nobody keeps the client
            settle(future, lambda: convert(answer()))

        if not self._calls.add(number, tell):
            raise _ended(self._owner)
        channel.send(lambda: Frame({"id": number, **fields}))
        future.add_done_callback(
            lambda done: channel.send(lambda: Frame({"op": "cancel", "id": number})) if done.cancelled() else None
        )
        return future

    def drop(self, holder: str) -> None:
        """Let the other process forget a copy. Called by finalizers."""
        self._channel.send(lambda: Frame({"op": "drop", "holder": holder}))


class _Calls:
    """What waits for an answer. A call takes a function that returns the answer's frame, or raises what went wrong."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[int, Callable[[Callable[[], Frame]], None]] = {}
        self.is_closed = False

    def add(self, number: int, tell: Callable[[Callable[[], Frame]], None]) -> bool:
        """False when no answer can come any more."""
        with self._lock:
            if not self.is_closed:
                self._waiting[number] = tell
            return not self.is_closed

    def answer(self, number: int, answer: Callable[[], Frame]) -> None:
        with self._lock:
            tell = self._waiting.pop(number)
        tell(answer)

    def close(self, answer: Callable[[], Frame]) -> None:
        with self._lock:
            self.is_closed = True
            waiting, self._waiting = self._waiting, {}
        for tell in waiting.values():
            tell(answer)


def _read(channel: Channel, calls: _Calls, owner: int) -> None:
    """Not a method: a thread that knew the link would keep it."""
    while (frame := channel.receive()) is not None:
        calls.answer(frame.fields["id"], lambda frame=frame: _checked(frame))

    def end() -> Frame:
        raise _ended(owner)

    calls.close(end)
    channel.close()


def _checked(frame: Frame) -> Frame:
    """The frame, unless it says what went wrong, which is raised as what it was there."""
    if "error" not in frame.fields:
        return frame
    kind = getattr(errors, frame.fields["type"], None)
    if isinstance(kind, type) and issubclass(kind, errors.LocalBackendError):
        raise kind(frame.fields["error"])
    raise errors.LocalBackendError(f"{frame.fields['type']}: {frame.fields['error']}")


def _sampled(frame: Frame) -> tinker.types.SampleResponse:
    response = deserialize_sample_response(frame.body)
    named = zip(response.sequences, frame.fields["sequence_ids"], strict=True)
    sequences = [dataclasses.replace(sequence, sequence_id=name) for sequence, name in named]
    return dataclasses.replace(response, sequences=sequences)


def _ended(owner: int) -> errors.EngineClosedError:
    return errors.EngineClosedError(
        f"process {owner}, in which the engine of this sampling client ran, has ended; a copy of a local client works as long "
        "as its process runs, and on the same machine"
    )
