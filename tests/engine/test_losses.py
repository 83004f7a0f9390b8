"""Losses, logprobs and gradients equal a plain float64 computation, however the data is split."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
import tinker
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from benchmarks.reference import Reference, loss_and_gradients
from tests.drawn import examples
from tests.engine.devices import here
from tests.engine.helpers import (
    VOCABULARY,
    assert_close,
    assert_near,
    assert_repeats,
    cross_entropy_datum,
    datum,
    drop_gradients,
    gradients,
    make_training_client,
    near,
    pass_tokens,
    policy_datum,
)
from tinker_local_backend import ServiceClient, TrainingClient
from tinker_local_backend.engine.training.losses import LOSSES
from tinker_local_backend.errors import RequestError

LENGTHS = (1, 17, 5, 40, 2)


def check(
    client: TrainingClient,
    reference: Reference,
    data: Sequence[tinker.Datum],
    loss_fn: str,
    config: dict[str, float] | None = None,
) -> None:
    """The engine's numbers against the reference's."""
    numbers = dict(config or {})
    temperature = numbers.pop("temperature", 1.0)
    output = client.forward_backward(list(data), loss_fn, config).result()
    at = None if here().is_reference else [found["logprobs"].to_numpy() for found in output.loss_fn_outputs]
    loss, logprobs, expected = loss_and_gradients(reference, client, data, loss_fn, temperature, numbers, at)
    assert output.metrics["loss:sum"] == pytest.approx(loss, rel=1e-5, abs=1e-5)
    assert len(output.loss_fn_outputs) == len(data)
    for found, wanted in zip(output.loss_fn_outputs, logprobs, strict=True):
        assert found["logprobs"].dtype == "float32"
        assert_near(found["logprobs"].to_numpy(), wanted, atol=1e-4)
    assert all(np.abs(matrix).max() > 0 for matrix in expected.values())
    assert_close(gradients(client), expected, rtol=1e-4)


def test_cross_entropy_with_signed_weights(training: TrainingClient, reference: Reference) -> None:
    check(training, reference, [cross_entropy_datum(n, n) for n in LENGTHS], "cross_entropy")


@pytest.mark.parametrize("loss_fn", ["importance_sampling", "ppo"])
def test_policy_losses(training: TrainingClient, reference: Reference, loss_fn: str) -> None:
    check(training, reference, [policy_datum(n, n, training) for n in LENGTHS], loss_fn)


def test_ppo_with_its_own_thresholds(training: TrainingClient, reference: Reference) -> None:
    data = [policy_datum(n, n, training) for n in LENGTHS]
    config = {"clip_low_threshold": 0.5, "clip_high_threshold": 1.05}
    check(training, reference, data, "ppo", config)
    default = training.forward(data, "ppo").result().metrics
    custom = training.forward(data, "ppo", config).result().metrics
    assert 0 < custom["clipped_fraction:mean"] < 1
    assert custom["loss:sum"] != pytest.approx(default["loss:sum"], rel=1e-3)


@pytest.mark.parametrize("loss_fn", ["cross_entropy", "importance_sampling", "ppo"])
def test_temperature_scores_the_tempered_distribution(
    training: TrainingClient, reference: Reference, loss_fn: str
) -> None:
    if loss_fn == "cross_entropy":
        data = [cross_entropy_datum(n, n) for n in LENGTHS]
    else:
        data = [policy_datum(n, n, training, temperature=0.6) for n in LENGTHS]
    check(training, reference, data, loss_fn, {"temperature": 0.6})


def many_targets(length: int, width: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens (N,), targets and weights (N, K) of which most are zero, as top-k distillation sends them."""
    rng = np.random.default_rng(seed)
    targets = rng.integers(1, VOCABULARY, (length, width))
    weights = rng.normal(size=(length, width)).astype(np.float32)
    absent = rng.random((length, width)) < 0.7
    targets[absent], weights[absent] = 0, 0.0
    return rng.integers(0, 1500, length), targets, weights


@pytest.mark.parametrize("sparse", [False, True])
def test_cross_entropy_with_many_targets_per_position(
    training: TrainingClient, reference: Reference, sparse: bool
) -> None:
    data = []
    for length, width in ((7, 6), (12, 4), (3, 9)):
        tokens, targets, weights = many_targets(length, width, length)
        if sparse:
            inputs = {
                "target_tokens": tinker.TensorData.from_torch_sparse(torch.from_numpy(targets)),
                "weights": tinker.TensorData.from_torch_sparse(torch.from_numpy(weights)),
            }
            assert all(value.sparse_crow_indices is not None for value in inputs.values())
        else:
            inputs = {"target_tokens": targets, "weights": weights}
        data.append(datum(tokens.tolist(), **inputs))
    check(training, reference, data, "cross_entropy")


def test_one_and_many_targets_may_meet_in_a_call(training: TrainingClient, reference: Reference) -> None:
    tokens, targets, weights = many_targets(9, 5, 0)
    wide = datum(tokens.tolist(), target_tokens=targets, weights=weights)
    check(training, reference, [cross_entropy_datum(11, 1), wide, cross_entropy_datum(4, 2)], "cross_entropy")


def test_a_head_of_its_own_and_no_adapter_on_it(service: ServiceClient, untied_model: str) -> None:
    client = make_training_client(service, untied_model, rank=3, train_unembed=False)
    data = [cross_entropy_datum(n, n) for n in LENGTHS]
    check(client, Reference(untied_model), data, "cross_entropy")


def test_forward_has_the_numbers_of_forward_backward_and_no_gradient(training: TrainingClient) -> None:
    data = [policy_datum(n, n, training) for n in LENGTHS]
    forward = training.forward(data, "ppo").result()
    assert training._run.state.gradients is None
    backward = training.forward_backward(data, "ppo").result()
    assert_repeats(forward.metrics, backward.metrics)
    for left, right in zip(forward.loss_fn_outputs, backward.loss_fn_outputs, strict=True):
        assert_repeats(left["logprobs"].to_numpy(), right["logprobs"].to_numpy())


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("budget", [10_000, 20])
def test_a_forward_pass_gives_entropies_of_whole_distributions(
    training: TrainingClient, reference: Reference, monkeypatch: pytest.MonkeyPatch, temperature: float, budget: int
) -> None:
    pass_tokens(monkeypatch, budget)
    monkeypatch.setattr("tinker_local_backend.engine.model.head.CHUNK_ELEMENTS", 7 * VOCABULARY)
    data = [policy_datum(n, n, training) for n in LENGTHS]
    config = {"temperature": temperature}
    output = training.forward(data, "ppo", {**config, "entropies": 1}).result()
    plain = training.forward(data, "ppo", config).result()
    adapter, scale = reference.adapter_of(training), 32 / training._run.state.adapter.spec.rank
    for one, found, without in zip(data, output.loss_fn_outputs, plain.loss_fn_outputs, strict=True):
        assert set(without) == {"logprobs"}
        assert_near(found["logprobs"].to_numpy(), without["logprobs"].to_numpy(), atol=1e-6)
        with torch.no_grad():
            lp = reference.logprobs(one.model_input.to_ints(), adapter, scale, temperature)
        assert found["entropies"].dtype == "float32"
        assert_near(found["entropies"].to_numpy(), -(lp.exp() * lp).sum(dim=1).numpy(), atol=1e-4)


def test_entropies_are_not_trained_on(training: TrainingClient) -> None:
    with pytest.raises(RequestError, match=r"loss_fn_config\['entropies'\] is for a forward pass"):
        training.forward_backward([policy_datum(5, 5, training)], "ppo", {"entropies": 1}).result()


def test_positions_without_advantage_need_no_meaningful_logprob(training: TrainingClient, reference: Reference) -> None:
    """Prompts and injected text carry logprob 0; exp(0 - -1000) there must not reach the sum."""
    original = policy_datum(12, 3, training)
    arrays = {key: value.to_numpy().copy() for key, value in original.loss_fn_inputs.items()}
    arrays["advantages"][:6] = 0
    calm = datum(original.model_input.to_ints(), **arrays)
    wild_logprobs = arrays["logprobs"].copy()
    wild_logprobs[:6] = -1000.0
    wild = datum(original.model_input.to_ints(), **{**arrays, "logprobs": wild_logprobs})
    outputs = []
    for data in (calm, wild):
        loss = training.forward_backward([data], "importance_sampling").result().metrics["loss:sum"]
        outputs.append((loss, gradients(training)))
        drop_gradients(training)
    assert_repeats(outputs[0][0], outputs[1][0])
    assert_close(outputs[1][1], outputs[0][1], rtol=0)


def test_a_clipped_ratio_that_overflows_has_gradient_zero(training: TrainingClient, reference: Reference) -> None:
    """min(r A, 1.2 A) is the constant 1.2 A for a huge r: a finite loss must come with a finite gradient."""
    original = policy_datum(10, 5, training)
    arrays = {key: value.to_numpy().copy() for key, value in original.loss_fn_inputs.items()}
    arrays["logprobs"][4], arrays["advantages"][4] = -200.0, 1.0
    check(training, reference, [datum(original.model_input.to_ints(), **arrays)], "ppo")


def gspo_datum(length: int, seed: int) -> tinker.Datum:
    """A policy datum of which the first half is the prompt."""
    given = policy_datum(length, seed)
    mask = np.ones(length, dtype=np.float32)
    mask[: length // 2] = 0
    return datum(given.model_input.to_ints(), **given.loss_fn_inputs, sequence_ratio_mask=mask)


@pytest.fixture(scope="module")
def split_client(service: ServiceClient, tied_model: str) -> TrainingClient:
    return make_training_client(service, tied_model)


@pytest.fixture(scope="module")
def whole(split_client: TrainingClient) -> dict[str, tuple[list[tinker.Datum], float, dict, list[np.ndarray]]]:
    """Per loss: data, and loss, gradients and logprobs of the data in one call.

    A policy loss adds terms of both signs, so that what rounding leaves of it is measured by the size of the terms.
    """
    results = {}
    for loss_fn in LOSSES:
        make = {"cross_entropy": cross_entropy_datum, "gspo": gspo_datum}.get(loss_fn, policy_datum)
        data = [make(n, n + 50) for n in (3, 21, 1, 8, 8, 30)]
        output = split_client.forward_backward(data, loss_fn).result()
        logprobs = [o["logprobs"].to_numpy() for o in output.loss_fn_outputs]
        results[loss_fn] = (data, output.metrics["loss:sum"], gradients(split_client), logprobs)
        drop_gradients(split_client)
    return results


@examples(25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    loss_fn=st.sampled_from(list(LOSSES)),
    order=st.permutations(range(6)),
    cuts=st.sets(st.integers(1, 5)),
    accumulation=st.integers(1, 9),
)
def test_no_split_and_no_order_changes_loss_or_gradients(
    split_client: TrainingClient, whole: dict, loss_fn: str, order: list[int], cuts: set[int], accumulation: int
) -> None:
    data, loss, expected, expected_logprobs = whole[loss_fn]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINKER_LOCAL_GRAD_ACCUM_STEPS", str(accumulation))
        bounds = [0, *sorted(cuts), len(order)]
        futures = [
            split_client.forward_backward([data[i] for i in order[start:end]], loss_fn)
            for start, end in pairwise(bounds)
        ]
        outputs = [future.result() for future in futures]
    total = sum(output.metrics["loss:sum"] for output in outputs)
    logprobs = [record["logprobs"].to_numpy() for output in outputs for record in output.loss_fn_outputs]
    found = gradients(split_client)
    drop_gradients(split_client)
    weights = [one.loss_fn_inputs["weights" if loss_fn == "cross_entropy" else "advantages"].to_numpy() for one in data]
    size = sum(float(np.abs(w * lp).sum()) for w, lp in zip(weights, expected_logprobs, strict=True))
    assert total == near(loss, rel=0.0, abs=1e-6 * size)
    assert_close(found, expected, rtol=1e-5)
    for position, index in enumerate(order):
        assert_near(logprobs[position], expected_logprobs[index], atol=1e-5)


def test_a_call_longer_than_a_micro_batch_equals_its_parts(
    training: TrainingClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The token budget of a pack and the chunking over the vocabulary are only about memory."""
    data = [cross_entropy_datum(n, n) for n in (30, 20, 25, 3)]
    loss = training.forward_backward(data, "cross_entropy").result().metrics["loss:sum"]
    expected = gradients(training)
    drop_gradients(training)
    pass_tokens(monkeypatch, 32)
    monkeypatch.setattr("tinker_local_backend.engine.model.head.CHUNK_ELEMENTS", 7 * VOCABULARY)
    small = training.forward_backward(data, "cross_entropy").result().metrics["loss:sum"]
    assert small == near(loss, rel=1e-5)
    assert_close(gradients(training), expected, rtol=1e-5)
