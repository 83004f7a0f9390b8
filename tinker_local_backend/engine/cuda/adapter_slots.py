"""Adapters in slots of fixed memory, so that a captured step can use any of them: which slot holds which adapter, and which
rows of a batch use which slot.

A snapshot is copied into a slot when a batch needs it, and evicts the least recently used one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from tinker_local_backend.engine.model.lora import Adapter, LoraLinear

SLOTS = 8
"""Adapters that one batch can use. Rows that use more are decoded in turns."""

BLOCK_ROWS = 16
"""Rows of one adapter per program of the LoRA kernels."""

MIN_RANK = 16
"""The kernels need ranks that are powers of two and at least this; smaller ones are padded with zeros."""

Ints = npt.NDArray[np.int32]


def padded_rank(rank: int) -> int:
    """The rank of a slot that fits an adapter of this rank."""
    return max(MIN_RANK, 1 << (rank - 1).bit_length())


def row_blocks(slots_R: Sequence[int], capacity: int) -> tuple[Ints, Ints]:
    """`order` and `blocks` of ops.lora_add for rows that use these slots (-1: the base model).

    Their shapes, (capacity,) and (ceil(capacity / 16) + SLOTS, 3), depend on `capacity` alone, so a captured step takes any
    batch of at most that many rows.
    """
    order = np.zeros(capacity, dtype=np.int32)
    blocks = np.zeros((-(-capacity // BLOCK_ROWS) + SLOTS, 3), dtype=np.int32)
    slots = np.asarray(slots_R, dtype=np.int64)
    rows = np.argsort(slots, kind="stable")[np.count_nonzero(slots < 0) :]
    order[: len(rows)] = rows
    used, counts = np.unique(slots[rows], return_counts=True)
    first = block = 0
    for slot, count in zip(used.tolist(), counts.tolist(), strict=True):
        for start in range(0, count, BLOCK_ROWS):
            blocks[block] = slot, first + start, min(BLOCK_ROWS, count - start)
            block += 1
        first += count
    return order, blocks


class SlotTable:
    """Which of `count` slots holds which adapter. Reports what to copy; copies nothing itself."""

    def __init__(self, count: int = SLOTS):
        self._adapters: list[Adapter | None] = [None] * count
        self._lru: list[int] = list(range(count))
        """slots, the least recently used first"""

    def assign(self, adapters: Iterable[Adapter]) -> tuple[dict[int, int], list[tuple[int, Adapter]]]:
        """Assign a slot to each of these adapters. Returns the slots by id(adapter), and (slot, adapter) pairs to copy.

        Raises ValueError for more adapters than there are slots.
        """
        wanted = list({id(adapter): adapter for adapter in adapters}.values())
        if len(wanted) > len(self._adapters):
            raise ValueError(f"{len(wanted)} adapters for {len(self._adapters)} slots")
        loaded = {id(adapter): slot for slot, adapter in enumerate(self._adapters) if adapter is not None}
        slots = {id(adapter): loaded[id(adapter)] for adapter in wanted if id(adapter) in loaded}
        free = [slot for slot in self._lru if slot not in slots.values()]
        copies: list[tuple[int, Adapter]] = []
        for adapter in wanted:
            if id(adapter) not in slots:
                slot = free.pop(0)
                self._adapters[slot] = adapter  # kept alive, so that its id is not reused
                slots[id(adapter)] = slot
                copies.append((slot, adapter))
        used = [slots[id(adapter)] for adapter in wanted]
        self._lru = [slot for slot in self._lru if slot not in used] + used
        return slots, copies

    def clear(self) -> None:
        """Empty every slot."""
        self._adapters = [None] * len(self._adapters)


class AdapterSlots:
    """The matrices of the adapters in the slots, stacked per linear: A (slots, rank, in) and B (slots, out, rank).

    Their dtypes are those of a snapshot: the model's, and float32 at the head. Their addresses change only with the rank.
    """

    def __init__(self, linears: Mapping[str, LoraLinear], dtype: torch.dtype, device: torch.device):
        self._linears, self._dtype, self._device = linears, dtype, device
        self.table = SlotTable()
        self.rank = 0
        self.a: dict[str, torch.Tensor] = {}
        self.b: dict[str, torch.Tensor] = {}
        self.scales = torch.zeros(SLOTS, dtype=torch.float32, device=device)

    def fit(self, adapters: Iterable[Adapter]) -> bool:
        """Make room for the ranks of these adapters. Returns whether memory has moved, which invalidates captured steps."""
        rank = max((padded_rank(adapter.spec.rank) for adapter in adapters), default=0)
        if rank <= self.rank:
            return False
        self.rank = rank
        self.table.clear()
        self.a.clear()
        self.b.clear()
        for name, linear in self._linears.items():
            dtype = torch.float32 if linear.part == "unembed" else self._dtype
            like = {"dtype": dtype, "device": self._device}
            self.a[name] = torch.zeros(SLOTS, rank, linear.in_features, **like)
            self.b[name] = torch.zeros(SLOTS, linear.out_features, rank, **like)
        return True

    def assign(self, adapters: Sequence[Adapter | None]) -> list[int]:
        """The slot of each row's adapter, -1 for the base model. Copies in adapters that have no slot yet.

        Call `fit` first. Raises ValueError for more than SLOTS adapters.
        """
        slots, copies = self.table.assign(adapter for adapter in adapters if adapter is not None)
        for slot, adapter in copies:
            self._copy_in(slot, adapter)
        return [-1 if adapter is None else slots[id(adapter)] for adapter in adapters]

    def _copy_in(self, slot: int, adapter: Adapter) -> None:
        rank = adapter.spec.rank
        cleared = [m[slot] for table in (self.a, self.b) for m in table.values()]
        torch._foreach_zero_(cleared)  # pyright: ignore[reportPrivateImportUsage]
        targets = [self.a[name][slot, :rank] for name in adapter.a] + [
            self.b[name][slot, :, :rank] for name in adapter.b
        ]
        torch._foreach_copy_(  # pyright: ignore[reportPrivateImportUsage]
            targets, [m.detach() for table in (adapter.a, adapter.b) for m in table.values()]
        )
        self.scales[slot].fill_(adapter.spec.scale)
