"""A custom loss: its gradient is that of the same loss built in, and what it gets wrong is named."""

import numpy as np
import pytest
import tinker
import torch

from tests.engine.helpers import (
    assert_close,
    assert_near,
    cross_entropy_datum,
    drop_gradients,
    gradients,
    near,
    params,
    policy_datum,
    prompt,
    weights,
)
from tinker_local_backend import RequestError, SamplingClient, TrainingClient


def importance_sampling(
    data: list[tinker.Datum], logprobs: list[torch.Tensor]
) -> tuple[torch.Tensor, dict[str, float]]:
    total = torch.zeros(())
    for datum, lp in zip(data, logprobs, strict=True):
        advantages = datum.loss_fn_inputs["advantages"].to_torch()
        ratio = (lp - datum.loss_fn_inputs["logprobs"].to_torch()).exp()
        total = total - torch.where(advantages != 0, ratio * advantages, 0.0).sum()
    return total, {"datums": float(len(data))}


def test_a_custom_loss_has_the_gradient_of_the_same_loss_built_in(training: TrainingClient) -> None:
    data = [policy_datum(n, n, training) for n in (4, 11, 7)]
    built_in = training.forward_backward(data, "importance_sampling").result()
    expected = gradients(training)
    drop_gradients(training)
    custom = training.forward_backward_custom(data, importance_sampling).result()
    assert_close(gradients(training), expected, rtol=1e-4)
    assert custom.metrics["loss:sum"] == near(built_in.metrics["loss:sum"], rel=1e-5)
    assert custom.metrics["datums"] == 3 and "surrogate_loss:sum" in custom.metrics
    for ours, theirs in zip(custom.loss_fn_outputs, built_in.loss_fn_outputs, strict=True):
        assert_near(ours["logprobs"].to_numpy(), theirs["logprobs"].to_numpy(), atol=1e-6, rtol=1e-7)


@pytest.mark.parametrize(
    ("loss_fn", "message"),
    [
        (lambda data, lps: (torch.zeros(()), {}), "depends on the logprobs"),
        (lambda data, lps: (lps[0], {}), "scalar"),
        (lambda data, lps: (lps[0].sum(), {}), r"data\[1\]; leave that datum out"),
    ],
)
def test_a_custom_loss_that_cannot_be_differentiated_is_named(training: TrainingClient, loss_fn, message: str) -> None:
    before = weights(training)
    with pytest.raises(RequestError, match=message):
        training.forward_backward_custom([cross_entropy_datum(5, 1), cross_entropy_datum(6, 2)], loss_fn).result()
    assert training._run.state.gradients is None
    for name, matrix in weights(training).items():
        np.testing.assert_array_equal(matrix, before[name])


@pytest.mark.parametrize("metrics", [None, {"x": "much"}, {"x": None}, 3])
def test_metrics_that_are_no_numbers_are_refused_and_leave_no_gradient(training: TrainingClient, metrics) -> None:
    with pytest.raises(RequestError, match="metric"):
        training.forward_backward_custom(
            [cross_entropy_datum(5, 1)], lambda data, lps: (lps[0].sum(), metrics)
        ).result()
    assert training._run.state.gradients is None


def test_a_loss_that_waits_for_the_engine_fails_instead_of_hanging(
    training: TrainingClient, sampler: SamplingClient
) -> None:
    def loss(data, logprobs):
        reference = sampler.compute_logprobs(prompt([1, 2, 3])).result()
        return logprobs[0].sum() * len(reference), {}

    with pytest.raises(RequestError, match="cannot wait for the engine"):
        training.forward_backward_custom([cross_entropy_datum(5, 1)], loss).result()
    assert sampler.sample(prompt([1, 2]), 1, params(2)).result().sequences


def test_the_deprecated_argument_of_the_sdk_is_known(training: TrainingClient) -> None:
    data = [cross_entropy_datum(5, 1)]
    training.forward_backward_custom(data, lambda d, lps: (lps[0].sum(), {}), loss_type_input="logprobs").result()
    with pytest.raises(RequestError, match="loss_type_input='logits'"):
        training.forward_backward_custom(data, lambda d, lps: (lps[0].sum(), {}), loss_type_input="logits")  # type: ignore[arg-type]
