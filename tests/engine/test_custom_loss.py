"""A loss of one's own: its gradient is that of the same loss built in, and what it gets wrong is named."""

import numpy as np
import pytest
import tinker
import torch

from tests.engine.helpers import (
    assert_close,
    cross_entropy_datum,
    drop_gradients,
    gradients,
    policy_datum,
    weights,
)
from tinker_local_backend import RequestError, TrainingClient


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
    assert custom.metrics["loss:sum"] == pytest.approx(built_in.metrics["loss:sum"], rel=1e-5)
    assert custom.metrics["datums"] == 3 and "surrogate_loss:sum" in custom.metrics
    for ours, theirs in zip(custom.loss_fn_outputs, built_in.loss_fn_outputs, strict=True):
        np.testing.assert_allclose(ours["logprobs"].to_numpy(), theirs["logprobs"].to_numpy(), atol=1e-6)


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
