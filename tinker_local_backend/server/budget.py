"""Memory accounting of requests by tenant."""

from __future__ import annotations

import os
import sys
from collections import Counter
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from tinker_local_backend.server.access import Access, Tenant
from tinker_local_backend.server.config import MIB, ServerConfig
from tinker_local_backend.server.errors import Refused

# Bytes that sampling takes in both processes together, measured on lists of a million items (CPython 3.11, numpy 2).
NUMBER_BYTES = 72
"""One number of a request (a prompt token, a target, a stop id): 6 as JSON, 23 to 69 in the engine's lists and arrays."""
CELL_BYTES = 24
"""One cell of sparse targets, which the engine converts to dense: 15, and its score."""
SAMPLE_BYTES = 1024
TOKEN_BYTES = 96
"""A sampled token with its logprob: 75 until all samples are done, 8 in the answer, 188 while that is encoded (one at a time)."""
TOPK_BYTES, ENTRY_BYTES = 640, 64
"""The top-k arrays of one position (about 600 without their entries), and one entry: 12 to 17 until all samples are done, 46 to
53 while the answer is encoded, and 8 in the answer."""
REPLY_TOKEN_BYTES, REPLY_ENTRY_BYTES = 1024, 512
"""A token with its logprob, and one top-k entry, while an OpenAI-compatible reply is written: 919 and 476."""


@dataclass(frozen=True)
class Draw:
    """A sampling request for the engine, with the sizes that its cost depends on."""

    request: bytes
    """JSON for wire.codec.sample_arguments"""
    samples: int
    prompt_tokens: int
    max_tokens: int | None
    """per sample; None: the rest of the context"""
    topk: int = 0
    """likeliest tokens reported for each sampled token"""
    prompt_topk: int = 0
    """values reported for each prompt token"""
    numbers: int = 0
    """targets and stop ids"""
    cells: int = 0
    """cells of sparse targets, including empty ones"""

    def drawn(self, context_length: int) -> int:
        """Upper bound on the tokens of all samples."""
        room = max(0, context_length - self.prompt_tokens)
        return self.samples * (room if self.max_tokens is None else min(self.max_tokens, room))

    def tokens(self, context_length: int) -> int:
        """Upper bound on the tokens of prompt and samples."""
        return self.prompt_tokens + self.drawn(context_length)

    def bytes(self, context_length: int) -> int:
        """Upper bound on the memory until the result exists."""
        listed = (self.prompt_tokens + self.numbers) * NUMBER_BYTES + self.cells * CELL_BYTES
        scores = self.prompt_tokens * self.prompt_topk * ENTRY_BYTES
        each = TOKEN_BYTES + (TOPK_BYTES + self.topk * ENTRY_BYTES if self.topk else 0)
        return listed + scores + self.samples * SAMPLE_BYTES + self.drawn(context_length) * each

    def reply_bytes(self, context_length: int) -> int:
        """Upper bound on the memory of an OpenAI-compatible reply with logprobs of samples, and of the prompt if it is scored."""
        drawn = self.drawn(context_length) * (REPLY_TOKEN_BYTES + self.topk * REPLY_ENTRY_BYTES)
        each = REPLY_TOKEN_BYTES + self.prompt_topk * REPLY_ENTRY_BYTES if self.prompt_topk else 0
        return drawn + self.prompt_tokens * each


_INT_BYTES = 36
"""per item of a list of ints: pointer and object"""


def memory_of(value: Any) -> int:
    """Memory of a parsed body in bytes, which can be twenty times its size as JSON."""
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


class Account:
    """Amounts of one resource, reserved by tenant. Belongs to one event loop."""

    def __init__(self) -> None:
        self._of: Counter[str] = Counter()

    @property
    def total(self) -> int:
        return self._of.total()

    def of(self, tenant: Tenant) -> int:
        """The amount that a tenant has reserved."""
        return self._of[tenant.name]

    def reserve(self, tenant: Tenant, count: int = 0) -> Reservation:
        """Reserve `count`. Raises Refused as `check` does."""
        reservation = Reservation(self, tenant)
        reservation.extend(count)
        return reservation

    def check(self, tenant: Tenant, count: int) -> None:
        """Raise Refused if `count` more exceeds a limit. Unlimited here; subclasses override it."""

    def add(self, tenant: Tenant, count: int) -> None:
        """Called by Reservation only."""
        self._of[tenant.name] += count
        if not self._of[tenant.name]:
            del self._of[tenant.name]


class Reservation:
    """The amount that one request, or a `with` block, has reserved."""

    def __init__(self, account: Account, tenant: Tenant):
        self._account, self._tenant, self.count = account, tenant, 0

    def extend(self, count: int) -> None:
        """Reserve `count` more. Raises Refused as the account's `check` does, and then changes nothing."""
        self._account.check(self._tenant, count)
        self._account.add(self._tenant, count)
        self.count += count

    def release(self) -> None:
        """Free everything; idempotent."""
        count, self.count = self.count, 0
        self._account.add(self._tenant, -count)

    def transfer(self) -> Reservation:
        """Move the whole amount into a new reservation."""
        other = Reservation(self._account, self._tenant)
        other.count, self.count = self.count, 0
        return other

    def __enter__(self) -> Reservation:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class MemoryBudget(Account):
    """Bytes of requests, within the limits of the configuration."""

    def __init__(self, config: ServerConfig, access: Access):
        super().__init__()
        machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        total, of_tenant = config.max_waiting_total_mib, config.max_waiting_mib
        self._limit = machine // 4 if total is None else total * MIB
        self._tenant_limit = None if of_tenant is None else of_tenant * MIB
        self._access = access

    def check(self, tenant: Tenant, count: int) -> None:
        """Raise Refused if `count` bytes never fit (413), or do not fit now (429)."""
        limit, reserved = self._access.tenant_limit(self._limit, self._tenant_limit), self.of(tenant)
        if count > limit:
            raise Refused(413, f"the request takes {count} bytes while it waits; the limit per tenant is {limit}")
        if reserved + count > limit:
            raise Refused(
                429,
                f"{reserved} bytes of your requests are waiting (max_waiting_mib); send this one again when some are done",
            )
        if self.total + count > self._limit:
            raise Refused(429, "too many bytes of all tenants' requests are waiting; send this one again")
