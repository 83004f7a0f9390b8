"""Gradient accumulation: the state of a training client between two optimizer steps.

The gradients of a call are added only after the whole call succeeds. If a call fails, the sum is incomplete, so the next
optimizer step fails too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from tinker_local_backend.engine.model.lora import Adapter
from tinker_local_backend.engine.training.optimizer import AdamW, global_norm
from tinker_local_backend.errors import NonFiniteError

NAMED_DATUMS = 8
"""Maximum number of datums listed in an error."""


@dataclass(eq=False)
class TrainState:
    """State of one training client: its adapter, its optimizer's moments, and the accumulated gradient."""

    adapter: Adapter
    optimizer: AdamW
    gradients: list[torch.Tensor] | None = None
    norm: float | None = None
    """global norm of the gradients, if known"""
    failure: str | None = None
    """error of a failed pass since the gradients were last cleared"""

    @classmethod
    def new(cls, adapter: Adapter) -> TrainState:
        """The state of a fresh adapter."""
        return cls(adapter, AdamW(adapter.parameters()))

    def zeros(self) -> list[torch.Tensor]:
        """Zero gradients, for a call without datums."""
        return [torch.zeros_like(parameter) for parameter in self.adapter.parameters()]

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Wrap a pass that adds gradients, to record its failure."""
        try:
            yield
        except BaseException as error:
            self.failure = f"{type(error).__name__}: {error}"
            raise

    def clear(self) -> None:
        """Clear the gradients and any recorded failure."""
        self.gradients = self.norm = self.failure = None

    def accumulate(self, gradients: list[torch.Tensor], norm: float | None = None) -> None:
        """Add the gradients of a call; `norm`: their global norm. Raises NonFiniteError, and adds nothing, if one is not
        finite.
        """
        norm = global_norm(gradients) if norm is None else norm
        if not math.isfinite(norm):
            raise not_finite("gradient")
        if self.gradients is None:
            self.gradients, self.norm = gradients, norm
            return
        self.norm = None
        for total, gradient in zip(self.gradients, gradients, strict=True):
            total += gradient


def not_finite(what: str, datums: Sequence[int] = ()) -> NonFiniteError:
    """The error for a call whose loss or gradient is NaN or infinite, because of these datums."""
    named = ", ".join(f"data[{i}]" for i in datums[:NAMED_DATUMS])
    more = f" and {len(datums) - NAMED_DATUMS} more" if len(datums) > NAMED_DATUMS else ""
    return NonFiniteError(
        f"the {what} of {named + more if datums else 'this call'} is not finite: check advantages, weights and sampled logprobs "
        "(a probability ratio overflowed) and the learning rate; no gradient was kept",
        datums,
    )
