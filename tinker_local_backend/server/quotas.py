"""What a tenant may use: tokens a minute, and room on the disk."""

from __future__ import annotations

import asyncio
import math
import os
import time
from pathlib import Path

from tinker_local_backend.server.access import Tenant
from tinker_local_backend.server.config import MIB
from tinker_local_backend.server.errors import Refused
from tinker_local_backend.server.held import Holding, Ledger

MINUTE = 60.0


class TokenQuotas:
    """A bucket for each tenant with a bound: it holds the tokens of a minute and fills up at that rate.

    What is used is known afterwards, so a bucket may be overdrawn by what runs; then nothing more is taken until it is filled.
    """

    def __init__(self) -> None:
        self._levels: dict[str, tuple[float, float]] = {}
        """tokens, and when that was"""

    def check(self, tenant: Tenant, now: float | None = None) -> None:
        """Raise Refused (429), saying when to come again, while a tenant has used up what he may."""
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
        """So many were used."""
        bound = tenant.terms.tokens_per_minute
        if bound is not None and tokens:
            now = time.monotonic() if now is None else now
            self._levels[tenant.name] = self._level(tenant, bound, now) - tokens, now

    def _level(self, tenant: Tenant, bound: int, now: float) -> float:
        level, then = self._levels.get(tenant.name, (float(bound), now))
        return min(float(bound), level + (now - then) * bound / MINUTE)


class Disk(Ledger):
    """Room on the disk: beside what lies there, what those take who have not written yet."""

    async def room(self, tenant: Tenant, count: int) -> Holding:
        """Room for so many bytes more, until what is written counts by itself. Raises Refused (403) where there is none."""
        bound = tenant.terms.disk_mib
        if bound is not None:
            before = self.of(tenant)  # what is written and given back meanwhile may not have been seen
            used = await asyncio.to_thread(bytes_below, tenant.home) + max(before, self.of(tenant))
            if used + count > bound * MIB:
                raise Refused(
                    403,
                    f"what you have on disk takes {used / MIB:.1f} MiB with what is being saved, this would take "
                    f"{count / MIB:.1f} more, and {bound} are yours (disk_mib); delete checkpoints that are no longer needed",
                )
        return self.hold(tenant, count)


def bytes_below(folder: Path) -> int:
    """Of all files of a folder; 0 for none."""
    total = 0
    for place, _, files in os.walk(folder):
        for name in files:
            try:
                total += os.lstat(os.path.join(place, name)).st_size
            except OSError:  # gone in the meantime
                continue
    return total
