"""Which tokens each row of the KV cache holds, so that a prompt that begins like one of them is not prefilled again.

Rounds of a conversation, turns of a debate and few-shot headers all begin alike. Rows of ended sequences keep their contents
until their place is needed; the least recently used one goes first. Nothing here costs memory beyond the slab itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from tinker_local_backend.engine.kv_cache import KVCache
from tinker_local_backend.engine.lora import Adapter
from tinker_local_backend.engine.packing import shared_prefix

BLOCK = 16
"""Prefixes are looked up in steps of so many tokens; a shorter common prefix is not worth a copy."""

LENGTH_STEP = 64

CANDIDATES = 4
"""Rows compared token by token where several agree in all their blocks."""


@dataclass(eq=False)
class _Contents:
    """What a row holds: keys and values of these tokens under this adapter."""

    adapter: Adapter | None
    tokens: tuple[int, ...]
    row: int
    used: int
    keys: list[int] = field(default_factory=list)


class PrefixCache:
    """Contents of the rows of one KVCache, found by prefix. The rows below `running` belong to running sequences."""

    def __init__(self, cache: KVCache):
        self._cache = cache
        self._contents: list[_Contents | None] = []
        self._index: dict[int, list[_Contents]] = {}
        self._clock = itertools.count(1)

    def find(self, adapter: Adapter | None, tokens: tuple[int, ...]) -> tuple[int, int] | None:
        """(row, length) of the longest held prefix of `tokens`, at least a block and never all of them; else None."""
        found: list[_Contents] = []
        for key in _block_keys(adapter, tokens[:-1]):
            here = self._index.get(key)
            if not here:
                break
            found = here
        best, length = None, 0
        for contents in found[-CANDIDATES:]:
            common = shared_prefix(contents.tokens, tokens[:-1])  # hashes may collide: only equal tokens count
            if contents.adapter is adapter and common > length:
                best, length = contents, common
        if best is None or length < BLOCK:
            return None
        best.used = next(self._clock)
        return best.row, length

    def hold(self, row: int, adapter: Adapter | None, tokens: tuple[int, ...]) -> None:
        """Say that a row now holds these tokens."""
        self.drop(row)
        contents = _Contents(adapter, tokens, row, next(self._clock), list(_block_keys(adapter, tokens)))
        self._contents[row] = contents
        for key in contents.keys:
            self._index.setdefault(key, []).append(contents)

    def drop(self, row: int) -> None:
        """Say that a row holds nothing of use."""
        contents = self._contents[row]
        if contents is None:
            return
        for key in contents.keys:
            holders = self._index[key]
            holders.remove(contents)
            if not holders:
                del self._index[key]
        self._contents[row] = None

    def clear(self, row: int) -> None:
        """Say that a row holds nothing, and erase it: keys that are NaN would reach other sequences through masked positions."""
        self.drop(row)
        self._cache.erase_row(row)

    def move(self, source: int, target: int, tokens: int) -> None:
        """Row `target` takes over the first `tokens` of row `source`, which then holds nothing."""
        self._cache.copy_row(source, target, tokens)
        self.drop(target)
        self._rename(self._contents[source], target)
        self._contents[source] = None

    def swap(self, first: int, second: int, first_tokens: int, second_tokens: int) -> None:
        """Exchange two rows and what is known of them."""
        self._cache.swap_rows(first, second, first_tokens, second_tokens)
        at_first, at_second = self._contents[first], self._contents[second]
        self._rename(at_first, second)
        self._rename(at_second, first)

    def _rename(self, contents: _Contents | None, row: int) -> None:
        self._contents[row] = contents
        if contents is not None:
            contents.row = row

    def make_room(self, rows: int, length: int) -> None:
        """Let the slab have `rows` rows of `length` tokens for running sequences, and room for what is held if possible."""
        # Rounded up, so that conversations that grow a little do not move the whole slab each time.
        rounded = -(-length // LENGTH_STEP) * LENGTH_STEP
        held = sum(contents is not None for contents in self._contents)
        length = rounded if self._cache.rows_that_fit(rounded) >= rows + held else length
        length = max(length, self._cache.length if self._cache.rows_that_fit(self._cache.length) >= rows else 0)
        fitting = self._cache.rows_that_fit(length)
        # More than is asked for, if the budget has it: every growth moves all rows and leaves holes in the heap.
        generous = max(min(rows + held, 2 * rows), 2 * self._cache.rows if rows > self._cache.rows else 0)
        wanted = max(rows, min(generous, fitting), min(self._cache.rows, fitting))
        if wanted == self._cache.rows and length == self._cache.length:
            return
        for row in range(wanted, len(self._contents)):
            self.drop(row)
        self._cache.resize(wanted, length)
        self._contents = [*self._contents[:wanted], *[None] * (wanted - len(self._contents))]
        for row, contents in enumerate(self._contents):
            if contents is not None and len(contents.tokens) > length:
                self.hold(row, contents.adapter, contents.tokens[:length])

    def claim(self, row: int, end: int, reuse: tuple[int, int] | None) -> None:
        """Make a free row ready to be written, holding the prefix `reuse` = (row, length) already if that is given.

        Rows before `row` are in use, those from `row` to `end` will be claimed next. What the row held moves to a free row
        behind them that is of less use, if there is one.
        """
        if reuse is None:
            self._save(row, end)
            return
        source, length = reuse
        found = self._contents[source]
        assert found is not None
        whole = length == len(found.tokens)
        if source > row and (whole or source < end):
            displaced = self._contents[row]
            self.swap(row, source, len(displaced.tokens) if displaced else 0, len(found.tokens))
        elif source != row:  # in use, or worth keeping for its longer tail (it was used last, so nothing displaces it)
            self._save(row, end)
            self._cache.copy_row(source, row, length)
        self.hold(row, found.adapter, found.tokens[:length])

    def _save(self, row: int, end: int) -> None:
        contents = self._contents[row]
        if contents is None:
            return
        used = {row: contents.used}
        used.update({i: other.used if other else 0 for i, other in enumerate(self._contents) if i >= end})
        least = min(used, key=used.__getitem__)
        if least == row:
            self.drop(row)
        else:
            self.move(row, least, len(contents.tokens))

    def forget(self, running: int) -> None:
        """Make nothing findable any more; with nothing running, give the memory back."""
        for row in range(len(self._contents)):
            self.drop(row)
        if running == 0:
            self._contents = []
            self._index.clear()
            self._cache.resize(0, 0)


def _block_keys(adapter: Adapter | None, tokens: Sequence[int]):
    """A key for each whole block that stands for the adapter and all tokens up to the end of that block."""
    key = id(adapter)
    for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
        key = hash((key, tuple(tokens[start : start + BLOCK])))
        yield key
