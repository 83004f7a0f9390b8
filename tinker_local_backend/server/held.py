"""How many bytes requests hold while they come in and while they wait, by tenant and in total."""

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


@dataclass(frozen=True)
class Draw:
    """What a sampling request asks for, on its way to the engine."""

    request: bytes
    """the JSON object that wire.codec.sample_arguments takes"""
    samples: int
    prompt_tokens: int
    max_tokens: int | None
    """of a sample; None: what the context has room for"""
    topk: int = 0
    """likeliest tokens that are told with each of a sample's"""
    prompt_topk: int = 0
    """values that are told of each token of the prompt"""
    numbers: int = 0
    """that it lists beside its prompt: targets, stops"""
    cells: int = 0
    """of sparse targets, with those that are empty"""

    def drawn(self, context_length: int) -> int:
        """Tokens that its samples may come to."""
        room = max(0, context_length - self.prompt_tokens)
        return self.samples * (room if self.max_tokens is None else min(self.max_tokens, room))

    def tokens(self, context_length: int) -> int:
        """That it may take in all."""
        return self.prompt_tokens + self.drawn(context_length)

    def bytes(self, context_length: int) -> int:
        """What it may take until its result is there."""
        listed = (self.prompt_tokens + self.numbers) * NUMBER_BYTES + self.cells * CELL_BYTES
        scores = self.prompt_tokens * self.prompt_topk * ENTRY_BYTES
        each = TOKEN_BYTES + (TOPK_BYTES + self.topk * ENTRY_BYTES if self.topk else 0)
        return listed + scores + self.samples * SAMPLE_BYTES + self.drawn(context_length) * each

    def reply_bytes(self, context_length: int) -> int:
        """What an OpenAI-compatible reply with logprobs may take, of the samples and of the prompt as far as it is scored."""
        drawn = self.drawn(context_length) * (REPLY_TOKEN_BYTES + self.topk * REPLY_ENTRY_BYTES)
        each = REPLY_TOKEN_BYTES + self.prompt_topk * REPLY_ENTRY_BYTES if self.prompt_topk else 0
        return drawn + self.prompt_tokens * each


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


class Ledger:
    """How much each tenant holds of something. Belongs to one event loop."""

    def __init__(self) -> None:
        self._of: Counter[str] = Counter()

    @property
    def total(self) -> int:
        return self._of.total()

    def of(self, tenant: Tenant) -> int:
        """What a tenant holds now."""
        return self._of[tenant.name]

    def hold(self, tenant: Tenant, count: int = 0) -> Holding:
        """Begin to hold so much. Raises Refused as `check` does."""
        holding = Holding(self, tenant)
        holding.grow(count)
        return holding

    def check(self, tenant: Tenant, count: int) -> None:
        """Raise Refused where so much more is too much."""

    def add(self, tenant: Tenant, count: int) -> None:
        """For Holding alone."""
        self._of[tenant.name] += count
        if not self._of[tenant.name]:
            del self._of[tenant.name]


class Holding:
    """What one request, or a body of code, holds of a ledger."""

    def __init__(self, ledger: Ledger, tenant: Tenant):
        self._ledger, self._tenant, self.count = ledger, tenant, 0

    def grow(self, count: int) -> None:
        """Hold more. Raises Refused as the ledger's `check` does, with nothing changed."""
        self._ledger.check(self._tenant, count)
        self._ledger.add(self._tenant, count)
        self.count += count

    def release(self) -> None:
        """Hold nothing any more. A second call changes nothing."""
        count, self.count = self.count, 0
        self._ledger.add(self._tenant, -count)

    def moved(self) -> Holding:
        """What this one held."""
        other = Holding(self._ledger, self._tenant)
        other.count, self.count = self.count, 0
        return other

    def __enter__(self) -> Holding:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class Held(Ledger):
    """Bytes of requests, with the bounds of a configuration."""

    def __init__(self, config: ServerConfig, access: Access):
        super().__init__()
        machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        total, of_tenant = config.max_waiting_total_mib, config.max_waiting_mib
        self._most = machine // 4 if total is None else total * MIB
        self._given = None if of_tenant is None else of_tenant * MIB
        self._access = access

    def check(self, tenant: Tenant, count: int) -> None:
        """Raise Refused where so many bytes more are never taken (413), or not now (429)."""
        most, held = self._access.share(self._most, self._given), self.of(tenant)
        if count > most:
            raise Refused(
                413, f"the request takes {count} bytes while it waits; at most {most} are held for one tenant"
            )
        if held + count > most:
            raise Refused(
                429,
                f"{held} bytes of your requests are waiting (max_waiting_mib); send this one again when some are done",
            )
        if self.total + count > self._most:
            raise Refused(429, "too many bytes of all tenants' requests are waiting; send this one again")
