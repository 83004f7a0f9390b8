"""How many bytes requests hold while they come in and while they wait, by tenant and in total."""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

from pydantic import BaseModel

from tinker_local_backend.server.access import Tenant
from tinker_local_backend.server.sessions import Refused

PROMPT_TOKEN_BYTES, SAMPLE_BYTES = 40, 1024
"""What a token of a prompt and a sample take in the engine's process until they are done."""


_INT_BYTES = 36
"""of an item of a list of ints: the pointer and the object"""


def memory_of(value: Any) -> int:
    """Bytes that a parsed body takes, which may be twenty times those of its JSON."""
    total, rest = 0, [value]
    while rest:
        value = rest.pop()
        total += sys.getsizeof(value)
        if isinstance(value, BaseModel):
            total += sys.getsizeof(value.__dict__) + sys.getsizeof(value.model_fields_set)
            rest += (*value.__dict__.values(), value.model_extra)
        elif isinstance(value, dict):
            rest += value
            rest += value.values()
        elif isinstance(value, list):
            if set(map(type, value)) == {int}:
                total += _INT_BYTES * len(value)
            else:
                rest += value
    return total


class Held:
    """A ledger. Belongs to one event loop.

    Args:
        most_of_tenant, most: bytes that may be held for one tenant, and for all of them.
    """

    def __init__(self, most_of_tenant: int, most: int):
        self._most_of_tenant, self._most = most_of_tenant, most
        self._of: Counter[str] = Counter()
        self.total = 0

    def of(self, tenant: Tenant) -> int:
        """Bytes that are held for a tenant now."""
        return self._of[tenant.name]

    def hold(self, tenant: Tenant, count: int = 0) -> Holding:
        """Begin to hold so many bytes. Raises Refused as Holding.grow does."""
        holding = Holding(self, tenant)
        holding.grow(count)
        return holding

    def add(self, tenant: Tenant, count: int) -> None:
        """For Holding alone."""
        self.total += count
        self._of[tenant.name] += count
        if not self._of[tenant.name]:
            del self._of[tenant.name]

    def check(self, tenant: Tenant, count: int) -> None:
        """Raise Refused where so many bytes more are never taken (413), or not now (429)."""
        if count > min(self._most_of_tenant, self._most):
            raise Refused(
                413,
                f"the request takes {count} bytes while it waits; at most {self._most_of_tenant} are held for one tenant",
            )
        if self._of[tenant.name] + count > self._most_of_tenant:
            raise Refused(
                429,
                f"{self._of[tenant.name]} bytes of your requests are waiting (max_waiting_mib); send this one again when some "
                "are done",
            )
        if self.total + count > self._most:
            raise Refused(429, "too many bytes of all tenants' requests are waiting; send this one again")


class Holding:
    """Bytes that one request holds."""

    def __init__(self, ledger: Held, tenant: Tenant):
        self._ledger, self._tenant, self._count = ledger, tenant, 0

    @property
    def count(self) -> int:
        """Bytes that are held now."""
        return self._count

    def grow(self, count: int) -> None:
        """Hold more. Raises Refused (429, or 413 for what would never fit), with nothing changed."""
        self._ledger.check(self._tenant, count)
        self._ledger.add(self._tenant, count)
        self._count += count

    def release(self) -> None:
        """Hold nothing any more. A second call changes nothing."""
        count, self._count = self._count, 0
        self._ledger.add(self._tenant, -count)
