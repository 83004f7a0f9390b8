"""HTTP errors, in the form of the SDK or of the OpenAI-compatible routes."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.responses import JSONResponse

from tinker_local_backend.errors import LocalBackendError

logger = logging.getLogger(__name__)

TRY_AGAIN = (429, 503)
"""HTTP statuses on which clients retry."""


class Refused(Exception):
    """An HTTP status other than 200, with the reason. The SDK retries 429 and 503, after `retry_after` seconds."""

    def __init__(self, status: int, detail: str, retry_after: int = 1, code: str | None = None):
        super().__init__(detail)
        self.retry_after = retry_after
        self.code = code
        """OpenAI's error code, which its clients act on"""
        self.status = status
        self.detail = detail


def speaks_openai(path: str) -> bool:
    return path.startswith(("/v1/", "/inference/", "/tokenize", "/detokenize", "/version"))


def speaks_anthropic(path: str) -> bool:
    return path == "/v1/messages" or path.startswith("/v1/messages/")


_ANTHROPIC = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}
"""Status -> the type of an error in Anthropic's form."""


def error_body(path: str, status: int, detail: str, code: str | None = None) -> dict[str, Any]:
    """The JSON object of an error response."""
    if not speaks_openai(path):
        return {"detail": detail}
    if speaks_anthropic(path):
        return {"type": "error", "error": {"type": _ANTHROPIC.get(status, "invalid_request_error"), "message": detail}}
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": detail, "type": kind, "param": None, "code": code}}


def refusal(path: str, error: Exception) -> JSONResponse:
    """The response to a request that raised `error`."""
    status, detail = _status_and_detail(path, error)
    seconds = error.retry_after if isinstance(error, Refused) else 1
    headers = {"Retry-After": str(seconds)} if status in TRY_AGAIN else None
    code = error.code if isinstance(error, Refused) else None
    return JSONResponse(error_body(path, status, detail, code), status, headers)


def _status_and_detail(path: str, error: Exception) -> tuple[int, str]:
    if isinstance(error, Refused):
        return error.status, error.detail
    if isinstance(error, RequestValidationError):
        return _invalid(path), _problems(error.errors(), 1)  # locations begin with "body" or "path"
    if isinstance(error, LocalBackendError):
        return error.status_code, error.remote
    logger.error("a request to %s failed", path, exc_info=error)
    return 500, f"internal error ({type(error).__name__}); the server's log has the details"


def refused_body(path: str, error: ValidationError) -> Refused:
    """The refusal of a body, with its invalid fields. Call it on the parsing thread: its time grows with the number of errors.
    pydantic always reports all errors, so the schemas stop lists at their first error and limit dicts."""
    return Refused(
        _invalid(path), _problems(error.errors(include_url=False, include_context=False, include_input=False))
    )


def _invalid(path: str) -> int:
    return 400 if speaks_openai(path) else 422


def _problems(errors: Sequence[Any], outer: int = 0) -> str:
    """Invalid fields and reasons, without the values. `outer`: number of parts to drop from the start of each location."""
    messages = [f"{'.'.join(str(part) for part in e['loc'][outer:])}: {e['msg']}" for e in errors[:8]]
    return "; ".join(messages)[:2000]
