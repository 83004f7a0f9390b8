"""The DPO losses against the formulas in plain float64, and what their inputs may be."""

import math
from typing import get_args

import numpy as np
import pytest
import tinker
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tinker_cookbook.exceptions import ConfigurationError, DataValidationError
from tinker_cookbook.preference.dpo import LossType, check_pairs, compute_dpo_loss, dpo_loss_fn

LOSS_TYPES = get_args(LossType)
LOGPROBS = st.floats(-40, 0)


def log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x)) if x > -30 else x


def reference_loss(pairs: list[tuple[float, ...]], beta: float, loss_type: str) -> float:
    """Mean over pairs of (chosen, rejected, ref chosen, ref rejected, chosen length, rejected length)."""
    losses = []
    for chosen, rejected, ref_chosen, ref_rejected, m, n in pairs:
        up, down = chosen - ref_chosen, rejected - ref_rejected
        if loss_type == "dpo":
            losses.append(-log_sigmoid(beta * (up - down)))
        elif loss_type == "dpo_norm":
            losses.append(-log_sigmoid(beta * (up / m - down / n)))
        else:
            losses.append((up / m - down / n - 0.5 / beta) ** 2)
    return sum(losses) / len(losses)


PAIRS = st.lists(
    st.tuples(LOGPROBS, LOGPROBS, LOGPROBS, LOGPROBS, st.integers(1, 30), st.integers(1, 30)), min_size=1, max_size=6
)


def computed(
    pairs: list[tuple[float, ...]], beta: float, loss_type: LossType
) -> tuple[torch.Tensor, dict[str, float], torch.Tensor]:
    columns = torch.tensor(pairs, dtype=torch.float64).T
    policy = columns[:2].clone().requires_grad_()
    loss, metrics = compute_dpo_loss(
        policy[0], policy[1], columns[2], columns[3], beta, loss_type, columns[4], columns[5]
    )
    (gradient,) = torch.autograd.grad(loss, policy)
    return loss.detach(), metrics, gradient


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@settings(max_examples=60)
@given(pairs=PAIRS, beta=st.sampled_from([0.01, 0.1, 1.0, 5.0]))
def test_loss_and_slope_are_those_of_the_formula(
    loss_type: LossType, pairs: list[tuple[float, ...]], beta: float
) -> None:
    loss, metrics, gradient = computed(pairs, beta, loss_type)
    assert float(loss) == pytest.approx(reference_loss(pairs, beta, loss_type), rel=1e-9, abs=1e-12)
    assert metrics["dpo_loss"] == float(loss)
    step = 1e-5
    for row in range(2):
        for i in range(len(pairs)):
            sides = []
            for sign in (1, -1):
                moved = [list(pair) for pair in pairs]
                moved[i][row] += sign * step
                sides.append(reference_loss([tuple(pair) for pair in moved], beta, loss_type))
            slope = (sides[0] - sides[1]) / (2 * step)
            assert float(gradient[row, i]) == pytest.approx(slope, rel=1e-4, abs=1e-5 * max(1, float(loss)))


@given(pairs=PAIRS, beta=st.sampled_from([0.1, 1.0]))
def test_metrics_are_the_same_whatever_the_loss(pairs: list[tuple[float, ...]], beta: float) -> None:
    up = np.array([p[0] - p[2] for p in pairs])
    down = np.array([p[1] - p[3] for p in pairs])
    for loss_type in LOSS_TYPES:
        _, metrics, _ = computed(pairs, beta, loss_type)
        assert metrics["accuracy"] == pytest.approx(np.mean(beta * up > beta * down))
        assert metrics["chosen_reward"] == pytest.approx(beta * up.mean(), abs=1e-9)
        assert metrics["rejected_reward"] == pytest.approx(beta * down.mean(), abs=1e-9)
        assert metrics["margin"] == pytest.approx(beta * (up - down).mean(), abs=1e-9)


def test_without_a_difference_dpo_is_log_two() -> None:
    values = torch.tensor([-3.0, -1.0])
    loss, metrics = compute_dpo_loss(values, values, values, values, 0.1)
    assert float(loss) == pytest.approx(math.log(2)) and metrics["accuracy"] == 0.0


def test_lists_of_scalars_are_taken_too() -> None:
    scalars = [torch.tensor(-3.0), torch.tensor(-1.0)]
    vector = torch.stack(scalars)
    loss, _ = compute_dpo_loss(scalars, scalars[::-1], scalars, scalars, 0.3)
    expected, _ = compute_dpo_loss(vector, vector.flip(0), vector, vector, 0.3)
    assert float(loss) == float(expected)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"loss_type": "kto"}, ConfigurationError, "loss_type='kto' is unknown; use dpo, ipo, dpo_norm"),
        ({"dpo_beta": 0.0}, ConfigurationError, "dpo_beta=0.0: must be greater than 0"),
        ({"loss_type": "ipo"}, ConfigurationError, "needs chosen_lengths and rejected_lengths"),
        ({"rejected_logprobs": torch.zeros(3)}, DataValidationError, "one number per pair"),
        ({"chosen_logprobs": []}, DataValidationError, "one number per pair"),
    ],
)
def test_what_cannot_be_is_named(change: dict, error: type[Exception], message: str) -> None:
    given = {
        name: torch.zeros(2)
        for name in ("chosen_logprobs", "rejected_logprobs", "chosen_ref_logprobs", "rejected_ref_logprobs")
    }
    with pytest.raises(error, match=message):
        compute_dpo_loss(**{**given, "dpo_beta": 0.1, **change})


def datum(weights: list[float]) -> tinker.Datum:
    n = len(weights)
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(list(range(n))),
        loss_fn_inputs={
            "target_tokens": tinker.TensorData.from_torch(torch.arange(1, n + 1)),
            "weights": tinker.TensorData.from_torch(torch.tensor(weights)),
        },
    )


class TestLossFn:
    def test_only_reply_tokens_count_and_pairs_are_chosen_first(self) -> None:
        data = [datum([0.0, 1.0, 1.0]), datum([0.0, 0.0, 1.0])]
        minus_infinity = float("-inf")  # what a prompt token may have
        logprobs = [
            torch.tensor([minus_infinity, -1.0, -2.0], requires_grad=True),
            torch.tensor([minus_infinity, minus_infinity, -5.0], requires_grad=True),
        ]
        reference = [torch.tensor([0.0, -1.5, -2.5]), torch.tensor([minus_infinity, -9.0, -4.0])]
        for loss_type in LOSS_TYPES:
            loss, metrics = dpo_loss_fn(reference, 0.5, loss_type)(data, logprobs)
            wanted = reference_loss([(-3.0, -5.0, -4.0, -4.0, 2, 1)], 0.5, loss_type)
            assert float(loss.detach()) == pytest.approx(wanted)
            assert (metrics["chosen_reward"], metrics["rejected_reward"]) == (0.5, -0.5)
            gradients = torch.autograd.grad(loss, logprobs)
            assert [(g != 0).tolist() for g in gradients] == [[False, True, True], [False, False, True]]
            assert all(g.isfinite().all() for g in gradients)

    @pytest.mark.parametrize(
        ("data", "message"),
        [
            ([datum([0.0, 1.0])], "batch 3 has 1 datums"),
            ([], "batch 3 has 0 datums"),
            ([datum([0.0, 1.0]), datum([0.0, 0.5])], "datum 1 of batch 3: weights must be 1"),
            ([datum([0.0, 0.0]), datum([0.0, 1.0])], "datum 0 of batch 3: weights must be 1"),
            ([datum([0.0, 1.0]), datum([0.0] * 9 + [1.0])], "datum 1 of batch 3 has 11 tokens.*max_length to 10"),
        ],
    )
    def test_batches_that_are_no_pairs_are_named(self, data: list[tinker.Datum], message: str) -> None:
        with pytest.raises(DataValidationError, match=message):
            check_pairs(data, "batch 3", context=10)
