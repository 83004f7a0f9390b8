"""Data that the tests of the server train on, and how near results must come."""

import numpy as np
import pytest
import tinker

ATOL = 1e-5


def random_tokens(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 1500, length).tolist()


def supervised(length: int, seed: int) -> tinker.Datum:
    tokens = random_tokens(length + 1, seed)
    weights = np.random.default_rng(seed).random(length).astype(np.float32)
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": tinker.TensorData.from_numpy(np.array(tokens[1:])),
            "weights": tinker.TensorData.from_numpy(weights),
        },
    )


DATA = [supervised(length, seed) for seed, length in enumerate((12, 30, 7))]


def assert_same_output(found: tinker.ForwardBackwardOutput, expected: tinker.ForwardBackwardOutput) -> None:
    assert found.metrics.keys() == expected.metrics.keys()
    for key, value in expected.metrics.items():
        assert found.metrics[key] == pytest.approx(value, rel=ATOL, abs=ATOL), key
    assert len(found.loss_fn_outputs) == len(expected.loss_fn_outputs)
    for left, right in zip(found.loss_fn_outputs, expected.loss_fn_outputs, strict=True):
        assert left.keys() == right.keys()
        for key in right:
            assert left[key].shape == list(right[key].to_numpy().shape)
            np.testing.assert_allclose(left[key].to_numpy(), right[key].to_numpy(), atol=ATOL)
