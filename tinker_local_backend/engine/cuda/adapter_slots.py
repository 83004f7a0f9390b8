"""Adapters side by side in fixed memory, so that a captured step can use any of them: which slot holds whom, and which rows
of a batch use which slot.

A snapshot is copied into a slot when a batch needs it; the one that was used least recently makes way.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from tinker_local_backend.engine.model.lora import Adapter, LoraLinear
from tinker_local_backend.engine.model.lora_spec import UNEMBED_MODULE

SLOTS = 8
"""Adapters that one batch can use. Rows of more are decoded in turns."""

BLOCK_ROWS = 16
"""Rows of one adapter that a program of the LoRA kernels takes."""

LEAST_RANK = 16
"""Ranks are padded with zeros to a power of two of at least this, as the kernels need."""

Ints = npt.NDArray[np.int32]


def padded_rank(rank: int) -> int:
    """The rank of slots that can hold an adapter of this one."""
    return max(LEAST_RANK, 1 << (rank - 1).bit_length())


def lay_out_rows(slots_R: Sequence[int], capacity: int) -> tuple[Ints, Ints]:
    """`order` and `blocks` of ops.lora_add for rows that use these slots (-1: the base model).

    Their shapes, (capacity,) and (ceil(capacity / 16) + SLOTS, 3), depend on `capacity` alone, so captured steps can be given
    any batch of at most so many rows.
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
    """Which of `count` slots holds whom. Says what is to be copied; copies nothing itself."""

    def __init__(self, count: int = SLOTS):
        self._held: list[Adapter | None] = [None] * count
        self._used: list[int] = list(range(count))
        """slots, the least recently used first"""

    def place(self, adapters: Iterable[Adapter]) -> tuple[dict[int, int], list[tuple[int, Adapter]]]:
        """Slots of all these adapters at once, by their identity, and those that have to be copied: (slot, adapter).

        Raises ValueError for more adapters than there are slots.
        """
        wanted = list({id(adapter): adapter for adapter in adapters}.values())
        if len(wanted) > len(self._held):
            raise ValueError(f"{len(wanted)} adapters for {len(self._held)} slots")
        at = {id(held): slot for slot, held in enumerate(self._held) if held is not None}
        found = {id(adapter): at[id(adapter)] for adapter in wanted if id(adapter) in at}
        free = [slot for slot in self._used if slot not in found.values()]
        copies: list[tuple[int, Adapter]] = []
        for adapter in wanted:
            if id(adapter) not in found:
                slot = free.pop(0)
                self._held[slot] = adapter  # kept alive, so that its identity is nobody else's
                found[id(adapter)] = slot
                copies.append((slot, adapter))
        used = [found[id(adapter)] for adapter in wanted]
        self._used = [slot for slot in self._used if slot not in used] + used
        return found, copies

    def clear(self) -> None:
        """Hold nobody."""
        self._held = [None] * len(self._held)


class AdapterSlots:
    """The matrices of the adapters in the slots, stacked per linear: A (slots, rank, in) and B (slots, out, rank).

    They are in the dtypes in which a snapshot has them: the model's, and float32 at the head. Their addresses stay for as long
    as the rank does.
    """

    def __init__(self, linears: Mapping[str, LoraLinear], dtype: torch.dtype, device: torch.device):
        self._linears, self._dtype = linears, dtype
        self.table = SlotTable()
        self.rank = 0
        self.a: dict[str, torch.Tensor] = {}
        self.b: dict[str, torch.Tensor] = {}
        self.scales = torch.zeros(SLOTS, dtype=torch.float32, device=device)

    def fit(self, adapters: Iterable[Adapter]) -> bool:
        """Have room for the ranks of these adapters. Returns whether memory has moved: what was captured is void then."""
        rank = max((padded_rank(adapter.spec.rank) for adapter in adapters), default=0)
        if rank <= self.rank:
            return False
        self.rank = rank
        self.table.clear()
        self.a.clear()
        self.b.clear()
        for name, linear in self._linears.items():
            dtype = torch.float32 if name.endswith(UNEMBED_MODULE) else self._dtype
            like = {"dtype": dtype, "device": linear.weight.device}
            self.a[name] = torch.zeros(SLOTS, rank, linear.in_features, **like)
            self.b[name] = torch.zeros(SLOTS, linear.out_features, rank, **like)
        return True

    def place(self, adapters: Sequence[Adapter | None]) -> list[int]:
        """The slot of each row's adapter, -1 for the base model; copies in those that are not there yet.

        Call `fit` first. Raises ValueError for more than SLOTS adapters.
        """
        slots, copies = self.table.place(adapter for adapter in adapters if adapter is not None)
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
