"""The progress of a run, so that runs can be compared at equal cost: tokens sampled, tokens trained on, seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from typing import Any

from tinker_cookbook.stores.checkpoint_record import CheckpointRecord
from tinker_cookbook.utils.cost_estimation import CostTracker, TokenCostRates, TokenUsage
from tinker_cookbook.utils.lazy import tinker

PROGRESS_KEY = "progress"
"""Its key in checkpoint records."""


def count_trained_tokens(data: Iterable[tinker.Datum]) -> int:
    """Number of targets that a loss uses: those with nonzero weight (supervised losses) or advantage."""
    total = 0
    for datum in data:
        inputs = datum.loss_fn_inputs
        counts = inputs["advantages" if "advantages" in inputs else "weights"].to_numpy() != 0
        total += int(counts.reshape(len(counts), -1).any(axis=1).sum())  # several targets at a position count once
    return total


class Progress:
    """Counts from the run's first step, across all resumes.

    `row` returns the metrics of a step, and stores the same numbers in `loop_state`, which later checkpoints save. A
    resumed run continues from its checkpoint's counts, so repeated steps are counted once.

    Args:
        loop_state: `CheckpointManager.loop_state`.
        record: the checkpoint that the run resumes from; None: start at the first step.
        clock: time in seconds.
        rates: what tokens cost; None: tokens are counted, without costs.
    """

    def __init__(
        self,
        loop_state: dict[str, Any],
        record: CheckpointRecord | None = None,
        clock: Callable[[], float] = time.monotonic,
        rates: TokenCostRates | None = None,
    ):
        before: Mapping[str, Any] = record.get(PROGRESS_KEY, {}) if record is not None else {}
        self.sampled_tokens: int = before.get("sampled_tokens", 0)
        """tokens that the policy sampled to learn from; evaluations do not count"""
        self.trained_tokens: int = before.get("trained_tokens", 0)
        """see `count_trained_tokens`; a token that is trained on twice counts twice"""
        self.thrown_away_tokens: int = before.get("thrown_away_tokens", 0)
        """of the sampled tokens, those of rollouts that no datum trains on"""
        self.tokens = CostTracker(
            rates,
            cumulative=TokenUsage(**before.get("tokens", {})),
            discarded=TokenUsage(**before.get("discarded_tokens", {})),
        )
        """what was sampled, read and trained on, as the hosted service bills it"""
        self._seconds_before: float = before.get("seconds", 0.0)
        self._loop_state, self._clock, self._started = loop_state, clock, clock()
        self._keep()

    @property
    def seconds(self) -> float:
        """Seconds spent in the run's loop."""
        return self._seconds_before + self._clock() - self._started

    def row(self, sampled_tokens: int = 0, trained_tokens: int = 0) -> dict[str, float | int]:
        """Add what a step sampled and trained on.

        Returns:
            progress/sampled_tokens, progress/trained_tokens and progress/seconds, all cumulative.
        """
        self.sampled_tokens += sampled_tokens
        self.trained_tokens += trained_tokens
        return {f"progress/{name}": value for name, value in self._keep().items()}

    def count(
        self,
        usage: TokenUsage,
        discarded: TokenUsage = TokenUsage(),  # noqa: B008
        thrown_away: int | None = None,
    ) -> dict[str, float]:
        """Add the tokens that a step used, and those of groups that it sampled and dropped.

        Args:
            thrown_away: sampled tokens of the step that nothing trains on, dropped or not; None: it samples nothing.

        Returns:
            `tokens/<kind>` of the step, `tokens/cumulative/<kind>` and `tokens/discarded/<kind>` of the run; with prices
            cost/step_usd, without what was dropped, cost/cumulative_usd and cost/discarded_usd.
        """
        self.tokens.record_discarded_sampling(discarded)
        metrics = self.tokens.record_step(usage) | self.tokens.cumulative_metrics()
        if thrown_away is not None:
            self.thrown_away_tokens += thrown_away
            metrics |= {"tokens/thrown_away": thrown_away, "tokens/cumulative/thrown_away": self.thrown_away_tokens}
        self._keep()
        return metrics

    def _keep(self) -> dict[str, float | int]:
        state = {
            "sampled_tokens": self.sampled_tokens,
            "trained_tokens": self.trained_tokens,
            "seconds": self.seconds,
        }
        tokens: dict[str, Any] = {
            "tokens": asdict(self.tokens.cumulative),
            "discarded_tokens": asdict(self.tokens.discarded),
            "thrown_away_tokens": self.thrown_away_tokens,
        }
        self._loop_state[PROGRESS_KEY] = {**state, **tokens}
        return state
