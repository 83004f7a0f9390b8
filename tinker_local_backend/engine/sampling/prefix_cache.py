"""The prefix cache: which pages of the KV cache hold which tokens, so that a prompt reuses its longest cached prefix.

Pages are nodes of trees, with a root for each adapter and scope (a group of requests that share prefixes); a page's children
hold the tokens after it. A page stays cached after its sequence has ended, until it is evicted. Tensors are in kv_cache.py, and
the pool (pages.py) decides which pages to free.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol

from tinker_local_backend.engine.model.kv_cache import PAGE_TOKENS
from tinker_local_backend.engine.model.packing import shared_prefix

MIN_MATCH = 16
"""Minimum tokens of a match: a shorter one is not worth a copy."""

CANDIDATES = 64
"""Most children to compare token by token with the rest of a prompt, if none matches as a whole."""

Scope = tuple[str, ...]
"""Equal for requests that share prefixes; the first element is their tenant, or "" for all."""


@dataclass(eq=False, slots=True)
class Page:
    """A page that sequences read, or that is cached."""

    slot: int
    """its index in the pool"""
    readers: int = 0
    tokens: tuple[int, ...] = ()
    """the key in its parent; shorter than a page while it is not full"""
    parent: Page | None = field(default=None, repr=False)
    """None if the page is not cached"""
    children: dict[tuple[int, ...], Page] = field(default_factory=dict, repr=False)
    states: dict[int, int] = field(default_factory=dict, repr=False)
    """number of its tokens -> slot of the state kept after them (state_pool.py)"""
    has_nan: bool = False
    """must be erased before reuse"""


@dataclass(frozen=True)
class PrefixMatch:
    """The cached prefix of a prompt: whole pages, and the first `tail_tokens` of another one."""

    pages: tuple[Page, ...] = ()
    tail: Page | None = None
    tail_tokens: int = 0
    state: int | None = None
    """slot of the state after it, in a model with such layers"""

    @property
    def tokens(self) -> int:
        return len(self.pages) * PAGE_TOKENS + self.tail_tokens

    @property
    def all_pages(self) -> tuple[Page, ...]:
        return self.pages if self.tail is None else (*self.pages, self.tail)


class KeptStates(Protocol):
    """The states at positions of cached pages."""

    def touch(self, page: Page, tokens: int) -> None: ...

    def drop(self, page: Page) -> None: ...


class PrefixCache:
    """The trees of one pool.

    Args:
        free: takes an evicted page without readers, and returns the slots that must be erased.
        states: of a model with recurrent states, whose matches end where a state is kept; None: they end anywhere.
    """

    def __init__(self, free: Callable[[Page], list[int]], states: KeptStates | None = None):
        self._free, self._states = free, states
        self._roots: dict[tuple[int, Scope], tuple[object, Page]] = {}
        """by id(adapter), which is kept alive, and scope"""
        self.idle: OrderedDict[Page, None] = OrderedDict()
        """cached pages without readers in LRU order, children before parents"""

    def lookup(self, adapter: object, tokens: Sequence[int], scope: Scope = ()) -> PrefixMatch:
        """The longest cached prefix of `tokens`: at least `MIN_MATCH` tokens, and never all of them."""
        _, last = self._roots.get((id(adapter), scope), (None, None))
        if last is None:
            return PrefixMatch()
        known = tuple(tokens[:-1])
        pages: list[Page] = []
        while (key := known[len(pages) * PAGE_TOKENS : (len(pages) + 1) * PAGE_TOKENS]) and len(key) == PAGE_TOKENS:
            page = last.children.get(key)
            if page is None:
                break
            pages.append(page)
            last = page
        tail, length = None, 0
        for page in islice(reversed(last.children.values()), CANDIDATES if key else 0):
            common = shared_prefix(page.tokens, key)
            if self._states is not None:
                common = _last_state(page, common)
            if common > length:
                tail, length = page, common
        match = PrefixMatch(tuple(pages), tail, length)
        if self._states is not None:
            match = self._with_state(match)
        return match if match.tokens >= MIN_MATCH else PrefixMatch()

    def _with_state(self, match: PrefixMatch) -> PrefixMatch:
        """The match cut to its last kept state."""
        assert self._states is not None
        pages, tail, length = [*match.pages], match.tail, match.tail_tokens
        while tail is None or not length:
            if not pages:
                return PrefixMatch()
            tail = pages.pop()
            length = _last_state(tail, PAGE_TOKENS)
        self._states.touch(tail, length)
        if length == PAGE_TOKENS:
            return PrefixMatch((*pages, tail), state=tail.states[length])
        return PrefixMatch(tuple(pages), tail, length, tail.states[length])

    def page_at(self, adapter: object, tokens: Sequence[int], scope: Scope = ()) -> Page | None:
        """The cached page with the last of these tokens, or None unless all are cached. Of several the newest, as in `lookup`."""
        _, page = self._roots.get((id(adapter), scope), (None, None))
        for start in range(0, len(tokens), PAGE_TOKENS):
            if page is None:
                break
            key = tuple(tokens[start : start + PAGE_TOKENS])
            newest_first, whole = reversed(page.children.values()), page.children.get(key)
            page = whole or next((child for child in newest_first if child.tokens[: len(key)] == key), None)
        return page

    def insert(self, adapter: object, tokens: Sequence[int], pages: Sequence[Page], scope: Scope = ()) -> None:
        """Cache the pages of a table, which together hold these tokens. A page that is already cached with them stays."""
        parent = self._roots.setdefault((id(adapter), scope), (adapter, Page(slot=-1)))[1]
        for i, page in enumerate(pages):
            key = tuple(tokens[i * PAGE_TOKENS : (i + 1) * PAGE_TOKENS])
            if not key:
                break
            known = parent.children.get(key)
            if known is None:
                if page.parent is not None:  # it was cached while it was not full
                    del page.parent.children[page.tokens]
                page.tokens, page.parent = key, parent
                parent.children[key] = known = page
            parent = known

    def evict(self, page: Page, has_nan: bool = False) -> list[int]:
        """Drop a page and its descendants. Returns the slots that must be erased."""
        assert page.parent is not None
        parent = page.parent
        del parent.children[page.tokens]
        if not parent.children:  # a root without pages must not keep its adapter alive
            self._roots = {key: (adapter, root) for key, (adapter, root) in self._roots.items() if root is not parent}
        erase: list[int] = []
        dropped = [page]
        while dropped:
            one = dropped.pop()
            dropped.extend(one.children.values())
            one.children, one.parent, one.tokens = {}, None, ()
            if self._states is not None:
                self._states.drop(one)
            one.has_nan |= has_nan
            if one.readers == 0:
                del self.idle[one]
                erase.extend(self._free(one))
        return erase

    def evict_scopes(self, chosen: Callable[[Scope], bool]) -> None:
        for page in [
            p for (_, scope), (_, root) in self._roots.items() if chosen(scope) for p in root.children.values()
        ]:
            self.evict(page)

    def clear(self) -> None:
        """Drop all pages, without freeing them."""
        self._roots.clear()
        self.idle.clear()


def _last_state(page: Page, most: int) -> int:
    """The largest number of tokens of a page, up to `most`, after which a state is kept; 0 if there is none."""
    return max((tokens for tokens in page.states if tokens <= most), default=0)
