"""A loss or gradient that is NaN or infinite names the datums that are the cause, and nothing of it is kept."""

import numpy as np
import pytest
import tinker
import torch

from tests.engine.helpers import STEP, assert_same, datum, make_training_client, pass_tokens, policy_datum, weights
from tinker_local_backend import NonFiniteError, RequestError, ServiceClient, TrainingClient

N = 12


@pytest.fixture
def client(service: ServiceClient, tied_model: str) -> TrainingClient:
    return make_training_client(service, tied_model, rank=4)


def policy(seed: int, **changes: float) -> tinker.Datum:
    """A sound datum, but for inputs that have this value everywhere."""
    sound = policy_datum(N, seed)
    constant = {key: np.full(N, value, dtype=np.float32) for key, value in changes.items()}
    return datum(sound.model_input.to_ints(), **{**sound.loss_fn_inputs, **constant})


@pytest.mark.parametrize("budget", [None, N], ids=["one pass", "a pass for each"])
@pytest.mark.parametrize(
    ("what", "changes"),
    [("loss", {"logprobs": -500.0, "advantages": 1.0}), ("gradient", {"advantages": 3e37})],
    ids=["a ratio that overflows", "a finite loss with a gradient that is not"],
)
def test_the_datums_are_named_and_nothing_is_kept(
    client: TrainingClient,
    monkeypatch: pytest.MonkeyPatch,
    budget: int | None,
    what: str,
    changes: dict[str, float],
) -> None:
    if budget is not None:
        pass_tokens(monkeypatch, budget)
    before = weights(client)
    data = [policy(seed, **(changes if seed in (1, 3) else {})) for seed in range(5)]
    with pytest.raises(NonFiniteError, match=rf"the {what} of data\[1\], data\[3\] is not finite") as error:
        client.forward_backward(data, "importance_sampling").result()
    assert error.value.datums == (1, 3)
    with pytest.raises(RequestError, match="no step was taken"):
        client.optim_step(STEP).result()
    assert_same(weights(client), before)
    client.forward_backward([data[0], data[2], data[4]], "importance_sampling").result()
    assert np.isfinite((client.optim_step(STEP).result().metrics or {})["grad_norm"])


def test_a_sum_of_calls_that_overflows_is_an_error_of_the_step(client: TrainingClient) -> None:
    """Each call's gradient is finite; their sum is not."""
    large = policy(0)
    norm = client.forward_backward([large], "importance_sampling").result() and client.optim_step(STEP).result()
    advantage = 0.9 * float(np.finfo(np.float32).max) / (100 * (norm.metrics or {})["grad_norm"])
    for factor in (1.0, 1e2, 1e4, 1e6):
        data = [policy(0, advantages=advantage * factor)]
        try:
            for _ in range(400):
                client.forward_backward(data, "importance_sampling").result()
        except NonFiniteError:
            pytest.skip("no advantage is large enough for the sum and small enough for the call")
        try:
            client.optim_step(STEP).result()
        except NonFiniteError as error:
            assert "the accumulated gradient is not finite" in str(error) and error.datums == ()
            return
    raise AssertionError("no sum overflowed")


def test_a_custom_loss_names_its_datums(client: TrainingClient) -> None:
    def loss(data: list[tinker.Datum], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        return logprobs[0].sum() + (logprobs[1] - logprobs[1].detach()).sqrt().sum() + logprobs[2].sum(), {}

    with pytest.raises(NonFiniteError, match=r"at the logprobs of data\[1\]") as error:
        client.forward_backward_custom([policy(seed) for seed in range(3)], loss).result()
    assert error.value.datums == (1,)


def test_many_are_not_all_named(client: TrainingClient) -> None:
    data = [policy(seed, logprobs=-500.0, advantages=1.0) for seed in range(10)]
    with pytest.raises(NonFiniteError, match=r"data\[7\] and 2 more is not finite") as error:
        client.forward_backward(data, "importance_sampling").result()
    assert error.value.datums == tuple(range(10))
