"""Held-out loss of any model that returns logprobs: metrics `<name>/nll` and, with a tokenizer, `<name>/bpb`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from tinker_cookbook.clients import SamplingClient, TrainingClient
from tinker_cookbook.runs.evaluation import (
    SamplingClientEvaluator,
    TrainingClientEvaluator,
    compute_target_logprobs,
    forward_logprobs,
)
from tinker_cookbook.supervised.common import nll_metrics
from tinker_cookbook.supervised.types import SupervisedDataset
from tinker_cookbook.tokenizer_utils import Tokenizer
from tinker_cookbook.utils.deprecation import warn_deprecated
from tinker_cookbook.utils.lazy import tinker


class _DatumEvaluator:
    """The datums to score. They have target_tokens and weights, like those of the datasets.

    Args:
        name: prefix of the metrics.
        tokenizer: for bits per byte, which can be compared between models; None: not computed.
    """

    def __init__(self, data: Sequence[tinker.Datum], name: str = "test", tokenizer: Tokenizer | None = None) -> None:
        self.data, self.name, self.tokenizer = list(data), name, tokenizer

    @classmethod
    def from_dataset(cls, dataset: SupervisedDataset, name: str = "test", tokenizer: Tokenizer | None = None) -> Self:
        """Use all batches of a dataset."""
        data = [datum for i in range(len(dataset)) for datum in dataset.get_batch(i)]
        return cls(data, name, tokenizer)

    def _metrics(self, logprobs: list[tinker.TensorData]) -> dict[str, float]:
        return nll_metrics(self.data, logprobs, self.tokenizer, f"{self.name}/")


class SamplerNLLEvaluator(_DatumEvaluator, SamplingClientEvaluator):
    """Held-out loss of a snapshot, from its prompt logprobs. Needs no training client."""

    async def __call__(self, sampling_client: SamplingClient) -> dict[str, float]:
        logprobs_D = await compute_target_logprobs(self.data, sampling_client)
        return self._metrics([tinker.TensorData.from_numpy(logprobs) for logprobs in logprobs_D])


class NLLEvaluator(_DatumEvaluator, TrainingClientEvaluator):
    """Held-out loss from a forward pass of the training client. Deprecated: use SamplerNLLEvaluator with a snapshot."""

    async def __call__(self, training_client: TrainingClient) -> dict[str, float]:
        warn_deprecated("NLLEvaluator", message="Use SamplerNLLEvaluator with a sampling client of these weights.")
        return self._metrics(await forward_logprobs(training_client, [self.data]))
