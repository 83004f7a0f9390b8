"""URLs of files that need no API key: anyone with the URL may download the file until it expires, as with the hosted service.

The signature covers tenant, path and expiry. Its key is generated when the server starts, so a restart invalidates all URLs.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from urllib.parse import parse_qs, urlencode

from tinker_local_backend.server.errors import Refused

PREFIX = "/api/v1/files/"
"""Paths that may be signed."""
SECONDS = 3600
"""Lifetime of a URL."""


class SignedUrls:
    """Signs paths for tenants and verifies signatures."""

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)

    def query(self, path: str, tenant: str) -> str:
        """The query string that gives access to `path` for an hour."""
        expires = str(int(time.time()) + SECONDS)
        return urlencode({"tenant": tenant, "expires": expires, "signature": self._sign(path, tenant, expires)})

    def tenant(self, path: str, query: str) -> str | None:
        """The tenant that a path was signed for; None without a signature. Raises Refused (403) for an invalid or expired one."""
        fields = {name: values[-1] for name, values in parse_qs(query).items()}
        if not path.startswith(PREFIX) or "signature" not in fields:
            return None
        tenant, expires = fields.get("tenant", ""), fields.get("expires", "")
        if not hmac.compare_digest(self._sign(path, tenant, expires).encode(), fields["signature"].encode()):
            raise Refused(403, "the signature of this address is wrong; ask get_external_weights_urls for another one")
        if int(expires) < time.time():
            raise Refused(403, "this address has expired; ask get_external_weights_urls for another one")
        return tenant

    def _sign(self, path: str, tenant: str, expires: str) -> str:
        message = "\n".join((path, tenant, expires)).encode()
        return hmac.new(self._key, message, hashlib.sha256).hexdigest()
