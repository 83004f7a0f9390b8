"""Gradient accumulation: what a training client has between two optimizer steps.

The gradients of a call are added only when the whole call has succeeded. After a call that failed the sum lacks a part, so the
next optimizer step fails too.
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
"""Most datums that an error names."""


@dataclass(eq=False)
class TrainState:
    """What one training client owns: its adapter, its optimizer's moments, and the gradient accumulated so far."""

    adapter: Adapter
    optimizer: AdamW
    gradients: list[torch.Tensor] | None = None
    norm: float | None = None
    """of the gradients, where it is known"""
    failure: str | None = None
    """of a pass since the gradients were last cleared"""

    @classmethod
    def new(cls, adapter: Adapter) -> TrainState:
        """Of an adapter without a history."""
        return cls(adapter, AdamW(adapter.parameters()))

    def zeros(self) -> list[torch.Tensor]:
        """The gradients of a call without datums."""
        return [torch.zeros_like(parameter) for parameter in self.adapter.parameters()]

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Around a pass that is to add gradients: remembers that it failed."""
        try:
            yield
        except BaseException as error:
            self.failure = f"{type(error).__name__}: {error}"
            raise

    def clear(self) -> None:
        """Forget the gradients, and what is missing in them."""
        self.gradients = self.norm = self.failure = None

    def accumulate(self, gradients: list[torch.Tensor], norm: float | None = None) -> None:
        """Add the gradients of a call, whose norm this is. Raises NonFiniteError, with nothing added, when one is not finite."""
        norm = norm_of(gradients) if norm is None else norm
        if not math.isfinite(norm):
            raise not_finite("gradient")
        if self.gradients is None:
            self.gradients, self.norm = gradients, norm
            return
        self.norm = None
        for total, part in zip(self.gradients, gradients, strict=True):
            total += part


def norm_of(gradients: Sequence[torch.Tensor]) -> float:
    """Finite if all of them are: one answer from the device, not one for each matrix."""
    # Squares of float32 never overflow in float64.
    return float(global_norm(gradients))


def not_finite(what: str, datums: Sequence[int] = ()) -> NonFiniteError:
    """The error of a call whose loss or gradient is NaN or infinite, naming these datums."""
    named = ", ".join(f"data[{i}]" for i in datums[:NAMED_DATUMS])
    more = f" and {len(datums) - NAMED_DATUMS} more" if len(datums) > NAMED_DATUMS else ""
    return NonFiniteError(
        f"the {what} of {named + more if datums else 'this call'} is not finite: check advantages, weights and sampled logprobs "
        "(a probability ratio overflowed) and the learning rate; no gradient was kept",
        datums,
    )
