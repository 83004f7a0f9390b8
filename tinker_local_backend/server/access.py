"""Who may ask: API keys, and the tenants that they stand for.

A tenant has a home of its own, below which all of its runs and checkpoints lie. A `tinker://` path is looked up in the home of
whoever asks, so another tenant's checkpoint is not refused but absent, like one that never was.
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
"""The SDK refuses other keys before it sends them."""

_BOUNDS = ("tokens_per_minute", "rows", "disk_mib")


@dataclass(frozen=True)
class Terms:
    """What a tenant may have; None: no bound of his own."""

    tokens_per_minute: int | None = None
    """trained on, in prompts and sampled"""
    rows: int | None = None
    """samples that wait or run at a time"""
    disk_mib: int | None = None
    """of checkpoints; beyond, nothing more is saved"""
    operator: bool = False
    """sees the numbers of all tenants at /metrics"""


@dataclass(unsafe_hash=True)
class Tenant:
    """Someone whose sessions, runs, checkpoints and results nobody else sees.

    One object for as long as the server runs (see Access.change), so whoever keeps it, as a session does, reads in `terms` what
    holds now.
    """

    name: str
    home: Path
    terms: Terms = field(default=Terms(), compare=False)


class Keys(dict[str, str]):
    """Tenant -> API key, and on which terms."""

    def __init__(self) -> None:
        super().__init__()
        self.terms: dict[str, Terms] = {}


class Access:
    """The tenants of a server, by the digests of their keys. Without keys everybody is one tenant.

    Args:
        keys: tenant name -> API key; Keys also say on which terms.
        home: of the server; a tenant with a key lives in `tenants/<name>` below it.
    """

    def __init__(self, keys: Mapping[str, str], home: Path):
        self._home = home
        self._everybody = None if keys else Tenant("local", home, Terms(operator=True))
        self._tenants: dict[str, Tenant] = {}
        """all that ever had a key"""
        self.change(keys)

    @property
    def has_keys(self) -> bool:
        return self._everybody is None

    def share(self, most: int, given: int | None) -> int:
        """What one tenant may have of `most`: what is given, or all of it unless there are others now, to whom half is left."""
        if given is not None:
            return min(given, most)
        return most // 2 if len(self._digests) > 1 else most

    def change(self, keys: Mapping[str, str]) -> None:
        """From now on these keys and their terms hold, and no others. A server that began without any goes on without."""
        terms = keys.terms if isinstance(keys, Keys) else {}
        self._digests: list[tuple[bytes, Tenant]] = []
        for name, key in sorted(keys.items()):
            tenant = self._tenants.setdefault(name, Tenant(name, self._home / "tenants" / name))
            tenant.terms = terms.get(name, Terms())
            self._digests.append((_digest(key), tenant))

    def knows(self, tenant: Tenant) -> bool:
        """Whether a tenant still has a key."""
        return tenant == self._everybody or any(tenant == other for _, other in self._digests)

    def tenant(self, key: str | None) -> Tenant | None:
        """Whose key this is; None for nobody's. The time that it takes does not depend on the key."""
        if self._everybody is not None:
            return self._everybody
        digest = _digest(key or "")
        found = None
        for expected, tenant in self._digests:
            if hmac.compare_digest(digest, expected):
                found = tenant
        return found


def read_keys(file: str | None, environment: Mapping[str, str]) -> Keys:
    """Tenant -> key, from a file (a line each, `#` begins a comment) or from TINKER_LOCAL_API_KEYS (separated by commas).

    An entry is `tenant=tml-...` or only a key, whose tenant is then named after its digest. Behind it may stand, separated by
    spaces, `tokens_per_minute=N`, `rows=N`, `disk_mib=N` and `operator` (see Terms).
    Raises RequestError, which never shows a key; also for a file that every user of the machine may read or replace.
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
                "keys if somebody may have read them"
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
    found: dict[str, Any] = {}
    operator = False
    for word in words:
        name, _, value = word.partition("=")
        if word == "operator":
            operator = True
        elif name in _BOUNDS and value.isdecimal() and 0 < int(value) < 1 << 60:
            found[name] = int(value)
        else:
            raise RequestError(
                f"{where}: behind a key stand {', '.join(f'{bound}=N' for bound in _BOUNDS)} or operator"
            )
    return Terms(**found, operator=operator)


class KeysFile:
    """A file of keys that is read again when it has changed."""

    def __init__(self, file: str):
        self._file = file
        self._seen = self._version()

    def changed(self) -> Keys | None:
        """The keys of the file, if it is another one than at the last call. Raises RequestError for one that is wrong, once."""
        version = self._version()
        if version == self._seen:
            return None
        self._seen = version
        return read_keys(self._file, {})

    def _version(self) -> tuple[int, int, int] | None:
        try:
            found = Path(self._file).expanduser().stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()
