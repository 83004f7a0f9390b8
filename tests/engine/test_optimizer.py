"""optim_step is torch's AdamW on the sum of gradients, with the hyperparameters of each call."""

import math

import numpy as np
import pytest
import tinker
import torch

from tests.engine.helpers import (
    STEP,
    assert_adapters_close,
    assert_repeats,
    assert_same,
    cross_entropy_datum,
    gradients,
    make_training_client,
    near,
    policy_datum,
    weights,
)
from tinker_local_backend import RequestError, ServiceClient, TrainingClient

DATA = [cross_entropy_datum(n, n) for n in (5, 12)]


def torch_adamw(start: dict[str, np.ndarray], params: tinker.AdamParams):
    leaves = {name: torch.from_numpy(array.copy()).requires_grad_() for name, array in start.items()}
    optimizer = torch.optim.AdamW(
        list(leaves.values()),
        lr=params.learning_rate,
        betas=(params.beta1, params.beta2),
        eps=params.eps,
        weight_decay=params.weight_decay,
    )
    return leaves, optimizer


def arrays(leaves: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    return {name: leaf.detach().numpy().copy() for name, leaf in leaves.items()}


@pytest.mark.parametrize(
    "params",
    [
        tinker.AdamParams(learning_rate=3e-3),
        tinker.AdamParams(learning_rate=3e-3, beta1=0.5, beta2=0.99, eps=1e-3, weight_decay=0.3),
        tinker.AdamParams(learning_rate=3e-3, weight_decay=0.1, grad_clip_norm=0.5),
        tinker.AdamParams(learning_rate=0.0),
    ],
    ids=["defaults", "all set", "clipped", "learning rate 0"],
)
def test_steps_are_those_of_torch_adamw(training: TrainingClient, params: tinker.AdamParams) -> None:
    before = weights(training)
    leaves, optimizer = torch_adamw(before, params)
    for step in range(3):
        training.forward_backward([cross_entropy_datum(9, step)], "cross_entropy").result()
        for name, gradient in gradients(training).items():
            leaves[name].grad = torch.from_numpy(gradient)
        if params.grad_clip_norm:
            norm = torch.nn.utils.clip_grad_norm_(list(leaves.values()), params.grad_clip_norm)
            assert norm > params.grad_clip_norm
        optimizer.step()
        training.optim_step(params).result()
        assert_adapters_close(weights(training), arrays(leaves), rtol=1e-5)
    moved = any(not np.array_equal(before[name], after) for name, after in weights(training).items())
    assert moved == (params.learning_rate > 0)


def test_the_learning_rate_may_change_from_step_to_step(training: TrainingClient) -> None:
    leaves, optimizer = torch_adamw(weights(training), STEP)
    for learning_rate in (1e-2, 1e-3, 5e-3):
        training.forward_backward(DATA, "cross_entropy").result()
        for name, gradient in gradients(training).items():
            leaves[name].grad = torch.from_numpy(gradient)
        optimizer.param_groups[0]["lr"] = learning_rate
        optimizer.step()
        training.optim_step(tinker.AdamParams(learning_rate=learning_rate)).result()
    assert_adapters_close(weights(training), arrays(leaves), rtol=1e-5)


def test_grad_norm_is_the_global_norm_before_clipping(training: TrainingClient) -> None:
    training.forward_backward(DATA, "cross_entropy").result()
    expected = math.sqrt(sum(float((g.astype(np.float64) ** 2).sum()) for g in gradients(training).values()))
    metrics = training.optim_step(tinker.AdamParams(learning_rate=1e-3, grad_clip_norm=1e-3)).result().metrics
    assert metrics is not None and metrics["grad_norm"] == pytest.approx(expected, rel=1e-6)


def test_a_small_gradient_is_not_clipped_up(service: ServiceClient, tied_model: str) -> None:
    results = []
    for clip in (0.0, 1e9):
        client = make_training_client(service, tied_model)
        client.forward_backward(DATA, "cross_entropy")
        client.optim_step(tinker.AdamParams(learning_rate=1e-2, grad_clip_norm=clip)).result()
        results.append(weights(client))
    assert_repeats(*results)


def test_a_step_uses_the_sum_of_all_calls_before_it_and_clears_it(service: ServiceClient, tied_model: str) -> None:
    apart, together = (make_training_client(service, tied_model) for _ in range(2))
    for datum in DATA:
        apart.forward_backward([datum], "cross_entropy")
    together.forward_backward(DATA, "cross_entropy").result()
    left, right = (client.optim_step(STEP).result().metrics for client in (apart, together))
    assert left is not None and right is not None
    assert left["grad_norm"] == near(right["grad_norm"], rel=1e-5)
    assert apart._run.state.gradients is None and together._run.state.gradients is None


def test_a_step_without_gradients_raises_and_the_engine_goes_on(training: TrainingClient) -> None:
    before = weights(training)
    with pytest.raises(RequestError, match="submit forward_backward first"):
        training.optim_step(STEP).result()
    training.forward(DATA, "cross_entropy").result()
    with pytest.raises(RequestError, match="submit forward_backward first"):
        training.optim_step(STEP).result()
    assert_same(weights(training), before)
    training.forward_backward(DATA, "cross_entropy").result()
    training.optim_step(STEP).result()
    with pytest.raises(AssertionError):
        assert_same(weights(training), before)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("learning_rate", -1e-3),
        ("learning_rate", math.nan),
        ("learning_rate", math.inf),
        ("beta1", 1.0),
        ("beta2", -0.1),
        ("beta2", math.nan),
        ("eps", -1e-8),
        ("weight_decay", math.inf),
        ("weight_decay", -0.1),
        ("grad_clip_norm", -1.0),
        ("grad_clip_norm", math.nan),
    ],
)
def test_bad_hyperparameters_raise_and_keep_gradients(training: TrainingClient, field: str, value: float) -> None:
    training.forward_backward(DATA, "cross_entropy").result()
    before, accumulated = weights(training), gradients(training)
    with pytest.raises(RequestError, match=rf"{field} must be .*, got {value}"):
        training.optim_step(tinker.AdamParams.model_validate({field: value})).result()
    assert_same(gradients(training), accumulated)
    assert_same(weights(training), before)


@pytest.mark.parametrize("params", [None, {"learning_rate": 1e-3}, 1e-3])
def test_parameters_of_another_type_raise_at_once(training: TrainingClient, params: object) -> None:
    with pytest.raises(RequestError, match=r"tinker\.AdamParams"):
        training.optim_step(params)  # pyright: ignore[reportArgumentType]


def test_the_older_keyword_works(training: TrainingClient) -> None:
    before = weights(training)
    training.forward_backward(DATA, "cross_entropy")
    training.optim_step(adam_params=STEP).result()
    assert not np.array_equal(weights(training)["lm_head.lora_B.weight"], before["lm_head.lora_B.weight"])


def test_a_gradient_of_zero_is_a_gradient(training: TrainingClient) -> None:
    """All advantages zero: nothing to learn, yet a step is legal and moves nothing."""
    before = weights(training)
    original = policy_datum(7, 0)
    inputs = dict(original.loss_fn_inputs)
    inputs["advantages"] = tinker.TensorData.from_numpy(np.zeros(7, dtype=np.float32))
    datum = tinker.Datum(model_input=original.model_input, loss_fn_inputs=inputs)
    training.forward_backward([datum], "importance_sampling").result()
    assert all((gradient == 0).all() for gradient in gradients(training).values())
    training.optim_step(STEP).result()
    assert_same(weights(training), before)


def test_no_accepted_hyperparameter_makes_weights_nan(service: ServiceClient, tied_model: str) -> None:
    """B starts at zero, so the first gradient of A is exactly zero: with eps 0 its update would be 0 / 0."""
    client = service.create_lora_training_client(tied_model, rank=2, seed=0).result()
    client.forward_backward(DATA, "cross_entropy").result()
    try:
        client.optim_step(tinker.AdamParams(learning_rate=1e-3, eps=0.0)).result()
    except RequestError as error:
        assert "eps" in str(error)
    assert all(np.isfinite(matrix).all() for matrix in weights(client).values())


def test_a_gradient_that_is_not_finite_changes_no_weight(training: TrainingClient) -> None:
    training.forward_backward(DATA, "cross_entropy").result()
    accumulated = training._run.state.gradients
    assert accumulated is not None
    accumulated[0][0, 0] = math.nan
    training.forward_backward(DATA, "cross_entropy").result()  # is added, and is finite itself
    before = weights(training)
    with pytest.raises(RequestError, match="not finite"):
        training.optim_step(STEP).result()
    assert_same(weights(training), before)
    training.forward_backward(DATA, "cross_entropy")
    training.optim_step(STEP).result()
