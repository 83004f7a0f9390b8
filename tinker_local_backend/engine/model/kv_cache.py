"""Keys and values of sequences: one tensor of pages per layer, which is read and written by page slots.

sampling/pages.py decides which sequence has which page. Tensors grow with the pool and keep their contents.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

PAGE_TOKENS = 32
"""Measured on CPUs with 8 to 512 sequences: with 16 the products are too small, with 64 too much of the last pages is empty."""

MIN_HUGE = 4 << 20
"""Bytes from which numpy, unlike torch, asks Linux for huge pages: the first write then takes a third of the time."""

ALIGNMENT = 64
"""of torch's allocations, in bytes"""


@dataclass(eq=False)
class KVSlots:
    """Where a pass stores its keys: row `rows[i]` of the pass goes to token `offsets[i]` of page `slots[i]`; int64 each.

    `rows` None: row i goes to entry i.
    """

    slots: torch.Tensor
    offsets: torch.Tensor
    rows: torch.Tensor | None = None
    _index: torch.Tensor | None = None

    def index(self, kv_heads: int) -> torch.Tensor:
        """(entries * kv_heads,): rows of a layer's keys as (pages * kv_heads * PAGE_TOKENS, head_dim)."""
        if self._index is None:
            heads = torch.arange(kv_heads, device=self.slots.device)
            self._index = ((self.slots[:, None] * kv_heads + heads) * PAGE_TOKENS + self.offsets[:, None]).flatten()
        return self._index


class KVCache:
    """Layout per layer: (2, pages, kv_heads, PAGE_TOKENS, head_dim), keys before values.

    Growth needs memory for one layer twice. With `fixed` pages, all exist from the start and keep their addresses.
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
        """The caller must zero it: masked positions still enter the matrix product, and 0 * NaN would be NaN."""
        shape = (2, pages, self.kv_heads, PAGE_TOKENS, self._head_dim)
        size = math.prod(shape) * self._dtype.itemsize
        if self._device.type != "cpu" or size < MIN_HUGE:
            return torch.empty(shape, dtype=self._dtype, device=self._device)
        raw = np.empty(size + ALIGNMENT, dtype=np.uint8)
        start = -raw.ctypes.data % ALIGNMENT
        return torch.as_tensor(raw[start : start + size]).view(self._dtype).view(shape)

    def resize(self, pages: int) -> None:
        """Change the number of pages; those that stay keep their contents. 0 frees the memory, or zeroes it if it is fixed."""
        if self._fixed:
            if pages == 0:
                for layer in self._layers:
                    layer.zero_()
            return
        if all(layer.shape[1] == pages for layer in self._layers):  # after a failed growth, some may have others
            self.pages = pages
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
        """Memory of all layers."""
        return sum(layer.untyped_storage().nbytes() for layer in self._layers)

    def layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of all pages, (pages, kv_heads, PAGE_TOKENS, head_dim) each."""
        keys, values = self._layers[layer].unbind()
        return keys, values

    def write(self, layer: int, kv_slots: KVSlots, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store keys and values of a pass, each (kv_heads, rows of the pass, head_dim)."""
        keys, values = keys.transpose(0, 1), values.transpose(0, 1)
        if kv_slots.rows is not None:
            keys, values = keys[kv_slots.rows], values[kv_slots.rows]
        index, dim = kv_slots.index(self.kv_heads), self._head_dim
        for stored, new in zip(self.layer(layer), (keys, values), strict=True):
            stored.view(-1, dim).index_copy_(0, index, new.reshape(-1, dim))

    def read(self, layer: int, slots: torch.Tensor, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the first `tokens` of the pages `slots`, each (1, kv_heads, tokens, head_dim)."""
        both = self._layers[layer][:, slots].transpose(1, 2).flatten(2, 3)[:, None, :, :tokens]
        return both[0], both[1]

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy the contents of pages `sources` to pages `targets`."""
        if targets:
            to, from_ = self._index(targets), self._index(sources)
            for layer in self._layers:
                layer[:, to] = layer[:, from_]  # the right side is a copy, so pages may also be swapped

    def erase(self, slots: Sequence[int]) -> None:
        """Zero these pages."""
        if slots:
            index = self._index(slots)
            for layer in self._layers:
                layer[:, index] = 0

    def _index(self, slots: Sequence[int]) -> torch.Tensor:
        return torch.tensor(slots, dtype=torch.int64, device=self._device)
