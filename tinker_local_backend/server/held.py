"""How many bytes requests hold while they come in and while they wait, by tenant and in total."""

from __future__ import annotations

import os
import sys
from collections import Counter
from typing import Any

from pydantic import BaseModel

from tinker_local_backend.server.access import Access, Tenant
from tinker_local_backend.server.config import MIB, ServerConfig
from tinker_local_backend.server.sessions import Draw, Refused

# What sampling takes in both processes together, as measured on lists of a million (CPython 3.11, numpy 2).
NUMBER_BYTES = 72
"""A number that a request lists (a token of its prompt, a target, the id of a stop): 6 as JSON on its way, 23 to 69 as an int of
the engine's lists and in its arrays."""
CELL_BYTES = 24
"""A cell of targets that come as a sparse tensor, which the engine fills up: 15, and its score."""
SAMPLE_BYTES = 1024
TOKEN_BYTES = 96
"""A sampled token with its logprob: 75 while it waits for the others, 8 in the answer. For a moment it takes 188, when the answer
is put together, which happens to one request at a time."""
TOPK_BYTES, ENTRY_BYTES = 640, 64
"""The arrays of likeliest tokens at one position (about 600 beside what is in them), and one entry of these: 12 to 17 while it
waits, 46 to 53 when the answer is put together, and 8 in the answer."""
REPLY_TOKEN_BYTES, REPLY_ENTRY_BYTES = 1024, 512
"""A token with its logprob, and an entry of its likeliest tokens, when an OpenAI-compatible reply is written: 919 and 476."""


def sampling_bytes(draw: Draw, context_length: int) -> int:
    """What a request to sample may take until its result is there."""
    drawn = draw.drawn(context_length)
    listed = (draw.prompt_tokens + draw.numbers) * NUMBER_BYTES + draw.cells * CELL_BYTES
    scores = draw.prompt_tokens * draw.prompt_topk * ENTRY_BYTES
    each = TOKEN_BYTES + (TOPK_BYTES + draw.topk * ENTRY_BYTES if draw.topk else 0)
    return listed + scores + draw.samples * SAMPLE_BYTES + drawn * each


def reply_bytes(draw: Draw, context_length: int) -> int:
    """What an OpenAI-compatible reply that tells logprobs may take, of the samples and of the prompt as far as it is scored."""
    drawn = draw.drawn(context_length) * (REPLY_TOKEN_BYTES + draw.topk * REPLY_ENTRY_BYTES)
    scored = draw.prompt_tokens * (REPLY_TOKEN_BYTES + draw.prompt_topk * REPLY_ENTRY_BYTES) if draw.prompt_topk else 0
    return drawn + scored


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
    """A ledger, with the bounds of a configuration. Belongs to one event loop."""

    def __init__(self, config: ServerConfig, access: Access):
        machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        total, of_tenant = config.max_waiting_total_mib, config.max_waiting_mib
        self._most = machine // 4 if total is None else total * MIB
        self._given = None if of_tenant is None else of_tenant * MIB
        self._access = access
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
        most_of_tenant = self._access.share(self._most, self._given)
        if count > most_of_tenant:
            raise Refused(
                413, f"the request takes {count} bytes while it waits; at most {most_of_tenant} are held for one tenant"
            )
        if self._of[tenant.name] + count > most_of_tenant:
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
