"""Keys and values of sequences: for each layer one tensor of pages, read and written by the numbers of its pages.

Which sequence has which page is the business of pages.py. Tensors grow with the pool and keep what they hold.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

PAGE_TOKENS = 32
"""Measured on CPUs from 8 to 512 sequences: with 16 the products are too small, with 64 too much of the last pages is empty."""

LEAST_HUGE = 4 << 20
"""Bytes from which numpy asks Linux for huge pages, which torch does not do: the first write then takes a third of the time."""

ALIGNMENT = 64
"""of what torch allocates, in bytes"""


@dataclass(eq=False)
class Places:
    """Where keys of a pass are stored: row `rows[i]` of the pass goes to token `offsets[i]` of page `slots[i]`; int64 each.

    `rows` None: row i goes to place i.
    """

    slots: torch.Tensor
    offsets: torch.Tensor
    rows: torch.Tensor | None = None
    _index: torch.Tensor | None = None

    def index(self, kv_heads: int) -> torch.Tensor:
        """(places * kv_heads,): the same in a layer's keys (pages * kv_heads * PAGE_TOKENS, head_dim), for all its heads."""
        if self._index is None:
            heads = torch.arange(kv_heads, device=self.slots.device)
            self._index = ((self.slots[:, None] * kv_heads + heads) * PAGE_TOKENS + self.offsets[:, None]).flatten()
        return self._index


class KVCache:
    """Layout per layer: (2, pages, kv_heads, PAGE_TOKENS, head_dim), keys before values.

    While the tensors grow, one layer exists twice for a moment. With `fixed` pages there are so many from the beginning, and
    their addresses never change.
    """

    def __init__(
        self,
        layers: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        fixed: int | None = None,
    ):
        self.pages = fixed or 0
        self._fixed = fixed is not None
        self.kv_heads, self._head_dim = kv_heads, head_dim
        self._dtype, self._device = dtype, device
        self._layers = [self._empty(self.pages).zero_() for _ in range(layers)]

    def _empty(self, pages: int) -> torch.Tensor:
        """Whoever takes it zeroes it: masked positions still enter the matrix product, and 0 * NaN would be NaN."""
        shape = (2, pages, self.kv_heads, PAGE_TOKENS, self._head_dim)
        size = math.prod(shape) * self._dtype.itemsize
        if self._device.type != "cpu" or size < LEAST_HUGE:
            return torch.empty(shape, dtype=self._dtype, device=self._device)
        raw = np.empty(size + ALIGNMENT, dtype=np.uint8)
        start = -raw.ctypes.data % ALIGNMENT
        return torch.as_tensor(raw[start : start + size]).view(self._dtype).view(shape)

    def resize(self, pages: int) -> None:
        """Have so many pages; those that stay keep their contents. 0 gives the memory back, or zeroes it if it is fixed."""
        if self._fixed:
            if pages == 0:
                for layer in self._layers:
                    layer.zero_()
            return
        if pages == self.pages != 0:  # at 0 some layers may have pages all the same, after a growth that failed
            return
        kept = min(pages, self.pages)
        for layer, old in enumerate(self._layers):
            new = self._empty(pages)
            new[:, :kept] = old[:, :kept]
            new[:, kept:] = 0
            self._layers[layer] = new
        self.pages = pages

    @property
    def bytes(self) -> int:
        """Memory that all layers take now."""
        return sum(layer.untyped_storage().nbytes() for layer in self._layers)

    def layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of all pages, (pages, kv_heads, PAGE_TOKENS, head_dim) each."""
        keys, values = self._layers[layer].unbind()
        return keys, values

    def write(self, layer: int, places: Places, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store keys and values of a pass, each (kv_heads, rows of the pass, head_dim)."""
        keys, values = keys.transpose(0, 1), values.transpose(0, 1)
        if places.rows is not None:
            keys, values = keys[places.rows], values[places.rows]
        index, dim = places.index(self.kv_heads), self._head_dim
        for stored, new in zip(self.layer(layer), (keys, values), strict=True):
            stored.view(-1, dim).index_copy_(0, index, new.reshape(-1, dim))

    def read(self, layer: int, slots: torch.Tensor, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the first `tokens` of a table of pages, each (1, kv_heads, tokens, head_dim)."""
        both = self._layers[layer][:, slots].transpose(1, 2).flatten(2, 3)[:, None, :, :tokens]
        return both[0], both[1]

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Pages `targets` become what pages `sources` are."""
        if targets:
            to, of = self._index(targets), self._index(sources)
            for layer in self._layers:
                layer[:, to] = layer[:, of]  # the right side is a copy, so pages may also change places

    def erase(self, slots: Sequence[int]) -> None:
        """Zero these pages."""
        if slots:
            index = self._index(slots)
            for layer in self._layers:
                layer[:, index] = 0

    def _index(self, slots: Sequence[int]) -> torch.Tensor:
        return torch.tensor(slots, dtype=torch.int64, device=self._device)
