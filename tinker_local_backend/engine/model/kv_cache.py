"""Keys and values of sequences: tensors of pages per layer, which are read and written by page slots.

sampling/pages.py decides which sequence has which page. Tensors grow with the pool and keep their contents.
"""

# pyright: strict

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

PAGE_TOKENS = 32
"""Tokens per page. On CPUs with 8 to 512 sequences, products are too small with 16, and too much of the last pages is empty
with 64."""

MIN_HUGE = 4 << 20
"""Bytes from which numpy, unlike torch, requests huge pages: the first write then takes a third of the time."""

ALIGNMENT = 64
"""Bytes to which torch aligns allocations."""


@dataclass(eq=False)
class KVSlots:
    """Where a pass stores its keys: row `rows[i]` of the pass goes to token `offsets[i]` of page `slots[i]`; int64 each.

    `rows=None`: row i goes to entry i.
    """

    slots: torch.Tensor
    offsets: torch.Tensor
    rows: torch.Tensor | None = None
    _indices: dict[int, torch.Tensor] = field(default_factory=dict[int, torch.Tensor], init=False)

    def index(self, kv_heads: int) -> torch.Tensor:
        """(entries * kv_heads,): rows of a layer's keys as (pages * kv_heads * PAGE_TOKENS, key_dim)."""
        if kv_heads not in self._indices:
            heads = torch.arange(kv_heads, device=self.slots.device)
            index = (self.slots[:, None] * kv_heads + heads) * PAGE_TOKENS + self.offsets[:, None]
            self._indices[kv_heads] = index.flatten()
        return self._indices[kv_heads]


class LayerShape(NamedTuple):
    """Shape of a layer's keys and values of one token."""

    kv_heads: int
    key_dim: int
    value_dim: int


class KVCache:
    """Keys and values of each attention layer, by its index: (pages, kv_heads, PAGE_TOKENS, key_dim or value_dim).

    While it grows, the keys or values of one layer are in memory twice. `fixed` pages are allocated at once and keep their
    addresses.
    """

    def __init__(
        self,
        shapes: Mapping[int, LayerShape],
        dtype: torch.dtype,
        device: torch.device,
        fixed: int | None = None,
    ):
        self.pages = fixed or 0
        self._fixed = fixed is not None
        self._shapes, self._dtype, self._device = shapes, dtype, device
        self._keys = {layer: self._empty(self.pages, shape, shape.key_dim).zero_() for layer, shape in shapes.items()}
        self._values = {
            layer: self._empty(self.pages, shape, shape.value_dim).zero_() for layer, shape in shapes.items()
        }

    def _empty(self, pages: int, layer: LayerShape, dim: int) -> torch.Tensor:
        """The caller must zero it: masked positions still enter the matrix product, and 0 * NaN would be NaN."""
        shape = (pages, layer.kv_heads, PAGE_TOKENS, dim)
        size = math.prod(shape) * self._dtype.itemsize
        if self._device.type != "cpu" or size < MIN_HUGE:
            return torch.empty(shape, dtype=self._dtype, device=self._device)
        raw = np.empty(size + ALIGNMENT, dtype=np.uint8)
        start = -raw.ctypes.data % ALIGNMENT
        return torch.as_tensor(raw[start : start + size]).view(self._dtype).view(shape)

    def resize(self, pages: int) -> None:
        """Change the number of pages; remaining ones keep their contents. 0 frees the memory, or zeroes it if it is fixed."""
        if self._fixed:
            if pages == 0:
                for stored in self._stored():
                    stored.zero_()
            return
        for table in (self._keys, self._values):
            for layer, old in table.items():
                if len(old) != pages:  # after a failed growth, some layers may have grown
                    kept = min(pages, len(old), self.pages)
                    new = self._empty(pages, self._shapes[layer], old.shape[3])
                    new[:kept] = old[:kept]
                    new[kept:] = 0
                    table[layer] = new
        self.pages = pages

    def _stored(self) -> Iterator[torch.Tensor]:
        yield from self._keys.values()
        yield from self._values.values()

    @property
    def bytes(self) -> int:
        """Memory of all layers."""
        return sum(stored.untyped_storage().nbytes() for stored in self._stored())

    @property
    def layers(self) -> list[int]:
        """The layers that have keys here."""
        return list(self._shapes)

    def layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of all pages, (pages, kv_heads, PAGE_TOKENS, key_dim or value_dim)."""
        return self._keys[layer], self._values[layer]

    def write(self, layer: int, kv_slots: KVSlots, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store keys and values of a pass, each (kv_heads, rows of the pass, key_dim or value_dim)."""
        index = kv_slots.index(self._shapes[layer].kv_heads)
        for stored, new in zip(self.layer(layer), (keys, values), strict=True):
            by_row, dim = new.transpose(0, 1), stored.shape[3]
            by_row = by_row if kv_slots.rows is None else by_row[kv_slots.rows]
            if dim > 0:  # GLM 5 has keys without a rotary part
                stored.view(-1, dim).index_copy_(0, index, by_row.reshape(-1, dim))

    def read(self, layer: int, slots: torch.Tensor, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the first `tokens` of the pages `slots`, each (1, kv_heads, tokens, key_dim or value_dim)."""
        keys, values = (stored[slots].transpose(0, 1).flatten(1, 2)[None, :, :tokens] for stored in self.layer(layer))
        return keys, values

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy the contents of pages `sources` to pages `targets`."""
        if targets:
            to, from_ = self._index(targets), self._index(sources)
            for stored in self._stored():
                stored[to] = stored[from_]  # the right side is a copy, so pages may also be swapped

    def erase(self, slots: Sequence[int]) -> None:
        """Zero these pages."""
        if slots:
            index = self._index(slots)
            for stored in self._stored():
                stored[index] = 0

    def _index(self, slots: Sequence[int]) -> torch.Tensor:
        return torch.tensor(slots, dtype=torch.int64, device=self._device)
