"""Files encrypted with age (https://age-encryption.org), for exports that only their recipients can read."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from tinker_local_backend.errors import RequestError

SUFFIX = ".age"
MAX_RECIPIENTS = 10
"""as on the hosted service"""


class Recipients:
    """The recipients who can decrypt.

    Args:
        keys: public keys: age1... or ssh-...

    Raises:
        RequestError: none or more than 10 keys, a key that is neither form, or the package pyrage is missing.
    """

    def __init__(self, keys: Sequence[str]):
        try:
            self._age: Any = importlib.import_module("pyrage")
        except ImportError as error:
            raise RequestError(
                'age_encryption_recipients: encryption needs the package pyrage; pip install "pyrage>=1.2.1", or leave the '
                "recipients out"
            ) from error
        if isinstance(keys, str) or not 1 <= len(keys) <= MAX_RECIPIENTS:
            raise RequestError(
                f"age_encryption_recipients={keys!r:.200}: give a list of 1 to {MAX_RECIPIENTS} public keys"
            )
        self._recipients = [self._read(key, i) for i, key in enumerate(keys)]

    def _read(self, key: str, index: int) -> Any:
        kind = self._age.ssh if str(key).startswith("ssh-") else self._age.x25519
        try:
            return kind.Recipient.from_str(key)
        except (self._age.RecipientError, TypeError) as error:
            raise RequestError(
                f"age_encryption_recipients[{index}]={key!r:.100} is not a public key of age (age1...) or SSH (ssh-...): {error}"
            ) from error

    def encrypt(self, plain: bytes) -> bytes:
        return self._age.encrypt(plain, self._recipients)
