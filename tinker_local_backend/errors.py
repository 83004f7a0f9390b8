"""Errors of the engine. Each names the field, the value and the fix; each fails one request and leaves the engine running."""

from collections.abc import Sequence


class LocalBackendError(Exception):
    """Root of the errors that this package raises on purpose.

    `remote` is the message for a client on another machine, without the folders and settings of this one.
    """

    exit_code = 2
    """of a command that it ends"""

    def __init__(self, *args: object, remote: str | None = None):
        super().__init__(*args)
        self._remote = remote

    @property
    def remote(self) -> str:
        return str(self) if self._remote is None else self._remote


class RequestError(LocalBackendError, ValueError):
    """A request is invalid (unknown field, wrong shape, id outside the vocabulary, ...)."""


class NonFiniteError(RequestError):
    """A loss or a gradient is NaN or infinite. It was dropped, and no weight was changed.

    `datums` are the indices of the call's data that caused it; empty if no single datum did.
    """

    def __init__(self, message: str, datums: Sequence[int] = ()):
        super().__init__(message)
        self.datums = tuple(datums)


class ModelLoadError(LocalBackendError, ValueError):
    """The base model cannot be loaded or is not supported."""


class CheckpointError(LocalBackendError, RuntimeError):
    """A checkpoint is missing, incomplete, or does not fit the model."""


class EngineClosedError(LocalBackendError, RuntimeError):
    """The service client that owned this engine was closed before the request ran."""


class ReplicaError(LocalBackendError, RuntimeError):
    """Another process of a run under torchrun has failed, died or not answered in time. The message names it."""


class SamplingError(LocalBackendError, RuntimeError):
    """A sampling pass failed for a reason outside the request, such as memory."""
