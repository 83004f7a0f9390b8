"""Running evaluators within a training loop: which are due before a step, and one snapshot for all that sample.

Every loop measures the same way: before step i, where i is a multiple of the frequency (0 too), and once more when the
last step is done, so that the first and the final weights are always among what was measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tinker_cookbook.clients import SamplingClient, TrainingClient
from tinker_cookbook.eval.evaluators import (
    Evaluator,
    EvaluatorBuilder,
    SamplingClientEvaluator,
    TrainingClientEvaluator,
)
from tinker_cookbook.exceptions import ConfigurationError


async def run_evaluators(
    evaluators: Sequence[Evaluator], client: TrainingClient, snapshot: SamplingClient | None = None
) -> dict[str, float]:
    """The metrics of all evaluators at the client's current weights, in order.

    Args:
        client: whose weights are measured. Calls run in the order they are made, so it may have steps under way.
        snapshot: a sampling client of these very weights, where the loop has one; else one is made when the first
            evaluator needs it, and shared.

    Raises:
        ConfigurationError: two evaluators report the same metric, or one is of neither kind.
    """
    metrics: dict[str, float] = {}
    for evaluator in evaluators:
        if isinstance(evaluator, TrainingClientEvaluator):
            measured = await evaluator(client)
        elif isinstance(evaluator, SamplingClientEvaluator):
            if snapshot is None:
                snapshot = await client.save_weights_and_get_sampling_client()
            measured = await evaluator(snapshot)
        else:
            raise ConfigurationError(
                f"evaluator {evaluator!r} is neither a TrainingClientEvaluator nor a SamplingClientEvaluator; inherit from "
                "the one whose client it needs"
            )
        if twice := sorted(metrics.keys() & measured.keys()):
            raise ConfigurationError(
                f"{type(evaluator).__name__} reports {twice}, as an evaluator before it does; give one another name"
            )
        metrics |= measured
    return metrics


@dataclass(frozen=True)
class EvaluationRounds:
    """The evaluators of a run and how often each kind is due: every n-th step, 0 for never."""

    evaluators: Sequence[Evaluator] = ()
    eval_every: int = 0
    infrequent_evaluators: Sequence[Evaluator] = field(default=())
    infrequent_eval_every: int = 0

    @classmethod
    def build(
        cls,
        builders: Sequence[EvaluatorBuilder],
        eval_every: int,
        infrequent_builders: Sequence[EvaluatorBuilder] = (),
        infrequent_eval_every: int = 0,
    ) -> EvaluationRounds:
        """From the builders of a config. An evaluator that can never be due is not built."""
        frequent = [build() for build in builders] if eval_every > 0 else []
        infrequent = [build() for build in infrequent_builders] if infrequent_eval_every > 0 else []
        return cls(frequent, eval_every, infrequent, infrequent_eval_every)

    def due(self, step: int) -> list[Evaluator]:
        """Those to run before `step`."""
        return [
            *(self.evaluators if _is_due(step, self.eval_every) else ()),
            *(self.infrequent_evaluators if _is_due(step, self.infrequent_eval_every) else ()),
        ]

    def at_end(self) -> list[Evaluator]:
        """Those to run when the last step is done: all that are ever due."""
        return [
            *(self.evaluators if self.eval_every > 0 else ()),
            *(self.infrequent_evaluators if self.infrequent_eval_every > 0 else ()),
        ]


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
