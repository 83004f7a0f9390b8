"""Errors of the engine. Each names the field, the value and the fix; each fails one request and leaves the engine running."""


class LocalBackendError(Exception):
    """Root of the errors that this package raises on purpose."""


class RequestError(LocalBackendError, ValueError):
    """A request cannot be carried out as it was made (unknown field, wrong shape, id outside the vocabulary, ...)."""


class ModelLoadError(LocalBackendError, ValueError):
    """The base model cannot be loaded or is not supported."""


class CheckpointError(LocalBackendError, RuntimeError):
    """A checkpoint is missing, incomplete, or does not fit the model."""


class EngineClosedError(LocalBackendError, RuntimeError):
    """The service client that owned this engine was closed before the request ran."""


class SamplingError(LocalBackendError, RuntimeError):
    """A sampling pass failed for a reason that is not the request's, such as memory."""
