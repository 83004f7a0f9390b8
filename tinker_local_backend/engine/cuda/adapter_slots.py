"""Adapters in slots at fixed addresses, which captured steps can use: the adapter of each slot, and the slot of each row.

A snapshot is copied into a slot when a batch needs it, and evicts the least recently used one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch

from tinker_local_backend.engine.cuda.plain import BLOCK_ROWS
from tinker_local_backend.engine.model.expert_matrices import ExpertMatrix, ExpertSlots
from tinker_local_backend.engine.model.lora import Adapter, LoraLinear
from tinker_local_backend.engine.model.lora_spec import ExpertLayout
from tinker_local_backend.engine.model.lora_targets import LoraTargets

SLOTS = 8
"""Adapters that one batch can use. Rows with more adapters are decoded in several batches."""


MIN_RANK = 16
"""Minimum rank of a slot. The kernels need powers of two; other ranks are padded with zeros."""

BLOCK_RANK = 64
"""Ranks per block of the kernels: 256 ranks or more at once would exceed a GPU's shared memory."""

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
    """The adapters in `count` slots. Returns what must be copied, but copies nothing."""

    def __init__(self, count: int = SLOTS):
        self._adapters: list[Adapter | None] = [None] * count
        self._lru: list[int] = list(range(count))
        """slots in LRU order"""

    def assign(self, adapters: Iterable[Adapter]) -> tuple[dict[int, int], list[tuple[int, Adapter]]]:
        """Assign a slot to each of these adapters. Returns the slots by id(adapter), and (slot, adapter) pairs to copy.

        Raises ValueError for more adapters than there are slots.
        """
        distinct = list({id(adapter): adapter for adapter in adapters}.values())
        if len(distinct) > len(self._adapters):
            raise ValueError(f"{len(distinct)} adapters for {len(self._adapters)} slots")
        loaded = {id(adapter): slot for slot, adapter in enumerate(self._adapters) if adapter is not None}
        slots = {id(adapter): loaded[id(adapter)] for adapter in distinct if id(adapter) in loaded}
        free = [slot for slot in self._lru if slot not in slots.values()]
        copies: list[tuple[int, Adapter]] = []
        for adapter in distinct:
            if id(adapter) not in slots:
                slot = free.pop(0)
                self._adapters[slot] = adapter  # kept alive, so that its id is not reused
                slots[id(adapter)] = slot
                copies.append((slot, adapter))
        used = [slots[id(adapter)] for adapter in distinct]
        self._lru = [slot for slot in self._lru if slot not in used] + used
        return slots, copies

    def clear(self) -> None:
        """Empty every slot."""
        self._adapters = [None] * len(self._adapters)


def layouts_of(adapters: Iterable[Adapter]) -> set[ExpertLayout]:
    """The layouts of these adapters on routed experts, except "frozen"."""
    return {layout for adapter in adapters if (layout := adapter.spec.experts) != "frozen"}


@dataclass(frozen=True, eq=False)
class SlotProduct:
    """The slots' matrices for a linear, or for several fused linears (its parts)."""

    a: torch.Tensor
    """(slots, parts * rank, in)"""
    b: torch.Tensor
    """(slots, out, rank)"""
    ends: list[int]
    """output columns at which the parts end"""


class AdapterSlots:
    """The matrices of the adapters in the slots, stacked per linear: A (slots, rank, in) and B (slots, out, rank).

    Those of fused linears are views of one tensor (`products`, by name of the fused linear). Those of routed experts are A
    (experts or 1, slots + 1, rank, in) and B (experts or 1, slots + 1, out, rank) of one layout, with zeros in the last slot.
    Dtypes are those of a snapshot: the model's, and float32 at the head. Addresses change only with the rank and the layout.
    """

    def __init__(self, products: Sequence[LoraLinear], dtype: torch.dtype, device: torch.device, targets: LoraTargets):
        self._products, self._dtype, self._device, self._targets = products, dtype, device, targets
        self.table = SlotTable()
        self.rank = 0
        self.a: dict[str, torch.Tensor] = {}
        self.b: dict[str, torch.Tensor] = {}
        self.products: dict[str, SlotProduct] = {}
        self.layout: ExpertLayout = "frozen"
        self._experts: dict[str, list[ExpertMatrix]] = {}
        self.scales = torch.zeros(SLOTS + 1, dtype=torch.float32, device=device)

    def fit(self, adapters: Sequence[Adapter]) -> bool:
        """Fit the slots to the ranks of these adapters and to their layout on routed experts. Returns whether addresses changed,
        which invalidates captured steps. Raises ValueError for several layouts.
        """
        rank = max((padded_rank(adapter.spec.rank) for adapter in adapters), default=0)
        layouts = sorted(layouts_of(adapters), reverse=True) or [self.layout]
        if len(layouts) > 1:
            raise ValueError(f"adapters of the layouts {' and '.join(layouts)} in the same slots")
        (layout,) = layouts
        if rank <= self.rank and layout == self.layout:
            return False
        self.rank, self.layout = max(rank, self.rank), layout
        rank = self.rank
        self.table.clear()
        self.a.clear()
        self.b.clear()
        self.products.clear()
        self._experts = {}
        for matrix in self._targets.experts(layout):
            self._experts.setdefault(matrix.module, []).append(matrix)
            for table, (number, *shape) in zip((self.a, self.b), matrix.shapes(rank), strict=True):
                table[matrix.name] = torch.zeros(
                    number, SLOTS + 1, *shape, dtype=self._dtype, device=self.scales.device
                )
        for linear in self._products:
            dtype = torch.float32 if linear.part == "unembed" else self._dtype
            like = {"dtype": dtype, "device": self._device}
            sizes = list(linear.sizes.values())
            a = torch.zeros(SLOTS, len(sizes) * rank, linear.in_features, **like)
            b = torch.zeros(SLOTS, linear.out_features, rank, **like)
            self.products[linear.name] = SlotProduct(a, b, list(accumulate(sizes)))
            self.a.update(zip(linear.sizes, a.split(rank, dim=1), strict=True))
            self.b.update(zip(linear.sizes, b.split(sizes, dim=1), strict=True))
        return True

    def assign(self, adapters: Sequence[Adapter | None]) -> list[int]:
        """The slot of each row's adapter, -1 for the base model. Copies adapters that are in no slot into one.

        Call `fit` first. Raises ValueError for more than SLOTS adapters.
        """
        slots, copies = self.table.assign(adapter for adapter in adapters if adapter is not None)
        for slot, adapter in copies:
            self._copy_in(slot, adapter)
        return [-1 if adapter is None else slots[id(adapter)] for adapter in adapters]

    def on_experts(self, slots_R: torch.Tensor) -> ExpertSlots | None:
        """The adapters on routed experts for rows that use these slots; None if there are no such adapters."""
        return ExpertSlots(slots_R, self.scales, self._experts, self.a, self.b) if self._experts else None

    def _of_slot(self, slot: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """A and B of one slot; those of routed experts with the dimension of the experts first."""
        a, b = (
            {name: matrix[:, slot] if matrix.dim() == 4 else matrix[slot] for name, matrix in table.items()}
            for table in (self.a, self.b)
        )
        return a, b

    def _copy_in(self, slot: int, adapter: Adapter) -> None:
        rank, (a, b) = adapter.spec.rank, self._of_slot(slot)
        torch._foreach_zero_([*a.values(), *b.values()])  # pyright: ignore[reportPrivateImportUsage]
        targets = [a[name][..., :rank, :] for name in adapter.a] + [b[name][..., :rank] for name in adapter.b]
        torch._foreach_copy_(  # pyright: ignore[reportPrivateImportUsage]
            targets, [m.detach() for table in (adapter.a, adapter.b) for m in table.values()]
        )
        self.scales[slot].fill_(adapter.spec.scale)
