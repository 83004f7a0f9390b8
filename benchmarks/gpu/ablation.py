"""One thing turned off at a time: how a row of the table of parts is described, and what turns parts off."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from unittest import mock

from tinker_local_backend.engine.cuda import fuse
from tinker_local_backend.engine.cuda.execution import FUSED, CudaExecution
from tinker_local_backend.engine.model.attention import Reference
from tinker_local_backend.engine.model.base_model import BaseModel

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
    with unfused(model, execution, tuple(FUSED)), mock.patch.object(model, "execution", Reference()):
        yield


def fused_variations(model: BaseModel, execution: CudaExecution) -> list[Variation]:
    """The elementwise parts, one by one."""
    return [Variation(f"fused {part}", lambda part=part: unfused(model, execution, (part,)), part) for part in FUSED]
