"""Errors of the engine. Each names the field, the value and the fix; each fails one request and leaves the engine running.

In a program that has imported the SDK, each is also the SDK's error for the same mistake, so that `except tinker.TinkerError`
or `except tinker.NotFoundError` catches it. The SDK is not imported here: it takes seconds, and vLLM's processes lack it.
"""

# pyright: strict

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import httpx


class LocalBackendError(Exception):
    """Root of the errors that this package raises on purpose.

    `remote` is the message for a client on another machine, without the folders and settings of this one.
    """

    exit_code = 2
    """exit code of a command that this error ends"""
    status_code = 400
    """HTTP status of the server's response"""
    sdk_class = "TinkerError"
    """name in `tinker` of the SDK's error with the same meaning"""

    if not TYPE_CHECKING:  # for a type checker an error has the class that was called

        def __new__(cls, *args, **kwargs):
            cls = _with_sdk_class(cls)
            return OSError.__new__(cls, *args) if issubclass(cls, OSError) else Exception.__new__(cls)

    def __init__(self, *args: object, remote: str | None = None):
        Exception.__init__(self, *args)  # the SDK's classes would require a response
        self._remote = remote

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (_importable_class(type(self)), self.args, self.__dict__)

    @property
    def message(self) -> str:
        return str(self)

    @property
    def body(self) -> dict[str, str]:
        """The JSON body of the server's response."""
        return {"detail": str(self)}

    @property
    def response(self) -> httpx.Response:
        """The response that a server would have given."""
        import httpx

        return httpx.Response(self.status_code, json=self.body, request=httpx.Request("POST", "local://engine"))

    @property
    def request(self) -> httpx.Request:
        return self.response.request

    @property
    def remote(self) -> str:
        return str(self) if self._remote is None else self._remote


class RequestError(LocalBackendError, ValueError):
    """A request is invalid (unknown field, wrong shape, id outside the vocabulary, ...)."""

    sdk_class = "BadRequestError"


class NotFoundError(RequestError):
    """A request names a training run or session that does not exist."""

    status_code = 404
    sdk_class = "NotFoundError"


class ConflictError(RequestError):
    """A request asks for a state that already holds."""

    status_code = 409
    sdk_class = "ConflictError"


class NonFiniteError(RequestError):
    """A loss or a gradient is NaN or infinite. It was dropped, and no weight was changed.

    `datums` are the indices of the data in the call that caused it; empty if no single datum did.
    """

    def __init__(self, message: str, datums: Sequence[int] = ()):
        super().__init__(message)
        self.datums = tuple(datums)


class ModelLoadError(LocalBackendError, ValueError):
    """The base model cannot be loaded or is not supported."""

    sdk_class = "BadRequestError"


class CheckpointError(LocalBackendError, RuntimeError):
    """A checkpoint is missing, incomplete, or does not fit the model."""

    status_code = 404
    sdk_class = "NotFoundError"


class EngineClosedError(LocalBackendError, RuntimeError):
    """The service client that owned this engine was closed before the request ran."""


class ReplicaError(LocalBackendError, RuntimeError):
    """Another process of a run under torchrun has failed, died or not answered in time. The message names it."""


class SamplingError(LocalBackendError, RuntimeError):
    """A sampling pass failed for a reason outside the request, such as memory."""


_SDK_CLASSES: dict[type[LocalBackendError], type[LocalBackendError]] = {}
"""Error class -> its subclass that also inherits from the SDK's class."""


def _with_sdk_class(cls: type[LocalBackendError]) -> type[LocalBackendError]:
    """The class of a new error: if the SDK is loaded, a subclass that also inherits from the SDK's class."""
    sdk_class = getattr(sys.modules.get("tinker"), cls.sdk_class, None)
    if sdk_class is None or issubclass(cls, sdk_class):
        return cls
    if cls not in _SDK_CLASSES:
        names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
        _SDK_CLASSES[cls] = type(cls.__name__, (cls, sdk_class), names)
    return _SDK_CLASSES[cls]


def _importable_class(cls: type[LocalBackendError]) -> type[LocalBackendError]:
    """The class without the SDK's, for pickling."""
    return next((plain for plain, with_sdk in _SDK_CLASSES.items() if with_sdk is cls), cls)


def _restore(cls: type[LocalBackendError], args: tuple[object, ...], state: dict[str, object]) -> LocalBackendError:
    error = cls.__new__(cls)
    error.args = args
    error.__dict__.update(state)
    return error
