"""Secrets stay out of a run's files: the values of environment variables with such names, and passwords in addresses.

What a library or a server says may quote the key it was called with, so texts are looked through on their way to a file.
"""

import logging
import os
import re
from collections.abc import Mapping
from typing import Any

SECRET_NAME = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL")
HIDDEN = "<hidden>"

_SHORTEST = 8
"""Characters: a shorter value would hide words that only look like it."""
_IN_ADDRESS = re.compile(r"(?<=://)[^/\s@'\"]+(?=@)")
_IN_QUERY = re.compile(r"(?i)([?&](?:[a-z_-]*(?:key|token|secret|password))=)[^&\s'\"]+")


def redact(value: Any) -> Any:
    """Plain JSON types, or a text, without secrets."""
    if isinstance(value, str):
        return _redact_text(value)
    if isinstance(value, Mapping):
        return {key: redact(entry) for key, entry in value.items()}
    return [redact(entry) for entry in value] if isinstance(value, list) else value


def _redact_text(text: str) -> str:
    for secret in _secrets():
        text = text.replace(secret, HIDDEN)
    return _IN_QUERY.sub(rf"\1{HIDDEN}", _IN_ADDRESS.sub(HIDDEN, text))


def _secrets() -> list[str]:
    """The longest first, so that none is left in part."""
    found = {value for name, value in os.environ.items() if SECRET_NAME.search(name) and len(value) >= _SHORTEST}
    return sorted((value for value in found if not value.isdecimal()), key=len, reverse=True)


class RedactingFormatter(logging.Formatter):
    """Formats records, their tracebacks too, without secrets."""

    def format(self, record: logging.LogRecord) -> str:
        return _redact_text(super().format(record))
