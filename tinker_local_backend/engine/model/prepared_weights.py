"""The weights of a model prepared for decoding.

A decode step multiplies few rows with all weights, again and again. oneDNN does that up to twice as fast with weights that
were brought into its own order beforehand, and in float32 the thin products of LoRA are saved while all rows go through one
snapshot whose B A is added to the weights. Either takes a copy of the weights and about as long as two steps.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from tinker_local_backend.engine.model.lora import Adapter, LoraLinear, Spans
from tinker_local_backend.engine.model.memory import out_of_memory
from tinker_local_backend.engine.model.products import by_packed, linear, packed

logger = logging.getLogger(__name__)

PREPARE_AFTER = 8
"""Decode steps of the same kind after which weights are prepared for it, until the sampler has nothing left to do. A number of
steps and not a time: the last bits of a logprob depend on it."""

MOST_BYTES = 2 << 30
"""Larger models get no copy of their weights."""


@dataclass(frozen=True, eq=False)
class Products:
    """How the linears of a pass multiply: with their own weights, or with copies that hold an adapter or are in another order."""

    spans: Spans
    """the adapters of the rows"""
    rest: Spans = field(default_factory=list)
    """those that are not in the copies"""
    copies: Mapping[LoraLinear, torch.Tensor] = field(default_factory=dict)

    def __call__(self, part: LoraLinear, x_RI: torch.Tensor) -> torch.Tensor:
        """(rows, in) -> (rows, out)"""
        y_RO = self.of_copy(part, x_RI)
        if y_RO is None:
            return part.product(x_RI, self.spans)
        part.add(x_RI, y_RO, self.rest)
        return y_RO

    def of_copy(self, part: LoraLinear, x_RI: torch.Tensor) -> torch.Tensor | None:
        """The product with the copy, without `rest`. None: there is no copy, or no memory for the product."""
        weight = self.copies.get(part)
        if weight is None:
            return None
        return by_packed(x_RI, weight, part.bias) if weight.is_mkldnn else linear(x_RI, weight, part.bias)


class _Base:
    """Stands for the base model among what weights are prepared for: rows that do not all go through one mergeable snapshot."""


_BASE = _Base()


class PreparedWeights:
    """Copies of the weights of these linears, prepared for one snapshot that all rows go through, or for the base model.

    A snapshot is merged only in float32, where W + B A is rounded as finely as a product with it. In 16 bits that would lose
    most of B A: there the base is prepared, as it is for rows of several snapshots.
    """

    def __init__(self, linears: Sequence[LoraLinear]):
        self._linears = linears
        self._merges = all(part.weight.dtype == torch.float32 for part in linears)
        self._possible = sum(part.weight.nbytes for part in linears) <= MOST_BYTES
        self.forget()

    def forget(self) -> None:
        """Free the copies, and count steps anew."""
        self._held: weakref.ref[Adapter | _Base] | None = None
        self._next: weakref.ref[Adapter | _Base] | None = None
        self._steps = 0
        self._copies: dict[LoraLinear, torch.Tensor] = {}

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
            for part in self._linears:
                copy = _copy(part, kind if isinstance(kind, Adapter) else None)
                if copy is not None:
                    self._copies[part] = copy
        except Exception as error:
            if not out_of_memory(error):
                raise
            logger.warning("out of memory for a copy of the weights; decoding goes on without one, which is slower")
            self.forget()
            self._possible = False
            return
        self._held = weakref.ref(kind)

    def products(self, spans: Spans) -> Products:
        """How a decode step with these adapters multiplies."""
        held = None if self._held is None else self._held()
        if isinstance(held, Adapter) and held is self._kind(spans):
            return Products(spans, [], self._copies)
        return Products(spans, spans, self._copies) if isinstance(held, _Base) else Products(spans)

    def _kind(self, spans: Spans) -> Adapter | _Base:
        if not self._merges or len(spans) != 1:
            return _BASE
        rows, adapter = spans[0]
        frozen = not any(matrix.requires_grad for matrix in adapter.a.values())
        return adapter if frozen and isinstance(rows, slice) and rows == slice(None) else _BASE


def _copy(part: LoraLinear, adapter: Adapter | None) -> torch.Tensor | None:
    """The weight with this adapter in it, in oneDNN's order if that is faster. None where that is the weight as it is."""
    factors = None if adapter is None else part.factors(adapter, part.weight.dtype)
    weight = part.weight.detach()
    if adapter is not None and factors is not None:
        weight = weight.clone()
        for columns, ranks, b in factors.parts:
            weight[columns].addmm_(b.t(), factors.a[ranks], alpha=adapter.spec.scale)
    own = packed(weight)
    return own if own is not None or factors is None else weight
