"""Handles passes and optimizer steps with a NaN or infinite loss or gradient: stop the run, or skip the step."""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable
from typing import TYPE_CHECKING, Literal, TypeAlias

from tinker_cookbook import backends
from tinker_cookbook.exceptions import TrainingError
from tinker_cookbook.utils.lazy import tinker

if TYPE_CHECKING:
    from tinker.types import OptimStepResponse

logger = logging.getLogger(__name__)

OnNonFinite: TypeAlias = Literal["stop", "skip"]
SKIPPED = "train/nonfinite_steps"
"""Metric: optimizer steps that were skipped; absent if none was."""


class UpdateGuard:
    """Awaits the passes and steps of an update in order of submission.

    The local engine raises an error that names the datums, keeps nothing of the pass, and refuses the following step.
    The hosted service reports the loss; a step that it has already applied is not undone.
    """

    def __init__(self, on_nonfinite: OnNonFinite):
        self._skips = on_nonfinite == "skip"
        self._broken = False
        self.skipped = 0

    async def forward_backward(
        self, pending: Awaitable[tinker.ForwardBackwardOutput]
    ) -> tinker.ForwardBackwardOutput | None:
        """A pass's output, or None if its step is skipped. Raises TrainingError or the engine's error if the run has
        to stop.
        """
        try:
            output = await pending
        except Exception as error:
            if not backends.is_non_finite_error(error):
                raise
            self._meet(error)
            return None
        loss = output.metrics.get("loss:sum", 0.0)
        if math.isfinite(loss):
            return output
        scores = [outputs["logprobs"].to_torch() for outputs in output.loss_fn_outputs]
        named = [f"data[{i}]" for i, logprobs in enumerate(scores) if not bool(logprobs.isfinite().all())]
        self._meet(
            TrainingError(f"the engine reports a loss of {loss}; logprobs that are not finite: {', '.join(named[:8])}")
        )
        return None

    async def optim_step(self, pending: Awaitable[OptimStepResponse]) -> OptimStepResponse | None:
        """A step's response, or None if it was skipped."""
        broken, self._broken = self._broken, False
        try:
            response = await pending
        except Exception as error:
            if broken and backends.is_engine_error(error):  # it refuses a step after a failed pass
                self.skipped += 1
                return None
            if not backends.is_non_finite_error(error):
                raise
            self._meet(error)
            self._broken = False
            self.skipped += 1
            return None
        self.skipped += int(broken)
        return None if broken else response

    def metrics(self) -> dict[str, float | int | str]:
        return {SKIPPED: self.skipped} if self.skipped else {}

    def _meet(self, error: Exception) -> None:
        if not self._skips:
            error.add_note(
                "on_nonfinite=skip continues without such a step; a lower learning_rate or a grad_clip_norm may prevent it"
            )
            raise error
        logger.warning("%s; the step is skipped", error)
        self._broken = True
