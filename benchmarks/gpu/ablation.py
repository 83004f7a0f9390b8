"""One thing turned off at a time: how a row of the table of parts is described, and what turns parts off."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from unittest import mock

from tinker_local_backend.engine.cuda import fuse
from tinker_local_backend.engine.cuda.execution import FUSED, LAYERS, CudaExecution
from tinker_local_backend.engine.cuda.fused_layer import FusedOperations
from tinker_local_backend.engine.model.attention import Reference
from tinker_local_backend.engine.model.base_model import BaseModel
from tinker_local_backend.engine.model.decoder import LayerOperations

ALL_ON = "nothing"


@dataclass(frozen=True)
class Variation:
    """A row: `setting` makes a context within which it is so."""

    off: str
    setting: Callable[[], AbstractContextManager[object]] = nullcontext
    part: str | None = None
    """of cuda.execution.PARTS: where the check at start has turned that off, there is nothing to measure"""
    needs_gpu: bool = False
    """it changes what only a GPU has"""

    def missing(self, execution: CudaExecution, on_gpu: bool) -> str | None:
        """Why this row cannot be measured here; None: it can."""
        if self.part is not None and not execution.runs(self.part):
            return execution.parts()[self.part]
        return "on a GPU only" if self.needs_gpu and not on_gpu else None


@contextmanager
def unfused(model: BaseModel, execution: CudaExecution, parts: Sequence[str]) -> Iterator[None]:
    """Within: the modules of these parts compute by their own code."""
    running = [part for part in parts if execution.runs(part)]
    for part in running:
        fuse.restore(execution._fused[part])
    try:
        yield
    finally:
        for part in running:
            execution._fused[part] = FUSED[part](model.module)


@contextmanager
def reference(model: BaseModel, execution: CudaExecution) -> Iterator[None]:
    """Within: plain torch computes everything."""
    fused = unfused(model, execution, tuple(FUSED))
    with fused, joined(model, None), mock.patch.object(model, "execution", Reference()):
        yield


@contextmanager
def joined(model: BaseModel, operations: LayerOperations | None) -> Iterator[None]:
    """Within: joined layers compute with these operations; None: no layer is joined."""
    before = model.operations
    model.join(operations)
    try:
        yield
    finally:
        model.join(before)


def fused_variations(model: BaseModel, execution: CudaExecution) -> list[Variation]:
    """What computes between products, one by one: of joined layers, if this model has them, else of its modules."""
    if not execution.runs(LAYERS):
        return [
            Variation(f"fused {part}", lambda part=part: unfused(model, execution, (part,)), part) for part in FUSED
        ]
    return [
        Variation("joined layers: transformers' modules, fused", lambda: joined(model, None)),
        Variation("kernels between joined products: plain torch", lambda: joined(model, LayerOperations())),
        Variation("float32 residuals", lambda: joined(model, FusedOperations(residuals=None))),
    ]
