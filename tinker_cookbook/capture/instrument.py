"""Records the calls of clients: `sample`, `forward_backward`, `optim_step` and `save_weights_for_sampler`.

The classes are patched, the SDK's and the local engine's, so every client of the process is recorded. A record has the
tags and the exporter of the time of the call, even if the result arrives later or in another thread. The `_async` variants
of these methods call them, and only pass on the caller's tags. A coroutine that is never awaited makes no request, and has
no record.
"""

from __future__ import annotations

import functools
import inspect
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError, Future
from typing import Any

from tinker_cookbook import backends
from tinker_cookbook.capture.exporter import CaptureExporter, CaptureRecord
from tinker_cookbook.capture.scope import current_scope, replace_scope

_PARAMS = ("max_tokens", "temperature", "top_p", "top_k", "seed")
_ADAM = ("learning_rate", "beta1", "beta2", "eps", "weight_decay", "grad_clip_norm")

_lock = threading.Lock()
_exporter: CaptureExporter | None = None
_originals: dict[tuple[type, str], Callable[..., Any]] = {}


def current_exporter() -> CaptureExporter | None:
    """The exporter of the next call; None: not recorded."""
    return _exporter


def instrument_tinker(exporter: CaptureExporter) -> None:
    """Record every call from now on. A second call replaces the exporter; calls in flight keep theirs."""
    global _exporter
    with _lock:
        _exporter = exporter
        for sampling, training in backends.client_classes():
            _patch(sampling, "sample", _describe_sample, _sampled)
            for name, describe in _TRAINING.items():
                _patch(training, name, describe, _trained)


def uninstrument_tinker() -> None:
    """Stop recording. Calls in flight still reach their exporter: call `wait_pending` before its `shutdown`."""
    global _exporter
    with _lock:
        _exporter = None
        while _originals:
            (owner, name), original = _originals.popitem()
            setattr(owner, name, original)


def _patch(
    owner: type,
    name: str,
    describe: Callable[[Any, Mapping[str, Any]], CaptureRecord],
    outcome: Callable[[Any], CaptureRecord],
) -> None:
    if (owner, name) in _originals:
        return
    original = getattr(owner, name)
    signature = inspect.signature(original)

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        exporter = _exporter
        if exporter is None:
            return original(self, *args, **kwargs)
        recording = _Recording(exporter, outcome)
        recording.guarded(lambda: describe(self, signature.bind(self, *args, **kwargs).arguments))
        try:
            future = original(self, *args, **kwargs)
        except BaseException as error:
            recording.end("error", error)
            raise
        future.future().add_done_callback(recording.ended)
        return future

    _originals[owner, name] = original
    setattr(owner, name, call)
    twin = getattr(owner, f"{name}_async", None)
    if twin is not None:
        _originals[owner, f"{name}_async"] = twin
        setattr(owner, f"{name}_async", _with_tags(twin))


def _with_tags(twin: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(twin)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        tags = dict(current_scope())

        async def run() -> Any:
            with replace_scope(tags):
                return await twin(self, *args, **kwargs)

        return run()

    mark = getattr(inspect, "markcoroutinefunction", None)  # from Python 3.12 on
    return mark(call) if mark is not None else call


class _Recording:
    """The record of a call, from start to end."""

    def __init__(self, exporter: CaptureExporter, outcome: Callable[[Any], CaptureRecord]) -> None:
        self._exporter, self._outcome = exporter, outcome
        self._record: CaptureRecord = {"scope": dict(current_scope()), "created_at": time.time()}
        self._start = time.perf_counter()
        exporter.track_pending()

    def guarded(self, describe: Callable[[], CaptureRecord]) -> None:
        """Add to the record. An error here must not affect the call: it is counted, and suppressed."""
        try:
            self._record |= describe()
        except Exception:
            self._exporter.callback_failures += 1

    def ended(self, future: Future[Any]) -> None:
        """The call has a result or an error, or was cancelled."""
        try:
            error = future.exception()
        except CancelledError:
            return self.end("cancelled")
        if error is not None:
            return self.end("error", error)
        self.guarded(lambda: self._outcome(future.result()))
        return self.end("ok")

    def end(self, status: str, error: BaseException | None = None) -> None:
        self._record |= {"status": status, "latency_sec": time.perf_counter() - self._start}
        if error is not None:
            self._record["error"] = repr(error)
        self._exporter.enqueue(self._record)
        self._exporter.pending_done()


def _describe_sample(client: Any, given: Mapping[str, Any]) -> CaptureRecord:
    prompt, params = given["prompt"], given["sampling_params"]
    tokens = prompt.to_ints() if all(hasattr(chunk, "tokens") for chunk in prompt.chunks) else None
    weights = {
        key: str(value) for key in ("model_path", "base_model") if (value := getattr(client, key, None)) is not None
    }
    return {
        "kind": "sample",
        "seq_id": uuid.uuid4().int & ((1 << 62) - 1),
        "sampling_session_id": getattr(client, "_sampling_session_id", None),
        **weights,
        "num_samples": given["num_samples"],
        "prompt_length": prompt.length,
        **({} if tokens is None else {"prompt_tokens": tokens}),
        "sampling_params": {key: getattr(params, key, None) for key in _PARAMS},
    }


def _sampled(response: Any) -> CaptureRecord:
    samples = [
        {
            "tokens": list(sequence.tokens),
            "logprobs": None if sequence.logprobs is None else list(sequence.logprobs),
            "stop_reason": sequence.stop_reason,
        }
        for sequence in response.sequences
    ]
    return {"samples": samples}


def _describe_training(
    op: str, describe_call: Callable[[Mapping[str, Any]], CaptureRecord]
) -> Callable[..., CaptureRecord]:
    def describe(client: Any, given: Mapping[str, Any]) -> CaptureRecord:
        return {"kind": "train_op", "op": op, "model_id": str(client.model_id), **describe_call(given)}

    return describe


def _hyperparams(given: Mapping[str, Any]) -> CaptureRecord:
    params = given.get("optim_params") or given.get("adam_params")
    return {"hyperparams": {key: getattr(params, key, None) for key in _ADAM}}


_TRAINING = {
    "forward_backward": _describe_training("forward_backward", lambda given: {"num_data": len(given["data"])}),
    "optim_step": _describe_training("optim_step", _hyperparams),
    "save_weights_for_sampler": _describe_training(
        "save_weights_for_sampler", lambda given: {"name": str(given["name"])}
    ),
}


def _trained(result: Any) -> CaptureRecord:
    metrics = getattr(result, "metrics", None)
    return (
        {}
        if not metrics
        else {"metrics": {key: value for key, value in metrics.items() if isinstance(value, int | float)}}
    )
