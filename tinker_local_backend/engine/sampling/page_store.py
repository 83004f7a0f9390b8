"""A pool of pages together with the tensors they lie in: what is done to one is done to the other."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tinker_local_backend.engine.model.kv_cache import KVCache
from tinker_local_backend.engine.sampling.pages import Page, PagePool


@dataclass(frozen=True, eq=False)
class PageStore:
    """Pages, and the keys and values in them."""

    pool: PagePool
    cache: KVCache

    def fit(self) -> None:
        """Let the tensors follow the pool."""
        if self.cache.pages != self.pool.capacity:
            self.cache.resize(self.pool.capacity)

    def release(self, pages: Sequence[Page]) -> None:
        """One reader less for each page of a table."""
        self.cache.erase(self.pool.release(pages))

    def spoil(self, pages: Iterable[Page]) -> None:
        """These hold NaN: nobody finds them any more, nor what is behind them."""
        self.cache.erase(self.pool.spoil(pages))

    def move(self, moves: Sequence[tuple[int, int]]) -> None:
        """Pages change places, (from, to) each."""
        self.pool.move(moves)
        self.cache.copy([source for source, _ in moves], [target for _, target in moves])
