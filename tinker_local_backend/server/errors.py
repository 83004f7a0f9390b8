"""How a refusal is written: as the SDK reads it, or as clients of the OpenAI-compatible routes do."""

from __future__ import annotations

from typing import Any


def speaks_openai(path: str) -> bool:
    return path.startswith(("/v1/", "/inference/"))


def error_body(path: str, status: int, detail: str) -> dict[str, Any]:
    """The JSON object that goes with a status that is not 2xx."""
    if not speaks_openai(path):
        return {"detail": detail}
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": detail, "type": kind, "param": None, "code": None}}
