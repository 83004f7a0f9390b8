"""The pages of the KV cache: which are free, and which sequences read the others.

A sequence has a table of pages, each for `PAGE_TOKENS` tokens. Full pages of a common prefix are shared and reference-counted;
no sequence writes to a page that another one reads. Pages without readers stay in the prefix cache (prefix_cache.py) until
they are evicted.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from tinker_local_backend.engine.model.kv_cache import PAGE_TOKENS, KVCache
from tinker_local_backend.engine.sampling.prefix_cache import Page, PrefixCache, Scope
from tinker_local_backend.engine.sampling.state_pool import StatePool

MIN_GROWTH, GROWTH_SHARE = 16, 2
"""The pool grows by at least MIN_GROWTH pages and 1 / GROWTH_SHARE of its size, because growing copies all pages."""


@dataclass(eq=False, slots=True)
class PageTable:
    """The pages of one sequence in order. The first `dropped` are already freed: they are outside every layer's window."""

    pages: list[Page] = field(default_factory=list)
    dropped: int = 0
    state: int | None = None
    """slot of the sequence's recurrent state, in a model with such layers"""

    @property
    def start(self) -> int:
        """Position of the first token in a page."""
        return self.dropped * PAGE_TOKENS

    @property
    def end(self) -> int:
        """Position after the last page."""
        return (self.dropped + len(self.pages)) * PAGE_TOKENS

    def drop_before(self, position: int) -> list[Page]:
        """Remove and return the pages that end before this position."""
        count = min(max(0, position // PAGE_TOKENS - self.dropped), len(self.pages))
        removed, self.pages = self.pages[:count], self.pages[count:]
        self.dropped += count
        return removed


class PoolFullError(Exception):
    """More pages were requested than are available."""


def pages_for(tokens: int) -> int:
    return -(-tokens // PAGE_TOKENS)


class PagePool:
    """Allocates pages, counts their readers, and evicts the least recently used from the prefix cache.

    Args:
        limit: bound on the pages. The pool starts empty and grows; `reset` and `evict` empty it again.
        fixed: allocate all pages at once instead.
        states: the pool of the states that are kept with cached prefixes.
    """

    def __init__(self, limit: int, fixed: bool = False, states: StatePool | None = None):
        self.limit = limit
        self.moves = 0
        """number of calls of `move`"""
        self._fixed = fixed
        self.soft_limit = limit
        """the pool grows beyond this many pages only if no cached page is left to evict"""
        self.capacity = 0
        """pages that exist; the tensors are resized to it (KVCache.resize)"""
        self._free: list[int] = []
        self._by_slot: list[Page | None] = []
        self.prefixes = PrefixCache(self._set_free, states)
        self.reset()

    @property
    def available(self) -> int:
        """Pages that `allocate` can give now."""
        return len(self._free) + len(self.prefixes.idle) + max(0, self.limit - self.capacity)

    @property
    def unused(self) -> int:
        """Pages that `allocate` can give now without evicting any."""
        return len(self._free) + max(0, min(self.soft_limit, self.limit) - self.capacity)

    @property
    def read(self) -> int:
        """Pages with readers."""
        return self.capacity - len(self._free) - len(self.prefixes.idle)

    @property
    def idle(self) -> int:
        """Cached pages without readers."""
        return len(self.prefixes.idle)

    def allocate(self, count: int = 1) -> list[Page]:
        """Pages with one reader each: free ones, then new ones, then the least recently used of the prefix cache.

        Raises PoolFullError, and changes nothing, if these are not enough.
        """
        if count > self.available:
            raise PoolFullError(f"{count} pages requested, {self.available} of {self.limit} available")
        self._grow(count - len(self._free), min(self.soft_limit, self.limit))
        while len(self._free) < count and self.prefixes.idle:
            self.prefixes.evict(next(iter(self.prefixes.idle)))
        self._grow(count - len(self._free), self.limit)
        allocated = [Page(heapq.heappop(self._free), 1) for _ in range(count)]
        for page in allocated:
            self._by_slot[page.slot] = page
        return allocated

    def _grow(self, missing: int, limit: int) -> None:
        if missing <= 0 or self.capacity >= limit:
            return
        growth = max(missing, MIN_GROWTH, self.capacity // GROWTH_SHARE)
        larger = min(limit, self.capacity + growth)
        for slot in range(self.capacity, larger):
            heapq.heappush(self._free, slot)
        self._by_slot.extend([None] * (larger - self.capacity))
        self.capacity = larger

    def share(self, pages: Iterable[Page]) -> None:
        """Add a reader to each."""
        for page in pages:
            page.readers += 1
            self.prefixes.idle.pop(page, None)

    def free(self, pages: Sequence[Page]) -> list[int]:
        """Remove a reader from each page of a table. Returns the slots that must be erased."""
        erase: list[int] = []
        for page in reversed(pages):  # children first
            page.readers -= 1
            if page.readers == 0:
                if page.parent is None:
                    erase.extend(self._set_free(page))
                else:
                    self.prefixes.idle[page] = None
        return erase

    def invalidate(self, pages: Iterable[Page]) -> list[int]:
        """Evict pages that hold NaN, and their descendants. Returns the slots that must be erased now."""
        erase: list[int] = []
        for page in pages:
            page.has_nan = True
            if page.parent is not None:
                erase.extend(self.prefixes.evict(page, has_nan=True))
        return erase

    def make_writable(self, page: Page) -> None:
        """Evict a cached page before its only reader writes to it."""
        assert page.readers == 1
        if page.parent is not None:
            self.prefixes.evict(page)

    def _set_free(self, page: Page) -> list[int]:
        heapq.heappush(self._free, page.slot)
        self._by_slot[page.slot] = None
        return [page.slot] if page.has_nan else []

    def evict(self, scopes: Callable[[Scope], bool] = lambda _: True) -> None:
        """Evict these scopes from the prefix cache. The pool becomes empty if no page is read or cached any more."""
        self.prefixes.evict_scopes(scopes)
        if self.read == self.idle == 0:
            self.reset()

    def reset(self) -> None:
        """Free every page, including those with readers."""
        self.capacity = 0
        self._free, self._by_slot = [], []
        self.prefixes.clear()
        if self._fixed:
            self._grow(self.limit, self.limit)

    def move(self, moves: Sequence[tuple[int, int]]) -> None:
        """Move pages to other slots, (from, to) each."""
        self.moves += 1
        pages = [self._by_slot[source] for source, _ in moves]
        moved_free = any(page is None for page in pages)
        for page, (_, target) in zip(pages, moves, strict=True):
            self._by_slot[target] = page
            if page is not None:
                page.slot = target
        if moved_free:
            self._free = [slot for slot, page in enumerate(self._by_slot) if page is None]  # sorted, so a heap


@dataclass(frozen=True, eq=False)
class PageStore:
    """A pool, the tensors that hold its pages, and the states of its sequences.

    Methods apply the pool's method of the same name to both the pool and the tensors.
    """

    pool: PagePool
    cache: KVCache
    states: StatePool | None = None

    def resize(self) -> None:
        if self.cache.pages != self.pool.capacity:
            self.cache.resize(self.pool.capacity)

    def free(self, pages: Sequence[Page]) -> None:
        self.cache.erase(self.pool.free(pages))

    def cache_prefix(
        self,
        adapter: object,
        tokens: Sequence[int],
        pages: Sequence[Page],
        kept: Sequence[tuple[int, int]],
        scope: Scope,
    ) -> None:
        """Insert the pages with these tokens into the prefix cache, and the states `kept`, as (number of tokens, slot)."""
        prefixes = self.pool.prefixes
        prefixes.insert(adapter, tokens, pages, scope)
        for count, slot in kept:
            assert self.states is not None
            page = prefixes.page_at(adapter, tokens[:count], scope)
            if page is None:
                self.states.free([slot])
            else:
                self.states.keep(page, (count - 1) % PAGE_TOKENS + 1, slot)

    def end(self, table: PageTable) -> None:
        """Free the pages and the state of a sequence."""
        self.free(table.pages)
        if self.states is not None and table.state is not None:
            self.states.free([table.state])
            table.state = None

    def invalidate(self, pages: Iterable[Page]) -> None:
        self.cache.erase(self.pool.invalidate(pages))

    def move(self, moves: Sequence[tuple[int, int]]) -> None:
        self.pool.move(moves)
        self.cache.copy([source for source, _ in moves], [target for _, target in moves])
