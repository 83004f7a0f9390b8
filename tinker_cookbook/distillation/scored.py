"""Examples together with what their teachers think of them: data to train on, and the metrics that follow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tinker_cookbook.clients import SamplingClient, TrainingClient
from tinker_cookbook.distillation.mixture import Example
from tinker_cookbook.distillation.targets import TeacherScores, score_datum, soft_target_datum, soft_target_metrics
from tinker_cookbook.eval.evaluators import TrainingClientEvaluator
from tinker_cookbook.utils.lazy import tinker
from tinker_cookbook.utils.misc_utils import gather_all


@dataclass(frozen=True)
class ScoredBatch:
    """Examples and their teachers' scores, in one order."""

    examples: Sequence[Example]
    scores: Sequence[TeacherScores]

    @property
    def num_tokens(self) -> int:
        """Positions that the student reads."""
        return sum(datum.model_input.length for _, datum in self.examples)

    @property
    def num_loss_tokens(self) -> int:
        """Positions with weight."""
        return sum(int((datum.loss_fn_inputs["weights"].to_numpy() != 0).sum()) for _, datum in self.examples)

    def soft_data(self) -> list[tinker.Datum]:
        """The datums with the teachers' tokens as (N, K) targets."""
        return [soft_target_datum(datum, scores) for (_, datum), scores in zip(self.examples, self.scores, strict=True)]

    def metrics(self, name: str, outputs: Sequence[tinker.ForwardBackwardOutput]) -> dict[str, float]:
        """`soft_target_metrics` as <name>/<metric>, and with several datasets of each one as <name>/<metric>/dataset_<i>.

        Args:
            outputs: of forward passes over `soft_data`, which may have been divided.
        """
        logprobs_D = [fields["logprobs"].to_numpy() for output in outputs for fields in output.loss_fn_outputs]
        data_D = [datum for _, datum in self.examples]
        metrics = {f"{name}/{key}": v for key, v in soft_target_metrics(data_D, self.scores, logprobs_D).items()}
        datasets = sorted({dataset for dataset, _ in self.examples})
        for dataset in datasets if len(datasets) > 1 else ():
            own = [i for i, (other, _) in enumerate(self.examples) if other == dataset]
            values = soft_target_metrics(
                [data_D[i] for i in own], [self.scores[i] for i in own], [logprobs_D[i] for i in own]
            )
            metrics |= {f"{name}/{key}/dataset_{dataset}": value for key, value in values.items()}
        return metrics


async def score_examples(
    teachers: Sequence[SamplingClient], examples: Sequence[Example], k: int, concurrency: int
) -> ScoredBatch:
    """Ask each example's own teacher for its `k` likeliest tokens, about `concurrency` examples at a time.

    The next examples wait until all of these are answered: on the local engine, which sequences share a pass must not
    depend on what else runs.
    """
    scores: list[TeacherScores] = []
    for first in range(0, len(examples), concurrency):
        wave = examples[first : first + concurrency]
        scores += await gather_all(score_datum(teachers[dataset], datum, k) for dataset, datum in wave)
    return ScoredBatch(examples, scores)


class TeacherKLEvaluator(TrainingClientEvaluator):
    """Held-out examples under the student against their teachers' scores: <name>/kl, /nll and what else a batch reports."""

    def __init__(self, batch: ScoredBatch, batch_size: int, name: str = "test"):
        self._batch, self._name = batch, name
        data = batch.soft_data()
        self._parts = [data[i : i + batch_size] for i in range(0, len(data), batch_size)]

    async def __call__(self, training_client: TrainingClient) -> dict[str, float]:
        passes = [training_client.forward(part, "cross_entropy") for part in self._parts]
        return self._batch.metrics(self._name, [await forward for forward in passes])
