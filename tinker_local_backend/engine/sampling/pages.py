"""Who holds which page of the KV cache, and which pages hold what: the bookkeeping of a pool of fixed-size pages.

A sequence has a table of pages, each for `PAGE_TOKENS` tokens. Full pages that several sequences begin with are shared and
counted; nobody writes into a page that another one reads. What a page holds stays findable after its sequence has ended, until
the page is needed: pages are nodes of a tree, from a root for each adapter and each group of requests that may know of each
other downwards, so a prompt finds the longest beginning that is still there by comparing its own tokens. Nothing here touches
a tensor (kv_cache.py does).
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from tinker_local_backend.engine.model.kv_cache import PAGE_TOKENS
from tinker_local_backend.engine.model.packing import shared_prefix

MIN_FOUND = 16
"""A shorter common beginning is not worth a copy."""

CANDIDATES = 64
"""Pages compared token by token where no whole page goes on as the prompt does."""

LEAST_GROWTH = 16
"""The pool grows by at least so many pages,"""

GROWTH_SHARE = 2
"""and by at least one for so many that there are: every growth copies the pages that exist."""


@dataclass(eq=False, slots=True)
class Page:
    """A page that sequences read, or that holds what a later one may begin with."""

    slot: int
    """its place in the pool"""
    readers: int = 0
    tokens: tuple[int, ...] = ()
    """what it is found by; fewer than a page's while it is not full"""
    before: Page | None = field(default=None, repr=False)
    """the page that it is found behind; None: nobody finds it"""
    behind: dict[tuple[int, ...], Page] = field(default_factory=dict, repr=False)
    spoiled: bool = False
    """holds NaN, and must be erased before anybody else gets it"""


@dataclass(frozen=True)
class Found:
    """The beginning of a prompt that is in the pool: whole pages, and the first `tail_tokens` of another one."""

    pages: tuple[Page, ...] = ()
    tail: Page | None = None
    tail_tokens: int = 0

    @property
    def tokens(self) -> int:
        return len(self.pages) * PAGE_TOKENS + self.tail_tokens


@dataclass(eq=False, slots=True)
class PageTable:
    """The pages of one sequence in order. The first `dropped` are given back already: no layer sees them any more."""

    pages: list[Page] = field(default_factory=list)
    dropped: int = 0

    @property
    def start(self) -> int:
        """Position of the first token that is still there."""
        return self.dropped * PAGE_TOKENS

    @property
    def end(self) -> int:
        """Tokens that have a place."""
        return (self.dropped + len(self.pages)) * PAGE_TOKENS

    def drop_before(self, position: int) -> list[Page]:
        """Take out the pages with nothing but tokens before this position."""
        count = min(max(0, position // PAGE_TOKENS - self.dropped), len(self.pages))
        gone, self.pages = self.pages[:count], self.pages[count:]
        self.dropped += count
        return gone


class PoolFullError(Exception):
    """More pages were asked for than can be had."""


def pages_of(tokens: int) -> int:
    """How many pages so many tokens take."""
    return -(-tokens // PAGE_TOKENS)


Scope = tuple[str, ...]
"""Who finds what: equal for requests that share prefixes; the first part is their tenant, or "" for all."""


class PagePool:
    """Counts the readers of each page, finds pages by content, and takes back the one that was used least recently.

    Args:
        most: pages that there may ever be. The pool begins empty and grows; `reset` and `forget` make it empty again.
        fixed: all of them are there from the beginning, and always.
    """

    def __init__(self, most: int, fixed: bool = False):
        self.most = most
        self.moves = 0
        """how often pages have changed places"""
        self._fixed = fixed
        self.eager = most
        """the pool grows beyond so many pages only when there is no findable page left to take"""
        self.capacity = 0
        """pages that there are; the tensors follow it (KVCache.resize)"""
        self._free: list[int] = []
        self._idle: OrderedDict[Page, None] = OrderedDict()
        """findable, read by nobody; the least recently used first, and what is behind a page before it"""
        self._at: list[Page | None] = []
        self._roots: dict[tuple[int, Scope], tuple[object, Page]] = {}
        """by the identity of an adapter, which is kept alive, and by who shares its prefixes"""
        self.reset()

    @property
    def available(self) -> int:
        """Pages that `take` can give now."""
        return len(self._free) + len(self._idle) + max(0, self.most - self.capacity)

    @property
    def spare(self) -> int:
        """Pages that `take` can give now without anything being forgotten."""
        return len(self._free) + max(0, min(self.eager, self.most) - self.capacity)

    @property
    def read(self) -> int:
        """Pages that sequences hold."""
        return self.capacity - len(self._free) - len(self._idle)

    @property
    def idle(self) -> int:
        """Pages that nobody reads and that can still be found."""
        return len(self._idle)

    def take(self, count: int = 1) -> list[Page]:
        """Pages of their own for a reader: free ones, else new ones, else those that were used least recently.

        Raises PoolFullError if that is not enough; nothing has changed then.
        """
        if count > self.available:
            raise PoolFullError(f"{count} pages wanted, {self.available} of {self.most} available")
        self._grow(count - len(self._free), min(self.eager, self.most))
        while len(self._free) < count and self._idle:
            self._forget_page(next(iter(self._idle)))
        self._grow(count - len(self._free), self.most)
        taken = [Page(heapq.heappop(self._free), 1) for _ in range(count)]
        for page in taken:
            self._at[page.slot] = page
        return taken

    def _grow(self, missing: int, most: int) -> None:
        if missing <= 0 or self.capacity >= most:
            return
        growth = max(missing, LEAST_GROWTH, self.capacity // GROWTH_SHARE)
        larger = min(most, self.capacity + growth)
        for slot in range(self.capacity, larger):
            heapq.heappush(self._free, slot)
        self._at.extend([None] * (larger - self.capacity))
        self.capacity = larger

    def share(self, pages: Iterable[Page]) -> None:
        """One more reader for each."""
        for page in pages:
            page.readers += 1
            self._idle.pop(page, None)

    def release(self, pages: Sequence[Page]) -> list[int]:
        """One reader less for each page of a table. Returns the slots that must be erased."""
        erase: list[int] = []
        for page in reversed(pages):  # what is behind goes first
            page.readers -= 1
            if page.readers == 0:
                if page.before is None:
                    erase.extend(self._set_free(page))
                else:
                    self._idle[page] = None
        return erase

    def spoil(self, pages: Iterable[Page]) -> list[int]:
        """These hold NaN: nobody finds them any more, nor what is behind them. Returns the slots that must be erased now."""
        erase: list[int] = []
        for page in pages:
            page.spoiled = True
            if page.before is not None:
                erase.extend(self._forget_page(page, spoiled=True))
        return erase

    def take_over(self, page: Page) -> None:
        """The one reader of a page is about to write into it: it is no longer found as what it was."""
        assert page.readers == 1
        if page.before is not None:
            self._forget_page(page)

    def hold(self, owner: object, tokens: Sequence[int], pages: Sequence[Page], scope: Scope = ()) -> None:
        """Make the pages of a table findable: together they hold these tokens under this adapter, for those of this scope.

        Where an equal page is known already, that one stays the one to be found.
        """
        before = self._root(owner, scope)
        for i, page in enumerate(pages):
            key = tuple(tokens[i * PAGE_TOKENS : (i + 1) * PAGE_TOKENS])
            if not key:
                break
            known = before.behind.get(key)
            if known is None:
                if page.before is not None:  # it was not full then
                    del page.before.behind[page.tokens]
                page.tokens, page.before = key, before
                before.behind[key] = known = page
            before = known

    def find(self, owner: object, tokens: Sequence[int], scope: Scope = ()) -> Found:
        """The longest beginning of `tokens` that is held, at least `MIN_FOUND` tokens and never all of them."""
        _, last = self._roots.get((id(owner), scope), (None, None))
        if last is None:
            return Found()
        known = tuple(tokens[:-1])
        pages: list[Page] = []
        while (key := known[len(pages) * PAGE_TOKENS : (len(pages) + 1) * PAGE_TOKENS]) and len(key) == PAGE_TOKENS:
            page = last.behind.get(key)
            if page is None:
                break
            pages.append(page)
            last = page
        tail, length = None, 0
        for page in islice(reversed(last.behind.values()), CANDIDATES if key else 0):
            common = shared_prefix(page.tokens, key)
            if common > length:
                tail, length = page, common
        found = Found(tuple(pages), tail, length)
        return found if found.tokens >= MIN_FOUND else Found()

    def _root(self, owner: object, scope: Scope) -> Page:
        return self._roots.setdefault((id(owner), scope), (owner, Page(slot=-1)))[1]

    def _forget_page(self, page: Page, spoiled: bool = False) -> list[int]:
        """Nobody finds this page any more, nor what is behind it. Returns the slots that must be erased."""
        assert page.before is not None
        before = page.before
        del before.behind[page.tokens]
        if not before.behind:  # of a root: its adapter need not be kept alive any longer
            self._roots = {key: (owner, root) for key, (owner, root) in self._roots.items() if root is not before}
        erase: list[int] = []
        lost = [page]
        while lost:
            one = lost.pop()
            lost.extend(one.behind.values())
            one.behind, one.before, one.tokens = {}, None, ()
            one.spoiled |= spoiled
            if one.readers == 0:
                del self._idle[one]
                erase.extend(self._set_free(one))
        return erase

    def _set_free(self, page: Page) -> list[int]:
        heapq.heappush(self._free, page.slot)
        self._at[page.slot] = None
        return [page.slot] if page.spoiled else []

    def forget(self, scopes: Callable[[Scope], bool] = lambda _: True) -> None:
        """Nothing of these scopes is findable any more. Where that is all, and there are no readers, the pool is empty again."""
        roots = [(scopes(scope), root) for (_, scope), (_, root) in self._roots.items()]
        if not all(gone for gone, _ in roots):
            for page in [page for gone, root in roots if gone for page in root.behind.values()]:
                self._forget_page(page)
            return
        if self.read == 0:
            self.reset()
            return
        self._roots.clear()
        self._idle.clear()
        for slot, page in enumerate(self._at):
            if page is not None and page.readers == 0:
                self._at[slot] = None
                heapq.heappush(self._free, slot)
            elif page is not None:
                page.before, page.tokens, page.behind = None, (), {}

    def reset(self) -> None:
        """Forget every page, whoever reads it."""
        self.capacity = 0
        self._free, self._at = [], []
        self._idle.clear()
        self._roots.clear()
        if self._fixed:
            self._grow(self.most, self.most)

    def move(self, moves: Sequence[tuple[int, int]]) -> None:
        """Pages change places, (from, to) each; the places that are left are those that are filled."""
        self.moves += 1
        pages = [self._at[source] for source, _ in moves]
        moved_free = any(page is None for page in pages)
        for page, (_, target) in zip(pages, moves, strict=True):
            self._at[target] = page
            if page is not None:
                page.slot = target
        if moved_free:
            self._free = [slot for slot, page in enumerate(self._at) if page is None]  # sorted, so a heap
