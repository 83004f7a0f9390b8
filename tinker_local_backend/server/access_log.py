"""One JSON line per answered request and per finished operation.

A line contains no key, header, query or part of a body. JSON escapes the client's text, so it cannot forge a line.
"""

from __future__ import annotations

import json
import logging
import logging.handlers
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tinker_local_backend.errors import RequestError
from tinker_local_backend.server.sessions import Request
from tinker_local_backend.wire.frames import Frame

STANDARD_OUTPUT = "-"
LONGEST_PATH = 512


class AccessLog:
    """Writes to a file, which it reopens after a tool such as logrotate has moved it, or to standard output.

    Args:
        target: the file, `-` for standard output, or None to write nothing.
    """

    def __init__(self, target: str | None):
        self._handler: logging.Handler | None = None
        if target == STANDARD_OUTPUT:
            self._handler = logging.StreamHandler(sys.stdout)
        elif target is not None:
            try:
                self._handler = logging.handlers.WatchedFileHandler(Path(target).expanduser(), encoding="utf-8")
            except OSError as error:
                raise RequestError(
                    f"access_log={target!r} cannot be written: {error}; give a file in a folder that exists, or -"
                ) from None

    def answered(self, scope: Mapping[str, Any], status: int, seconds: float) -> None:
        """Log an HTTP request. `status` 0: the client disconnected before the response."""
        tenant = scope.get("state", {}).get("tenant")
        self._write(
            event="request",
            tenant=None if tenant is None else tenant.name,
            client=(scope.get("client") or [None])[0],
            method=scope["method"],
            path=scope["path"][:LONGEST_PATH],
            status=status,
            seconds=round(seconds, 6),
        )

    def ended(self, request: Request, reply: Frame, seconds: float) -> None:
        """Log an operation of the engine: a sample, a training step, a checkpoint."""
        self._write(
            event="operation",
            tenant=request.tenant.name,
            session=request.session.session_id,
            request=request.request_id,
            kind=request.kind,
            outcome=outcome(reply),
            tokens=reply.fields.get("tokens"),
            seconds=round(seconds, 6),
        )

    def close(self) -> None:
        if self._handler is not None:
            self._handler.close()

    def _write(self, **fields: Any) -> None:
        if self._handler is not None:
            line = json.dumps({"time": round(time.time(), 3), **fields})
            self._handler.handle(logging.LogRecord("access", logging.INFO, "", 0, line, None, None))


def outcome(reply: Frame) -> str:
    """`ok`, or whose fault the failure was: `user` or `server`."""
    return reply.fields.get("category", "error") if "error" in reply.fields else "ok"
