"""Quotas of a tenant: tokens per minute and disk space."""

from __future__ import annotations

import asyncio
import math
import os
import time
from pathlib import Path

from tinker_local_backend.server.access import Tenant
from tinker_local_backend.server.budget import Account, Reservation
from tinker_local_backend.server.config import MIB
from tinker_local_backend.server.errors import Refused

MINUTE = 60.0


class TokenQuotas:
    """A token bucket per limited tenant, with the capacity of one minute.
    Running requests may overdraw it, because usage is known afterwards; new ones are refused until it is positive again."""

    def __init__(self) -> None:
        self._levels: dict[str, tuple[float, float]] = {}
        """tokens left, and the time of that level"""

    def check(self, tenant: Tenant, now: float | None = None) -> None:
        """Raise Refused (429), with the time to retry after, while a tenant's bucket is empty."""
        bound = tenant.terms.tokens_per_minute
        if bound is None:
            return
        level = self._level(tenant, bound, time.monotonic() if now is None else now)
        if level <= 0:
            raise Refused(
                429,
                f"your {bound} tokens a minute are used up; send this one again later",
                retry_after=math.ceil((1 - level) * MINUTE / bound),
            )

    def spend(self, tenant: Tenant, tokens: float, now: float | None = None) -> None:
        """Take used tokens out of the bucket."""
        bound = tenant.terms.tokens_per_minute
        if bound is not None and tokens:
            now = time.monotonic() if now is None else now
            self._levels[tenant.name] = self._level(tenant, bound, now) - tokens, now

    def _level(self, tenant: Tenant, bound: int, now: float) -> float:
        level, then = self._levels.get(tenant.name, (float(bound), now))
        return min(float(bound), level + (now - then) * bound / MINUTE)


class Disk(Account):
    """Disk space reserved for files that are not written yet."""

    async def room(self, tenant: Tenant, count: int) -> Reservation:
        """Reserve `count` bytes until the files are written. Raises Refused (403) if they exceed the quota."""
        bound = tenant.terms.disk_mib
        if bound is not None:
            before = self.of(tenant)  # the scan may miss files whose reservation ends meanwhile
            used = await asyncio.to_thread(bytes_below, tenant.home) + max(before, self.of(tenant))
            if used + count > bound * MIB:
                raise Refused(
                    403,
                    f"your files take {used / MIB:.1f} MiB including running saves, this needs {count / MIB:.1f} more, and your "
                    f"limit is {bound} (disk_mib); delete checkpoints that are no longer needed",
                )
        return self.reserve(tenant, count)


def bytes_below(root: Path) -> int:
    """Total size of the files below a folder; 0 if there is none."""
    total = 0
    for folder, _, files in os.walk(root):
        for name in files:
            try:
                total += os.lstat(os.path.join(folder, name)).st_size
            except OSError:  # deleted meanwhile
                continue
    return total
