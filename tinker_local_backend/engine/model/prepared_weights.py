"""Copies of a model's weights that are prepared for decoding.

A decode step multiplies few rows with all weights, again and again. oneDNN is up to twice as fast with weights in its packed
layout, and in float32 the thin products of LoRA are saved if all rows use one snapshot whose B A is merged into the weights.
Either needs a copy of the weights and takes about as long as two steps.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from tinker_local_backend.engine.model.lora import Adapter, LoraLinear, Spans
from tinker_local_backend.engine.model.lora_spec import LoraSpec
from tinker_local_backend.engine.model.memory import out_of_memory
from tinker_local_backend.engine.model.products import by_packed, linear, packed

logger = logging.getLogger(__name__)

PREPARE_AFTER = 8
"""Decode steps of the same kind after which weights are prepared for it, until the sampler is idle. A number of steps, not a
time: the last bits of a logprob depend on it."""

MAX_BYTES = 2 << 30
"""Larger models get no prepared weights."""


@dataclass(frozen=True, eq=False)
class Products:
    """How the linears of a pass multiply: with their weights, or with copies that are merged with an adapter or packed."""

    spans: Spans
    """the adapters of the rows"""
    rest: Spans = field(default_factory=list)
    """adapters that are not merged into the copies"""
    copies: Mapping[LoraLinear, torch.Tensor] = field(default_factory=dict)

    def __call__(self, module: LoraLinear, x_RI: torch.Tensor) -> torch.Tensor:
        """(rows, in) -> (rows, out)"""
        y_RO = self.of_copy(module, x_RI)
        if y_RO is None:
            return module.product(x_RI, self.spans)
        module.add(x_RI, y_RO, self.rest)
        return y_RO

    def of_copy(self, module: LoraLinear, x_RI: torch.Tensor) -> torch.Tensor | None:
        """The product with the copy, without `rest`. None: there is no copy, or no memory for the product."""
        weight = self.copies.get(module)
        if weight is None:
            return None
        return by_packed(x_RI, weight, module.bias) if weight.is_mkldnn else linear(x_RI, weight, module.bias)


_BASE = Adapter(LoraSpec(1), {}, {})
"""Stands for the base model, which is prepared when the rows do not all use one mergeable snapshot."""


class PreparedWeights:
    """Prepared copies of the weights of these linears, for one snapshot that all rows use or for the base model.

    A snapshot is merged only in float32, where W + B A is rounded as finely as a product with it. 16 bits would lose most of
    B A: there the base model is prepared, as for rows of several snapshots.
    """

    def __init__(self, linears: Sequence[LoraLinear]):
        self._linears = linears
        self._merges = all(module.weight.dtype == torch.float32 for module in linears)
        self._possible = sum(module.weight.nbytes for module in linears) <= MAX_BYTES
        self.reset()

    def reset(self) -> None:
        """Free the copies and restart the count of steps."""
        self._prepared: weakref.ref[Adapter] | None = None
        self._next: weakref.ref[Adapter] | None = None
        self._steps = 0
        self._copies: dict[LoraLinear, torch.Tensor] = {}

    def begin_step(self, spans: Spans) -> None:
        """Call before a decode step. Prepares the weights after enough steps of one kind in a row."""
        kind = self._kind(spans)
        if not self._possible:
            return
        if self._prepared is not None and self._prepared() is kind:
            self._next = None
            return
        if self._next is None or self._next() is not kind:
            self._next, self._steps = weakref.ref(kind), 0
        self._steps += 1
        if self._steps > PREPARE_AFTER:
            self._prepare(kind)

    def _prepare(self, kind: Adapter) -> None:
        """Make the copies. Without memory for them, decoding continues without, now and later."""
        self.reset()
        try:
            for module in self._linears:
                copy = _copy(module, kind)
                if copy is not None:
                    self._copies[module] = copy
        except Exception as error:
            if not out_of_memory(error):
                raise
            logger.warning("out of memory for a copy of the weights; decoding goes on without one, which is slower")
            self.reset()
            self._possible = False
            return
        self._prepared = weakref.ref(kind)

    def products(self, spans: Spans) -> Products:
        """How a decode step with these adapters multiplies."""
        prepared = None if self._prepared is None else self._prepared()
        if prepared is _BASE:
            return Products(spans, spans, self._copies)
        return Products(spans, [], self._copies) if prepared is self._kind(spans) else Products(spans)

    def _kind(self, spans: Spans) -> Adapter:
        if not self._merges or len(spans) != 1:
            return _BASE
        rows, adapter = spans[0]
        frozen = not any(matrix.requires_grad for matrix in adapter.a.values())
        return adapter if frozen and isinstance(rows, slice) and rows == slice(None) else _BASE


def _copy(module: LoraLinear, adapter: Adapter) -> torch.Tensor | None:
    """The weight with this adapter merged, packed for oneDNN if that is faster. None if that is the weight itself."""
    factors = module.factors(adapter, module.weight.dtype)
    weight = module.weight.detach()
    if factors is not None:
        weight = weight.clone()
        for columns, ranks, b in factors.parts:
            weight[columns].addmm_(b.t(), factors.a[ranks], alpha=adapter.spec.scale)
    repacked = packed(weight)
    return repacked if repacked is not None or factors is None else weight
