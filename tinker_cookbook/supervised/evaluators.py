"""Held-out loss of a supervised run: NLL per trained token and bits per byte."""

from __future__ import annotations

from tinker_cookbook.clients import TrainingClient
from tinker_cookbook.eval.evaluators import TrainingClientEvaluator
from tinker_cookbook.supervised.common import compute_mean_bpb, compute_mean_nll
from tinker_cookbook.supervised.types import SupervisedDataset


class NLLEvaluator(TrainingClientEvaluator):
    """Forward passes over a whole dataset; metrics come as <name>/nll and <name>/bpb."""

    def __init__(self, dataset: SupervisedDataset, name: str = "test"):
        self._batches = [dataset.get_batch(i) for i in range(len(dataset))]
        self._name = name

    async def __call__(self, training_client: TrainingClient) -> dict[str, float]:
        passes = [training_client.forward(batch, "cross_entropy") for batch in self._batches]
        outputs = [await forward for forward in passes]
        logprobs = [fields["logprobs"] for output in outputs for fields in output.loss_fn_outputs]
        data = [datum for batch in self._batches for datum in batch]
        weights = [datum.loss_fn_inputs["weights"] for datum in data]
        targets = [datum.loss_fn_inputs["target_tokens"] for datum in data]
        return {
            f"{self._name}/nll": compute_mean_nll(logprobs, weights),
            f"{self._name}/bpb": compute_mean_bpb(logprobs, weights, targets, training_client.get_tokenizer()),
        }
