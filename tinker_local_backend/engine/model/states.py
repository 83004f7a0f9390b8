"""States of recurrent layers, in tensors with one slot per sequence.

Such a layer (gated delta rule, Mamba, short convolution) has a state of constant size: the last inputs of its convolution
(`conv`) and a matrix per head (`recurrent`). sampling/state_pool.py decides which sequence has which slot.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch


class StateKey(NamedTuple):
    """Identifies a state of a layer."""

    layer: int
    kind: str
    """conv or recurrent"""
    number: int
    """among several of its kind in a layer"""


class StateShape(NamedTuple):
    """Shape of one sequence's state."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class StateCache:
    """The states of all layers, (slots, ...) each. The first write of a state sets its shape."""

    def __init__(self, shapes: Mapping[StateKey, StateShape], device: torch.device):
        self._device = device
        self.slots = 0
        self._stored = {key: self._empty(shape, 0) for key, shape in shapes.items()}

    def _empty(self, shape: StateShape, slots: int) -> torch.Tensor:
        return torch.empty(slots, *shape.shape, dtype=shape.dtype, device=self._device)

    @property
    def shapes(self) -> dict[StateKey, StateShape]:
        return {key: StateShape(tuple(stored.shape[1:]), stored.dtype) for key, stored in self._stored.items()}

    @property
    def bytes_per_sequence(self) -> int:
        return sum(shape.bytes for shape in self.shapes.values())

    def resize(self, slots: int) -> None:
        """Change the number of slots; remaining ones keep their contents. 0 frees the memory."""
        for key, old in self._stored.items():
            if len(old) != slots:  # after a failed growth, some states may have grown
                new = old.new_empty(slots, *old.shape[1:])
                kept = min(slots, len(old), self.slots)
                new[:kept] = old[:kept]
                self._stored[key] = new
        self.slots = slots

    def read(self, key: StateKey, slots: torch.Tensor) -> torch.Tensor | None:
        """A copy of the states in these slots (N, ...); None if this state was never written."""
        stored = self._stored.get(key)
        return None if stored is None else stored.index_select(0, slots)

    def write(self, key: StateKey, slots: torch.Tensor, states: torch.Tensor) -> None:
        """Store the states (N, ...) of N sequences, in the dtype of the first ones, as transformers' cache does."""
        if key not in self._stored:
            self._stored[key] = self._empty(StateShape(tuple(states.shape[1:]), states.dtype), self.slots)
        stored = self._stored[key]
        stored.index_copy_(0, slots, states.to(stored.dtype))

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy the states in slots `sources` to slots `targets`."""
        if targets:
            to, from_ = (torch.tensor(slots, device=self._device) for slots in (targets, sources))
            for stored in self._stored.values():
                stored.index_copy_(0, to, stored.index_select(0, from_))
