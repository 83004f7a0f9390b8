"""Keep secrets out of a run's files: the values of environment variables and config fields with secret-like names, and
passwords in URLs.

The messages of a library or a server may quote an API key, so texts are redacted before they are written to a file.
"""

import logging
import os
import re
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

from tinker_cookbook.utils.narrowing import is_list, is_mapping

SECRET_NAME = re.compile(r"(?i)KEY|TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL")
"""Matches secret-like names of environment variables."""
HIDDEN = "<hidden>"

_SHORTEST = 8
"""Characters of a secret; hiding shorter values would also hide ordinary words."""
# For names of config fields. Narrower than SECRET_NAME: many fields are called key or token.
_FIELD = (
    r"(?:[\w.\-]*[_.\-])?(?:api_?key|(?:access|secret|private)_key|client_secret|password|passwd"
    r"|(?:auth|access|bearer|api|hf)_token)"
)
_FIELD_NAME = re.compile(rf"(?i){_FIELD}")
# Placeholders for a key in instructions: tml-..., <key>, $NAME, YOUR_KEY; and, as the whole value, KEY, MY_KEY, tml-
# XXXX.
_WHOLE = r"(?-i:(?:[A-Z]+_)*KEY|(?:tml-|sk-|hf_)?(?:X[X\-]{2,}|x[x\-]{2,}|\*{3,}))(?=[.:]?(?:[\s&'\",;)`]|$))"
_PLACEHOLDER = rf"(?:[^\s&'\",;)]*(?:\.\.\.|…)|<|\$|your[_\-]|None\b|{_WHOLE})"
_ASSIGNED = re.compile(rf"(?i)(?<![\w.\-])({_FIELD}=['\"]?)(?!{_PLACEHOLDER})[^\s&'\",;)]+")
_QUOTED = re.compile(
    rf"(?i)(?<![\w.\-])({_FIELD}['\"]?(?:\s*:\s*\w+)?\s*[=:]\s*['\"])(?!{_PLACEHOLDER})[^\s'\"]{{{_SHORTEST},}}"
)
"""In code, with spaces around the sign and perhaps a type: `api_key: str = "..."`, `"api_key": "..."`."""
_KEY = re.compile(rf"(?<![\w\-])(?!{_WHOLE})(?:tml-|sk-|hf_)[\w\-]{{12,}}")
"""Keys of the hosted service, of OpenAI and similar services, and of the Hugging Face hub, anywhere in a text."""
_IN_ADDRESS = re.compile(r"(?<=://)[^/\s@'\"]+(?=@)")
_IN_QUERY = re.compile(r"(?i)([?&](?:[a-z_-]*(?:key|token|secret|password))=)[^&\s'\"]+")


def redact(value: Any) -> Any:
    """Plain JSON types, or a text, without secrets. Config fields with secret-like names are hidden completely."""
    return _without(value, _secrets(), by_name=True)


def redactor() -> Callable[[Any], Any]:
    """For many records: `redact` with the current environment, independent of field names."""
    return partial(_without, secrets=_secrets(), by_name=False)


def redact_code(text: str) -> str:
    """`redact` for code, and for a diff: also hides a text assigned to a secret-like name, with any space around the
    operator.
    """
    return redact(_QUOTED.sub(rf"\1{HIDDEN}", text))


def _without(value: Any, secrets: Sequence[str], by_name: bool) -> Any:
    if isinstance(value, str):
        return _redact_text(value, secrets)
    if is_mapping(value):
        return {
            key: HIDDEN
            if by_name and entry and isinstance(entry, str) and _FIELD_NAME.fullmatch(str(key))
            else _without(entry, secrets, by_name)
            for key, entry in value.items()
        }
    return [_without(entry, secrets, by_name) for entry in value] if is_list(value) else value


def _redact_text(text: str, secrets: Sequence[str]) -> str:
    for secret in secrets:
        text = text.replace(secret, HIDDEN)
    text = _KEY.sub(HIDDEN, text)
    if "://" in text:
        text = _IN_ADDRESS.sub(HIDDEN, text)
    return _ASSIGNED.sub(rf"\1{HIDDEN}", _IN_QUERY.sub(rf"\1{HIDDEN}", text)) if "=" in text else text


@cache
def _is_secret_name(name: str) -> bool:
    return SECRET_NAME.search(name) is not None


def _secrets() -> list[str]:
    """The secrets in the environment, longest first, so that no part of one remains."""
    values = {os.environ[name] for name in os.environ if _is_secret_name(name)}
    return sorted((value for value in values if _may_be_secret(value)), key=len, reverse=True)


def _may_be_secret(value: str) -> bool:
    """Not numbers (token counts) or paths (of key files): instructions that name them stay
    readable.
    """
    is_file = value.startswith(("/", "~")) and os.path.exists(os.path.expanduser(value))
    return len(value) >= _SHORTEST and not value.isdecimal() and not is_file


class RedactingFormatter(logging.Formatter):
    """Formats records, including their tracebacks, without secrets."""

    def format(self, record: logging.LogRecord) -> str:
        return redact(super().format(record))
