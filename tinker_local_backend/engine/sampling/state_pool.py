"""The slots of a StateCache: which are free, which belong to sequences, and which are kept in the prefix cache.

Keys of a prefix are shared page by page. A recurrent state belongs to one exact prefix, so the prefix cache keeps states at
some positions of its pages, and a prompt continues from the last one on its cached prefix.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Sequence

from tinker_local_backend.engine.model.states import StateCache
from tinker_local_backend.engine.sampling.prefix_cache import Page

MIN_SLOTS = 8
"""Smallest limit of a pool."""

MIN_GROWTH, GROWTH_SHARE = 8, 2
"""The cache grows by at least MIN_GROWTH slots and 1 / GROWTH_SHARE of its size, because growing copies all states."""


class StatePool:
    """Allocates slots, and evicts the least recently used of the kept ones.

    Args:
        limit: slots beyond which kept states are evicted. Running sequences may use more; they are bounded elsewhere.
    """

    def __init__(self, cache: StateCache, limit: int):
        self.cache = cache
        self.limit = limit
        self._free: list[int] = []
        self._kept: OrderedDict[tuple[Page, int], None] = OrderedDict()
        """(page, number of its tokens) in LRU order; the page has the slot"""

    @classmethod
    def of(cls, cache: StateCache, available: int) -> StatePool | None:
        """A pool of at most `available` bytes; None for a model without states."""
        size = cache.bytes_per_sequence
        return cls(cache, max(MIN_SLOTS, available // size)) if size else None

    @property
    def capacity(self) -> int:
        """Slots that exist."""
        return self.cache.slots

    @property
    def kept(self) -> int:
        """Slots in the prefix cache."""
        return len(self._kept)

    @property
    def used(self) -> int:
        """Slots of sequences."""
        return self.capacity - len(self._free) - self.kept

    @property
    def stats(self) -> dict[str, int]:
        """Fields of SamplerStats."""
        return {"states": self.used, "states_idle": self.kept, "state_bytes": self.cache.bytes_per_sequence}

    def allocate(self, count: int = 1) -> list[int]:
        """Slots with undefined contents: free ones, then new ones, then those of the least recently used kept states."""
        self._grow(count - len(self._free), self.limit)
        while len(self._free) < count and self._kept:
            page, tokens = next(iter(self._kept))
            self._evict(page, tokens)
        self._grow(count - len(self._free), self.capacity + count)
        return [heapq.heappop(self._free) for _ in range(count)]

    def _grow(self, missing: int, limit: int) -> None:
        if missing <= 0 or self.capacity >= limit:
            return
        growth = max(missing, MIN_GROWTH, self.capacity // GROWTH_SHARE)
        first, larger = self.capacity, min(limit, self.capacity + growth)
        self.cache.resize(larger)
        for slot in range(first, larger):
            heapq.heappush(self._free, slot)

    def free(self, slots: Sequence[int]) -> None:
        for slot in slots:
            heapq.heappush(self._free, slot)

    def copies(self, slot: int, count: int) -> list[int]:
        """`count` new slots with copies of this one's state."""
        slots = self.allocate(count)
        self.cache.copy([slot] * count, slots)
        return slots

    def keep(self, page: Page, tokens: int, slot: int) -> None:
        """Keep the state after `tokens` tokens of a cached page, unless one is kept there. Takes ownership of the slot."""
        if tokens in page.states:
            self.free([slot])
        else:
            page.states[tokens] = slot
        self.touch(page, tokens)

    def touch(self, page: Page, tokens: int) -> None:
        """Mark a state as most recently used."""
        self._kept[page, tokens] = None
        self._kept.move_to_end((page, tokens))

    def _evict(self, page: Page, tokens: int) -> None:
        del self._kept[page, tokens]
        self.free([page.states.pop(tokens)])

    def drop(self, page: Page) -> None:
        """Free the states of a page that is no longer cached."""
        for tokens in [*page.states]:
            self._evict(page, tokens)

    def reset(self) -> None:
        """Free every slot, including those of sequences, and the memory."""
        for page, _ in self._kept:
            page.states.clear()
        self._kept.clear()
        self._free = []
        self.cache.resize(0)

    def release(self) -> None:
        """Free the memory if no slot is used or kept."""
        if self.used == self.kept == 0:
            self.reset()
