"""Keys and values of the running sequences: one preallocated slab, whose first n rows are always the n running ones.

Keeping the live rows together makes every decode step a view instead of a gather: a finished row is overwritten by the
last live one. The slab grows when a longer or an additional sequence is admitted, and only up to the budget
(while it grows, old and new exist for a moment).
"""

import torch


class KVCache:
    """Layout per layer: keys and values of shape (rows, kv_heads, length, head_dim).

    `budget_tokens` bounds rows * length; the scheduler asks `rows_that_fit` before it admits sequences.
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
        self._layers, self._kv_heads, self._head_dim = layers, kv_heads, head_dim
        self._dtype, self._device = dtype, device
        self._keys = self._empty(0, 0)
        self._values = self._empty(0, 0)

    def _empty(self, rows: int, length: int) -> torch.Tensor:
        # Zeros, not empty memory: masked positions still enter the matrix product, and 0 * NaN would be NaN.
        return torch.zeros(
            self._layers, rows, self._kv_heads, length, self._head_dim, dtype=self._dtype, device=self._device
        )

    @property
    def rows(self) -> int:
        return self._keys.shape[1]

    @property
    def length(self) -> int:
        return self._keys.shape[3]

    def rows_that_fit(self, length: int) -> int:
        """How many sequences of this length the budget allows."""
        return self.budget_tokens // max(1, length)

    def reserve(self, rows: int, length: int, live_rows: int) -> None:
        """Make room for `rows` sequences of `length` tokens; the first `live_rows` are running and keep their contents."""
        if rows <= self.rows and length <= self.length:
            return
        if live_rows == 0:
            self._keys, self._values = self._empty(0, 0), self._empty(0, 0)  # free before allocating anew
        old_keys, old_values, old_length = self._keys, self._values, self.length
        self._keys, self._values = self._empty(rows, length), self._empty(rows, length)
        if live_rows:
            kept = min(old_length, length)  # no running sequence is longer than `length`
            self._keys[:, :live_rows, :, :kept] = old_keys[:, :live_rows, :, :kept]
            self._values[:, :live_rows, :, :kept] = old_values[:, :live_rows, :, :kept]

    def release(self) -> None:
        """Give the memory back (nothing is running)."""
        self._keys, self._values = self._empty(0, 0), self._empty(0, 0)

    def write_prompt(self, layer: int, row: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store a whole prompt's keys and values, each (kv_heads, tokens, head_dim), in a row."""
        tokens = keys.shape[1]
        self._keys[layer, row, :, :tokens] = keys
        self._values[layer, row, :, :tokens] = values

    def copy_row(self, source: int, target: int, tokens: int) -> None:
        """Row `target` becomes a copy of row `source` (samples of one prompt; a finished row refilled by the last)."""
        self._keys[:, target, :, :tokens] = self._keys[:, source, :, :tokens]
        self._values[:, target, :, :tokens] = self._values[:, source, :, :tokens]

    def append(
        self, layer: int, rows: int, lengths: torch.Tensor, longest: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add one token per live row, (kv_heads, rows, head_dim) at lengths[i]; returns views of `longest` + 1 tokens."""
        index = torch.arange(rows, device=lengths.device)
        self._keys[layer][index, :, lengths] = keys.transpose(0, 1)
        self._values[layer][index, :, lengths] = values.transpose(0, 1)
        return self._keys[layer, :rows, :, : longest + 1], self._values[layer, :rows, :, : longest + 1]
