"""The memories that a program sees: the tensors that a kernel was given, each in an address space of its own, and shared memory.

An address outside of the tensor whose pointer it was computed from is an error that names the tensor, even where another tensor
lies there on a real device.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tests.compiled.bits import UNSIGNED

Array = npt.NDArray[Any]
SPACE = 40
"""Bits of an address below the number of its tensor."""

MIDDLE = 1 << (SPACE - 1)
"""Where a tensor begins in its space, so that an address before it is in the same space, too."""

ALIGNMENT = 256
"""To which the allocator of a device aligns, and more than any access needs."""

POISON = 0xFF
"""What shared memory holds before anything is written to it: NaN in every type."""


class MemoryFault(Exception):
    """An access out of bounds or misaligned."""


class Tensors:
    """Global memory. Counts the bytes that each tensor's accesses move, by the width of the access."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.names = list(tensors)
        self.sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in tensors.items()}
        self.read: Counter[tuple[str, int]] = Counter()
        """(name, bytes of one thread's access) -> bytes"""
        self.written: Counter[tuple[str, int]] = Counter()
        self._kept = list(tensors.values())
        self._bytes: list[Array] = []
        self._bounds: list[tuple[int, int]] = []
        for tensor in self._kept:
            last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            size = (last + 1) * tensor.element_size() if tensor.numel() else 0
            before = tensor.data_ptr() % ALIGNMENT
            whole = -(-(before + size) // ALIGNMENT) * ALIGNMENT
            # Whole units, so that there is a view for every width; bounds are checked before anything is touched.
            start = tensor.data_ptr() - before
            held = (ctypes.c_uint8 * whole).from_address(start) if size else (ctypes.c_uint8 * 0)()
            self._bytes.append(np.ctypeslib.as_array(held))
            self._bounds.append((before, before + size))

    def pointer(self, name: str) -> int:
        number = self.names.index(name)
        return ((number + 1) << SPACE) + MIDDLE + self._bounds[number][0]

    def _located(self, addresses: Array, size: int, what: str) -> list[tuple[int, Array | None, Array]]:
        """(tensor, which accesses, offsets) for each tensor that is meant."""
        spaces = (addresses >> np.uint64(SPACE)).astype(np.int64) - 1
        found = []
        for number in [int(spaces[0])] if (spaces == spaces[0]).all() else np.unique(spaces).tolist():
            which = None if (spaces == number).all() else np.nonzero(spaces == number)[0]
            offsets = addresses if which is None else addresses[which]
            offsets = (offsets & np.uint64((1 << SPACE) - 1)).astype(np.int64) - MIDDLE
            if not 0 <= number < len(self.names):
                raise MemoryFault(f"{what} of {size} bytes at an address that was computed from no tensor's")
            self._check(number, offsets, size, what)
            found.append((number, which, offsets))
        return found

    def _check(self, number: int, offsets: Array, size: int, what: str) -> None:
        low, high = self._bounds[number]
        for offset in (int(offsets.min()), int(offsets.max())):
            if offset < low or offset + size > high:
                raise MemoryFault(
                    f"{what} of {size} bytes at byte {offset - low} of {self.names[number]!r}, which has {high - low}"
                )
        if (offsets % size).any():
            raise MemoryFault(f"misaligned {what} of {size} bytes of {self.names[number]!r}")

    def load(self, addresses: Array, width: int, count: int) -> Array:
        """(accesses, count) numbers of `width` bits."""
        size = width * count // 8
        result = np.empty((len(addresses), count), UNSIGNED[width])
        for number, which, offsets in self._located(addresses, size, "load"):
            view = self._bytes[number].view(UNSIGNED[width])
            found = view[(offsets * 8 // width)[:, None] + np.arange(count)]
            result[slice(None) if which is None else which] = found
            self.read[self.names[number], size] += len(offsets) * size
        return result

    def store(self, addresses: Array, values: Array) -> None:
        """`values`: (accesses, count)."""
        width, count = values.dtype.itemsize * 8, values.shape[1]
        size = width * count // 8
        for number, which, offsets in self._located(addresses, size, "store"):
            view = self._bytes[number].view(values.dtype)
            view[(offsets * 8 // width)[:, None] + np.arange(count)] = values if which is None else values[which]
            self.written[self.names[number], size] += len(offsets) * size


class Shared:
    """The shared memories of some blocks, side by side."""

    def __init__(self, blocks: int, size: int) -> None:
        self.size = size
        self.pitch = -(-max(size, 1) // ALIGNMENT) * ALIGNMENT
        self.bytes = np.full(blocks * self.pitch, POISON, np.uint8)

    def of(self, kept: Array) -> Shared:
        """That of some of the blocks."""
        result = Shared(0, self.size)
        result.bytes = self.bytes.reshape(-1, self.pitch)[kept].reshape(-1)
        return result

    def _offsets(self, addresses: Array, blocks: Array, size: int, what: str, unit: int) -> Array:
        offsets = addresses.astype(np.int64)
        if int(offsets.min()) < 0 or int(offsets.max()) + size > self.size:
            raise MemoryFault(
                f"{what} of {size} bytes at {int(offsets.max()):#x} of {self.size} bytes of shared memory"
            )
        if (offsets % size).any():
            raise MemoryFault(f"misaligned {what} of {size} bytes of shared memory")
        return (blocks * self.pitch + offsets) // unit

    def load(self, addresses: Array, blocks: Array, width: int, count: int) -> Array:
        """(accesses, count) numbers of `width` bits, each from the memory of its block."""
        at = self._offsets(addresses, blocks, width * count // 8, "load", width // 8)
        return self.bytes.view(UNSIGNED[width])[at[:, None] + np.arange(count)]

    def store(self, addresses: Array, blocks: Array, values: Array) -> None:
        unit, count = values.dtype.itemsize, values.shape[1]
        at = self._offsets(addresses, blocks, unit * count, "store", unit)
        self.bytes.view(values.dtype)[at[:, None] + np.arange(count)] = values
