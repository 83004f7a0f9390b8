"""Linears with the same input as one product, with the adapters of the rows; and their weights prepared for decoding.

A decode step multiplies few rows with all weights, again and again. oneDNN does that up to twice as fast with weights that
were brought into its own order beforehand, and in float32 the thin products of LoRA are saved while all rows go through one
snapshot whose B A is added to the weights. Either takes a copy of the weights (`PreparedWeights`) and about as long as two steps.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import nn

from tinker_local_backend.engine.model.lora import Adapter, LoraLinear, Spans, one_for_all, trained_product
from tinker_local_backend.engine.model.memory import out_of_memory
from tinker_local_backend.engine.model.products import by_packed, linear, packed

logger = logging.getLogger(__name__)

PREPARE_AFTER = 8
"""Decode steps of the same kind after which weights are prepared for it, until the sampler has nothing left to do. A number of
steps and not a time: the last bits of a logprob depend on it."""

MOST_BYTES = 2 << 30
"""Of a larger model's weights no copy is made."""


@dataclass(frozen=True, eq=False)
class _Thin:
    """An adapter's matrices for a joined product."""

    a: torch.Tensor
    """(ranks, in): the A matrices below each other"""
    parts: list[tuple[slice, slice, torch.Tensor]]
    """columns of the output, ranks, and B transposed (rank, out)"""


class JoinedLinear:
    """Linears with the same input as one product, (rows, in) -> (rows, out of the first, of the second, ...).

    Their weights become views of the joined one.
    """

    def __init__(self, parts: Sequence[LoraLinear]):
        self._parts = parts
        self.names = [part.name for part in parts]
        self.sizes = [part.out_features for part in parts]
        weights: tuple[torch.Tensor, ...] = tuple(part.weight for part in parts)
        self.weight = weights[0]
        if len(parts) > 1:
            self.weight = torch.cat(weights)
            for part, rows in zip(parts, self.weight.split(self.sizes), strict=True):
                part.weight = nn.Parameter(rows, requires_grad=False)
        biases: list[torch.Tensor] = [part.bias for part in parts if part.bias is not None]
        self.bias = torch.cat(biases) if biases else None
        self._prepared: torch.Tensor | None = None
        self._in_prepared: weakref.ref[Adapter] | None = None
        self._thin: weakref.WeakKeyDictionary[Adapter, _Thin | None] = weakref.WeakKeyDictionary()

    def __call__(self, x_RI: torch.Tensor, spans: Spans, prepared: bool) -> torch.Tensor:
        """prepared: by the weights of `prepare`, to which `spans` is added. Where autograd records, one adapter for all rows."""
        if torch.is_grad_enabled() and spans:
            ((_, adapter),) = spans
            firsts = accumulate(self.sizes, initial=0)
            parts = [part for part in zip(self.names, firsts, self.sizes, strict=False) if part[0] in adapter.a]
            if parts:
                return trained_product(x_RI, self.weight, self.bias, adapter, parts)
        if not prepared or self._prepared is None:
            y_RO = linear(x_RI, self.weight, self.bias)
        elif not self._prepared.is_mkldnn:
            y_RO = linear(x_RI, self._prepared, self.bias)
        else:
            found = by_packed(x_RI, self._prepared, self.bias)
            if found is None:  # no memory for it
                found = linear(x_RI, self.weight, self.bias)
                self._add(found, x_RI, one_for_all(self._in_prepared and self._in_prepared()))
            y_RO = found
        self._add(y_RO, x_RI, spans)
        return y_RO

    def _add(self, y_RO: torch.Tensor, x_RI: torch.Tensor, spans: Spans) -> None:
        """What the adapters contribute to the output."""
        for rows, adapter in spans:
            thin, scale = self._thin_of(adapter, x_RI.dtype), adapter.spec.scale
            if thin is None:
                continue
            own = x_RI.index_select(0, rows) if isinstance(rows, torch.Tensor) else x_RI[rows]
            inner = linear(own, thin.a)
            for columns, ranks, b in thin.parts:
                if isinstance(rows, torch.Tensor):
                    y_RO[:, columns].index_add_(0, rows, inner[:, ranks] @ b, alpha=scale)
                else:
                    y_RO[rows, columns].addmm_(inner[:, ranks], b, alpha=scale)

    def _thin_of(self, adapter: Adapter, dtype: torch.dtype) -> _Thin | None:
        """Made once for a snapshot; one that is being trained changes. None: it has nothing here."""
        if adapter in self._thin:
            return self._thin[adapter]
        parts: list[tuple[slice, slice, torch.Tensor]] = []
        first, rank = 0, 0
        for part, size in zip(self._parts, self.sizes, strict=True):
            if part.name in adapter.a:
                b = adapter.b[part.name]
                ranks = slice(rank, rank + b.shape[1])
                parts.append((slice(first, first + size), ranks, b.detach().to(dtype).t()))
                rank += b.shape[1]
            first += size
        matrices = [adapter.a[part.name] for part in self._parts if part.name in adapter.a]
        thin = _Thin(torch.cat(matrices).detach().to(dtype), parts) if matrices else None
        if not any(matrix.requires_grad for matrix in matrices):
            self._thin[adapter] = thin
        return thin

    def prepare(self, adapter: Adapter | None) -> None:
        """Copy the weights, with this adapter in them; no copy where that would give them as they are."""
        self._prepared, self._in_prepared = None, adapter and weakref.ref(adapter)
        thin = None if adapter is None else self._thin_of(adapter, self.weight.dtype)
        weight = self.weight.detach()
        if adapter is not None and thin is not None:
            weight = weight.clone()
            for columns, ranks, b in thin.parts:
                weight[columns].addmm_(b.t(), thin.a[ranks], alpha=adapter.spec.scale)
        own = packed(weight)
        if own is not None or thin is not None:
            self._prepared = weight if own is None else own

    def forget(self) -> None:
        """Drop the copy."""
        self._prepared = self._in_prepared = None


class _Base:
    """What steps have in common whose rows do not all go through one snapshot that can be merged: the base model."""


_BASE = _Base()


class PreparedWeights:
    """What the weights of these linears are prepared for: one snapshot that all rows go through, or the base model.

    A snapshot is merged only in float32, where W + B A is rounded as finely as a product with it. In 16 bits that would lose
    most of B A: there the base is prepared, as it is for rows of several snapshots.
    """

    def __init__(self, linears: Sequence[JoinedLinear]):
        self._linears = linears
        self._merges = all(joined.weight.dtype == torch.float32 for joined in linears)
        self._possible = sum(joined.weight.nbytes for joined in linears) <= MOST_BYTES
        self.forget()

    def forget(self) -> None:
        """Give the memory back, and begin to count anew."""
        self._held: weakref.ref[Adapter | _Base] | None = None
        self._next: weakref.ref[Adapter | _Base] | None = None
        self._steps = 0
        for joined in self._linears:
            joined.forget()

    def begin_step(self, spans: Spans) -> None:
        """Before a decode step. When enough of them in a row were of one kind the weights are prepared for it."""
        kind = self._kind(spans)
        if not self._possible:
            return
        if self._held is not None and self._held() is kind:
            self._next = None
            return
        if self._next is None or self._next() is not kind:
            self._next, self._steps = weakref.ref(kind), 0
        self._steps += 1
        if self._steps > PREPARE_AFTER:
            self._prepare(kind)

    def _prepare(self, kind: Adapter | _Base) -> None:
        """Where there is no memory for the copies, decoding goes on without them, now and later."""
        self.forget()
        try:
            for joined in self._linears:
                joined.prepare(kind if isinstance(kind, Adapter) else None)
        except Exception as error:
            if not out_of_memory(error):
                raise
            logger.warning("out of memory for a copy of the weights; decoding goes on without one, which is slower")
            self.forget()
            self._possible = False
            return
        self._held = weakref.ref(kind)

    def apply(self, spans: Spans) -> tuple[Spans, bool]:
        """For rows of these adapters: (those that are not in the prepared weights, whether these are to be used at all)."""
        held = None if self._held is None else self._held()
        if held is None:
            return spans, False
        if isinstance(held, Adapter) and held is self._kind(spans):
            return [], True
        return spans, not isinstance(held, Adapter)

    def _kind(self, spans: Spans) -> Adapter | _Base:
        if not self._merges or len(spans) != 1:
            return _BASE
        rows, adapter = spans[0]
        frozen = not any(matrix.requires_grad for matrix in adapter.a.values())
        return adapter if frozen and isinstance(rows, slice) and rows == slice(None) else _BASE
