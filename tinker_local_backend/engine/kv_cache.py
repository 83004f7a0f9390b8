"""Keys and values of sequences: one preallocated slab per layer, whose first n rows are always the n running sequences.

Keeping the live rows together makes every decode step a view instead of a gather. What a row still holds after its sequence
has ended is kept for prompts that begin the same way (prefix_cache.py) until somebody needs the row.
"""

from __future__ import annotations

import torch


class KVCache:
    """Layout per layer: (2, rows, kv_heads, length, head_dim), keys before values.

    `budget_tokens` bounds rows * length; the scheduler asks `rows_that_fit` before it admits sequences. While the slab
    grows, one layer exists twice for a moment.
    """

    def __init__(
        self,
        layers: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        budget_tokens: int,
    ):
        self.budget_tokens = budget_tokens
        self.rows = 0
        self.length = 0
        self._kv_heads, self._head_dim = kv_heads, head_dim
        self._dtype, self._device = dtype, device
        self._slabs = [self._empty(0, 0) for _ in range(layers)]

    def _empty(self, rows: int, length: int) -> torch.Tensor:
        # Zeros, not empty memory: masked positions still enter the matrix product, and 0 * NaN would be NaN.
        shape = (2, rows, self._kv_heads, length, self._head_dim)
        return torch.zeros(shape, dtype=self._dtype, device=self._device)

    def rows_that_fit(self, length: int) -> int:
        """How many sequences of this length the budget allows."""
        return self.budget_tokens // max(1, length)

    def resize(self, rows: int, length: int) -> None:
        """Change the shape; rows keep what fits of their contents. (0, 0) gives the memory back."""
        kept_rows, kept = min(rows, self.rows), min(length, self.length)
        for layer, old in enumerate(self._slabs):
            if kept_rows == 0:
                self._slabs[layer] = old = self._empty(0, 0)  # free before allocating anew
            new = self._empty(rows, length)
            new[:, :kept_rows, :, :kept] = old[:, :kept_rows, :, :kept]
            self._slabs[layer] = new
        self.rows, self.length = rows, length

    def write(self, layer: int, row: int, start: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store keys and values, each (kv_heads, tokens, head_dim), in a row from token `start` on."""
        end = start + keys.shape[1]
        self._slabs[layer][0, row, :, start:end] = keys
        self._slabs[layer][1, row, :, start:end] = values

    def read(self, layer: int, row: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the first `tokens` of a row, each (1, kv_heads, tokens, head_dim)."""
        keys, values = self._slabs[layer][:, row, None, :, :tokens]
        return keys, values

    def copy_row(self, source: int, target: int, tokens: int) -> None:
        """The first `tokens` of row `target` become those of row `source`."""
        for slab in self._slabs:
            slab[:, target, :, :tokens] = slab[:, source, :, :tokens]

    def erase_row(self, row: int) -> None:
        """Zero a row."""
        for slab in self._slabs:
            slab[:, row] = 0

    def swap_rows(self, first: int, second: int, first_tokens: int, second_tokens: int) -> None:
        """Exchange two rows of which so many tokens count."""
        for slab in self._slabs:
            saved = slab[:, first, :, :first_tokens].clone()
            slab[:, first, :, :second_tokens] = slab[:, second, :, :second_tokens]
            slab[:, second, :, :first_tokens] = saved

    def append(
        self,
        layer: int,
        index: torch.Tensor,
        lengths: torch.Tensor,
        longest: int,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add one token per live row, (kv_heads, rows, head_dim) at lengths[i]; returns views of `longest` + 1 tokens.

        index: arange(live rows).
        """
        all_keys, all_values = self._slabs[layer].unbind()
        all_keys[index, :, lengths] = keys.transpose(0, 1)
        all_values[index, :, lengths] = values.transpose(0, 1)
        rows = len(index)
        return all_keys[:rows, :, : longest + 1], all_values[:rows, :, : longest + 1]
