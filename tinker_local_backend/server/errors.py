"""What is refused, and how that is written: as the SDK reads it, or as clients of the OpenAI-compatible routes do."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.responses import JSONResponse

from tinker_local_backend.errors import CheckpointError, LocalBackendError

logger = logging.getLogger(__name__)

TRY_AGAIN = (429, 503)
"""Statuses after which clients send the request once more."""


class Refused(Exception):
    """An answer other than 200: an HTTP status that the SDK takes for final (or 429 and 503, which it repeats), and why.

    `retry_after`: seconds after which it should be repeated.
    """

    def __init__(self, status: int, detail: str, retry_after: int = 1):
        super().__init__(detail)
        self.retry_after = retry_after
        self.status = status
        self.detail = detail


def speaks_openai(path: str) -> bool:
    return path.startswith(("/v1/", "/inference/"))


def error_body(path: str, status: int, detail: str) -> dict[str, Any]:
    """The JSON object that goes with a status that is not 2xx."""
    if not speaks_openai(path):
        return {"detail": detail}
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": detail, "type": kind, "param": None, "code": None}}


def refusal(path: str, error: Exception) -> JSONResponse:
    """The answer to a request that raised this."""
    status, detail = _status_and_detail(path, error)
    seconds = error.retry_after if isinstance(error, Refused) else 1
    headers = {"Retry-After": str(seconds)} if status in TRY_AGAIN else None
    return JSONResponse(error_body(path, status, detail), status, headers)


def _status_and_detail(path: str, error: Exception) -> tuple[int, str]:
    if isinstance(error, Refused):
        return error.status, error.detail
    if isinstance(error, RequestValidationError):
        return _invalid(path), _problems(error.errors(), 1)  # its places begin with "body" or "path"
    if isinstance(error, LocalBackendError):
        return 404 if isinstance(error, CheckpointError) else 400, error.remote
    logger.error("a request to %s failed", path, exc_info=error)
    return 500, f"internal error ({type(error).__name__}); the server's log has the details"


def refused_body(path: str, error: ValidationError) -> Refused:
    """What says which fields of a body are wrong. To be made where the body was parsed: it takes as long as there are errors.

    The schemas end lists at their first error and bound dicts, because pydantic cannot be asked for the first few errors alone.
    """
    return Refused(
        _invalid(path), _problems(error.errors(include_url=False, include_context=False, include_input=False))
    )


def _invalid(path: str) -> int:
    return 400 if speaks_openai(path) else 422


def _problems(errors: Sequence[Any], outer: int = 0) -> str:
    """Which field is wrong and why, without repeating what was sent. `outer`: how many parts of a place are not the body's."""
    found = [f"{'.'.join(str(part) for part in e['loc'][outer:])}: {e['msg']}" for e in errors[:8]]
    return "; ".join(found)[:2000]
