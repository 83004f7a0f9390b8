"""Routed experts and the updates of their adapters on a GPU, as grouped products over rows sorted by expert.

Nothing synchronises with the device, so a step can be captured in a CUDA graph. The products are `torch.nn.functional.grouped_mm`
or what transformers uses in its place. Ranks are padded, because rows must be multiples of 16 bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch.nn import functional as F
from transformers.integrations import moe

from tinker_local_backend.engine.model.expert_matrices import ExpertSlots
from tinker_local_backend.engine.model.experts import Update, adapters_of, after_experts, spread, updates_of
from tinker_local_backend.engine.model.lora import Adapter
from tinker_local_backend.engine.model.routes import note_routes

GROUPED_NAME = "tinker_local_grouped"

RANK_MULTIPLE = 8


def by_group(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """As experts.by_expert."""
    tokens, chosen = top_k_index.shape
    note_routes(self, top_k_index)
    rows = _Rows(self, top_k_index)
    rows_PH = spread(hidden_states, rows.order_P, rows.back_P, chosen)
    inner = rows.product("gate_up_proj" if self.has_gate else "up_proj", rows_PH)
    inner = self._apply_gate(inner) if self.has_gate else self.act_fn(inner)
    outer_PH = rows.product("down_proj", inner)
    by_token = after_experts(self, outer_PH).index_select(0, rows.back_P).view(tokens, chosen, -1)
    return (by_token * top_k_weights.unsqueeze(-1)).sum(dim=1).to(hidden_states.dtype)


class _Rows:
    """The copies of a pass's rows, sorted by expert, then by the slot of their adapter."""

    def __init__(self, experts: Any, top_k_index: torch.Tensor):
        self._experts, self._chosen = experts, top_k_index.shape[1]
        self._path, self._routing = adapters_of(experts)
        self._slots: ExpertSlots | None = None if self._routing is None else self._routing.slots
        slots = 1 if self._slots is None else len(self._slots.scales)
        keys_P = top_k_index.flatten()
        if self._slots is not None:
            keys_P = keys_P * slots + self._slots.slots_R.repeat_interleave(self._chosen)
        sorted_P, self.order_P = keys_P.sort(stable=True)
        indices_P = torch.arange(len(keys_P), device=keys_P.device)
        self.back_P = torch.empty_like(indices_P).scatter_(0, self.order_P, indices_P)
        self._experts_P, self._slots_P = sorted_P // slots, sorted_P % slots
        self._ends_of_experts = _ends(self._experts_P, experts.num_experts)
        self._ends_of_slots = _ends(sorted_P, experts.num_experts * slots)
        """for each expert and slot"""

    def product(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        """Each row times its expert's matrix of this name, with the updates of its adapter."""
        experts = self._experts
        bias = getattr(experts, f"{name}_bias").index_select(0, self._experts_P) if experts.has_bias else None
        weights = getattr(experts, name)
        y = cast(torch.Tensor, moe._grouped_linear(rows, weights, self._ends_of_experts, bias, experts.is_transposed))
        if self._slots is not None:
            for matrix in self._slots.matrices.get(self._path, ()):
                if matrix.tensor == name:
                    a, b = self._slots.a[matrix.name], self._slots.b[matrix.name]
                    self._add_slots(y[:, matrix.columns], rows, a, b, self._slots.scales)
        for columns, delta in self._of_spans(name, rows):
            y[:, columns] += delta
        return y

    def _of_spans(self, name: str, rows: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
        for which, adapter in [] if self._routing is None else self._routing.spans:
            members = None
            if not (isinstance(which, slice) and which == slice(None)):
                tokens = torch.zeros(len(self.order_P) // self._chosen, 1, dtype=rows.dtype, device=rows.device)
                tokens[which] = 1
                members = tokens.index_select(0, self.order_P // self._chosen)
            yield from self._of_adapter(adapter, name, rows, members)

    def _of_adapter(
        self, adapter: Adapter, name: str, rows: torch.Tensor, members: torch.Tensor | None
    ) -> Iterator[tuple[slice, torch.Tensor]]:
        for columns, a, b in map(_padded, updates_of(adapter, self._path, name)):
            inner = self._times(rows, a.to(rows.dtype)) * adapter.spec.scale
            yield columns, self._times(inner if members is None else inner * members, b.to(rows.dtype))

    def _times(self, rows: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
        """rows (P, in) times the matrix (out, in) of their expert, or the shared one -> (P, out)."""
        if len(matrices) == 1:
            return F.linear(rows, matrices[0])
        return cast(torch.Tensor, moe._grouped_linear(rows, matrices, self._ends_of_experts))

    def _add_slots(
        self, y: torch.Tensor, rows: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scales: torch.Tensor
    ) -> None:
        """y += scale * rows @ A.T @ B.T with the matrices of each row's expert and slot. A factor shared by the experts is
        applied for all slots in one product, from which each row selects its slot.
        """
        slots, rank = a.shape[1:3]
        if len(a) == 1:
            every = F.linear(rows, a[0].flatten(0, 1)).unflatten(1, (slots, rank))
            inner = every.take_along_dim(self._slots_P[:, None, None], dim=1)[:, 0]
        else:
            inner = cast(torch.Tensor, moe._grouped_linear(rows, a.flatten(0, 1), self._ends_of_slots))
        inner = (inner * scales.index_select(0, self._slots_P)[:, None]).to(rows.dtype)
        if len(b) == 1:
            placed = inner.new_zeros(len(inner), slots, rank)
            placed.scatter_(1, self._slots_P[:, None, None].expand(-1, 1, rank), inner[:, None])
            y += placed.flatten(1) @ b[0].transpose(1, 2).flatten(0, 1)
        else:
            y += moe._grouped_linear(inner, b.flatten(0, 1), self._ends_of_slots)


def _ends(sorted_P: torch.Tensor, groups: int) -> torch.Tensor:
    """Where the rows of each group end: int32 (groups,)."""
    after = torch.arange(1, groups + 1, device=sorted_P.device)
    return torch.searchsorted(sorted_P.long(), after, out_int32=True)


def _padded(update: Update) -> Update:
    """The update, its rank padded with zeros to a multiple of RANK_MULTIPLE."""
    more = -update.a.shape[1] % RANK_MULTIPLE
    return update._replace(a=F.pad(update.a, (0, 0, 0, more)), b=F.pad(update.b, (0, more))) if more else update


moe.ALL_EXPERTS_FUNCTIONS.register(GROUPED_NAME, by_group)
