"""API keys and the tenants they identify.

Each tenant has a home with all of its runs and checkpoints. A `tinker://` path is looked up in the requesting tenant's home, so
the server answers the same for another tenant's checkpoint and for one that does not exist.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tinker_local_backend.errors import RequestError
from tinker_local_backend.storage.paths import check_name

KEYS_VARIABLE = "TINKER_LOCAL_API_KEYS"
KEY_PREFIX = "tml-"
"""The SDK refuses to send other keys."""

_BOUNDS = ("tokens_per_minute", "rows", "disk_mib")


@dataclass(frozen=True)
class Terms:
    """Limits of a tenant; None: unlimited."""

    tokens_per_minute: int | None = None
    """of training data, prompts and samples together"""
    rows: int | None = None
    """samples queued or running at a time"""
    disk_mib: int | None = None
    """of checkpoints; further saves fail"""
    operator: bool = False
    """sees the metrics of all tenants at /metrics"""


@dataclass(unsafe_hash=True)
class Tenant:
    """The owner of sessions, runs, checkpoints and results, which other tenants cannot see.
    The object lives as long as the server, so sessions that hold it see its current `terms` (Access.change)."""

    name: str
    home: Path
    terms: Terms = field(default=Terms(), compare=False)


class Keys(dict[str, str]):
    """Tenant -> API key, with the tenants' terms."""

    def __init__(self) -> None:
        super().__init__()
        self.terms: dict[str, Terms] = {}


class Access:
    """The tenants of a server, by the digests of their keys. Without keys, all requests belong to one tenant.

    Args:
        keys: tenant name -> API key; a Keys also has the tenants' terms.
        home: the server's; tenants with a key have `tenants/<name>` in it.
    """

    def __init__(self, keys: Mapping[str, str], home: Path):
        self._home = home
        self._default_tenant = None if keys else Tenant("local", home, Terms(operator=True))
        self._tenants: dict[str, Tenant] = {}
        """all tenants that had a key since the start"""
        self.change(keys)

    @property
    def has_keys(self) -> bool:
        return self._default_tenant is None

    def tenant_limit(self, total: int, configured: int | None) -> int:
        """A tenant's limit within `total`: `configured`, else half if there are several tenants, else all."""
        if configured is not None:
            return min(configured, total)
        return total // 2 if len(self._digests) > 1 else total

    def change(self, keys: Mapping[str, str]) -> None:
        """Replace all keys and terms. No effect on a server that was started without keys."""
        terms = keys.terms if isinstance(keys, Keys) else {}
        self._digests: list[tuple[bytes, Tenant]] = []
        for name, key in sorted(keys.items()):
            tenant = self._tenants.setdefault(name, Tenant(name, self._home / "tenants" / name))
            tenant.terms = terms.get(name, Terms())
            self._digests.append((_digest(key), tenant))

    def knows(self, tenant: Tenant) -> bool:
        """Whether the tenant still has a key."""
        return tenant == self._default_tenant or any(tenant == other for _, other in self._digests)

    def named(self, name: str) -> Tenant | None:
        """The tenant of this name, if it still has a key."""
        known = [self._default_tenant, *(tenant for _, tenant in self._digests)]
        return next((tenant for tenant in known if tenant is not None and tenant.name == name), None)

    def tenant(self, key: str | None) -> Tenant | None:
        """The tenant of this key, or None. Constant time."""
        if self._default_tenant is not None:
            return self._default_tenant
        digest = _digest(key or "")
        match = None
        for expected, tenant in self._digests:
            if hmac.compare_digest(digest, expected):
                match = tenant
        return match


def read_keys(file: str | None, environment: Mapping[str, str]) -> Keys:
    """Read keys from a file (one per line, `#` begins a comment) or from TINKER_LOCAL_API_KEYS (separated by commas).

    An entry is `tenant=tml-...`, or only a key, whose tenant is then named after its digest. Terms may follow, separated by
    spaces: `tokens_per_minute=N`, `rows=N`, `disk_mib=N`, `operator`.
    Raises RequestError, which never shows a key, for a wrong entry or a file that every user of the machine may read or replace.
    """
    if file is not None:
        try:
            with Path(file).expanduser().open() as opened:
                mode = stat.S_IMODE(os.fstat(opened.fileno()).st_mode)
                text = opened.read()
        except (OSError, UnicodeDecodeError) as error:
            raise RequestError(f"api_keys_file={file!r} cannot be read: {error}") from None
        if mode & stat.S_IRWXO:
            raise RequestError(
                f"api_keys_file={file!r} is open to every user of this machine (mode {mode:o}); chmod 600 it, and replace the "
                "keys if others may have read them"
            )
        lines = [line.partition("#")[0].strip() for line in text.splitlines()]
        return _parse([line for line in lines if line], f"api_keys_file={file!r}")
    value = environment.get(KEYS_VARIABLE, "")
    return _parse([part.strip() for part in value.split(",") if part.strip()], KEYS_VARIABLE) if value else Keys()


def _parse(entries: Iterable[str], source: str) -> Keys:
    keys = Keys()
    for number, line in enumerate(entries, start=1):
        entry, *more = line.split()
        name, separator, key = entry.rpartition("=")
        if not key.startswith(KEY_PREFIX) or len(key) < len(KEY_PREFIX) + 8 or not key.isascii() or " " in key:
            raise RequestError(
                f"{source}: the key of entry {number} must be {KEY_PREFIX} and at least 8 characters more, as the SDK asks"
            )
        name = check_name(name, f"{source}: tenant") if separator else f"tenant-{_digest(key).hex()[:12]}"
        if name in keys or key in keys.values():
            raise RequestError(f"{source}: entry {number} repeats a tenant or a key")
        keys[name], keys.terms[name] = key, _terms(more, f"{source}: entry {number}")
    if not keys:
        raise RequestError(f"{source} holds no key; write a line such as alice={KEY_PREFIX}...")
    return keys


def _terms(words: Iterable[str], where: str) -> Terms:
    bounds: dict[str, Any] = {}
    operator = False
    for word in words:
        name, _, value = word.partition("=")
        if word == "operator":
            operator = True
        elif name in _BOUNDS and value.isdecimal() and 0 < int(value) < 1 << 60:
            bounds[name] = int(value)
        else:
            raise RequestError(
                f"{where}: a key may be followed by {', '.join(f'{bound}=N' for bound in _BOUNDS)} or operator"
            )
    return Terms(**bounds, operator=operator)


class KeysFile:
    """A file of keys, read again when it changes."""

    def __init__(self, file: str):
        self._file = file
        self._seen = self._version()

    def changed(self) -> Keys | None:
        """The keys, if the file has changed since the last call. Raises RequestError, once per change, if it is invalid."""
        version = self._version()
        if version == self._seen:
            return None
        self._seen = version
        return read_keys(self._file, {})

    def _version(self) -> tuple[int, int, int] | None:
        try:
            status = Path(self._file).expanduser().stat()
        except OSError:
            return None
        return status.st_mtime_ns, status.st_size, status.st_ino


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()
