"""Ablation, one part at a time: descriptions of the rows, and context managers that turn parts off."""

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
    """A row of the table: `setting` makes a context manager that turns the part off."""

    off: str
    setting: Callable[[], AbstractContextManager[object]] = nullcontext
    part: str | None = None
    """part of cuda.execution.PARTS; if the check at start has turned it off, there is nothing to measure"""
    needs_gpu: bool = False
    """whether it changes something that exists only on a GPU"""

    def missing(self, execution: CudaExecution, on_gpu: bool) -> str | None:
        """Why this row cannot be measured here; None if it can."""
        if self.part is not None and not execution.runs(self.part):
            return execution.parts()[self.part]
        return "on a GPU only" if self.needs_gpu and not on_gpu else None


@contextmanager
def unfused(model: BaseModel, execution: CudaExecution, parts: Sequence[str]) -> Iterator[None]:
    """Inside the context the modules of these parts run their original code."""
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
    """Inside the context everything runs in plain torch."""
    fused = unfused(model, execution, tuple(FUSED))
    with fused, joined(model, None), mock.patch.object(model, "execution", Reference()):
        yield


@contextmanager
def joined(model: BaseModel, operations: LayerOperations | None) -> Iterator[None]:
    """Inside the context joined layers use these operations; None: no layer is joined."""
    before = model.operations
    model.join(operations)
    try:
        yield
    finally:
        model.join(before)


def fused_variations(model: BaseModel, execution: CudaExecution) -> list[Variation]:
    """Variations of the fused operations between matrix products: in joined layers if the model has them, else in its modules."""
    if not execution.runs(LAYERS):
        return [
            Variation(f"fused {part}", lambda part=part: unfused(model, execution, (part,)), part) for part in FUSED
        ]
    return [
        Variation("joined layers: transformers' modules, fused", lambda: joined(model, None)),
        Variation("kernels between joined products: plain torch", lambda: joined(model, LayerOperations())),
        Variation("float32 residuals", lambda: joined(model, FusedOperations(residuals=None))),
    ]
