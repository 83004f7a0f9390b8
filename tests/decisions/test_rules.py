"""The scoring rules against plain float64, that they are proper, and calibration."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.drawn import examples
from tinker_cookbook.decisions.rules import (
    Rule,
    bins,
    calibration_error,
    decision,
    decision_loss,
    decision_metrics,
    score,
)
from tinker_cookbook.exceptions import ConfigurationError, DataValidationError
from tinker_cookbook.utils.lazy import torch

SCORES = [[-1.5, -2.25, -0.5], [-4.0, -3.0]]
TARGETS = [[0.2, 0.5, 0.3], [0.0, 1.0]]


def probabilities(scores: list[float]) -> np.ndarray:
    weights = np.exp(np.array(scores, dtype=np.float64))
    return weights / weights.sum()


def reference(scores: list[float], target: list[float], rule: Rule) -> float:
    """The expected score, outcome by outcome."""
    p = probabilities(scores)
    total = 0.0
    for k, chance in enumerate(target):
        if rule == "cross_entropy":
            total -= chance * math.log(p[k]) if chance else 0.0
        else:
            total += chance * sum((p[j] - (j == k)) ** 2 for j in range(len(p)))
    return total


class TestGolden:
    @pytest.mark.parametrize("rule", ["cross_entropy", "brier"])
    def test_the_loss_is_the_mean_of_the_scores(self, rule: Rule) -> None:
        loss, metrics = decision_loss([torch.tensor(one, dtype=torch.float64) for one in SCORES], TARGETS, rule)
        wanted = np.mean([reference(one, target, rule) for one, target in zip(SCORES, TARGETS, strict=True)])
        assert float(loss) == pytest.approx(wanted, abs=1e-15) and metrics[rule] == pytest.approx(wanted, abs=1e-15)

    def test_numbers_by_hand(self) -> None:
        even = torch.log(torch.tensor([0.25, 0.75], dtype=torch.float64))
        assert float(score(even, [1.0, 0.0], "cross_entropy")) == pytest.approx(math.log(4))
        assert float(score(even, [1.0, 0.0], "brier")) == pytest.approx(2 * 0.75**2)
        assert float(score(even, [0.5, 0.5], "brier")) == pytest.approx(0.0625 + 0.5625)

    @pytest.mark.parametrize("rule", ["cross_entropy", "brier"])
    def test_the_gradient_is_that_of_differences(self, rule: Rule) -> None:
        scores = [torch.tensor(one, dtype=torch.float64, requires_grad=True) for one in SCORES]
        decision_loss(scores, TARGETS, rule)[0].backward()
        step = 1e-6
        for d, one in enumerate(SCORES):
            for k in range(len(one)):
                values = []
                for sign in (1, -1):
                    moved = [list(other) for other in SCORES]
                    moved[d][k] += sign * step
                    values.append(np.mean([reference(a, b, rule) for a, b in zip(moved, TARGETS, strict=True)]))
                gradient = scores[d].grad
                assert gradient is not None
                assert float(gradient[k]) == pytest.approx((values[0] - values[1]) / (2 * step), abs=1e-8)

    def test_float32_logprobs_are_scored_in_float64(self) -> None:
        assert decision(torch.tensor([-100.0, -100.5])).dtype == torch.float64


chances = st.lists(st.floats(0.01, 1), min_size=2, max_size=5).map(lambda values: [v / sum(values) for v in values])


@pytest.mark.parametrize("rule", ["cross_entropy", "brier"])
@given(truth=chances, data=st.data())
@examples(200)
def test_no_other_decision_scores_better_than_the_truth(rule: Rule, truth: list[float], data: st.DataObject) -> None:
    other = data.draw(st.lists(st.floats(0.01, 1), min_size=len(truth), max_size=len(truth)))
    best, theirs = (torch.log(torch.tensor([v / sum(one) for v in one], dtype=torch.float64)) for one in (truth, other))
    assert float(score(best, truth, rule)) <= float(score(theirs, truth, rule)) + 1e-12


class TestMetrics:
    def test_of_three_decisions(self) -> None:
        metrics = decision_metrics([[0.75, 0.25], [0.35, 0.65], [0.75, 0.25]], [[1, 0], [1, 0], [0, 1]])
        assert metrics["accuracy"] == pytest.approx(1 / 3) and metrics["confidence"] == pytest.approx(2.15 / 3)
        assert metrics["distance"] == pytest.approx((0.25 + 0.65 + 0.75) / 3)
        # Bin 0.7: two of mean confidence 0.75, one right; bin 0.6: one of 0.65, wrong.
        assert metrics["calibration_error"] == pytest.approx((abs(1.5 - 1) + 0.65) / 3)

    def test_a_perfect_forecaster_of_known_probabilities(self) -> None:
        metrics = decision_metrics([[0.3, 0.7], [0.9, 0.1]], [[0.3, 0.7], [0.9, 0.1]])
        assert metrics["distance"] == 0 and metrics["calibration_error"] == pytest.approx(0)

    def test_bins_have_their_lower_end_and_one_belongs_to_the_last(self) -> None:
        assert bins([1.0, 0.0, 0.05, 0.95]) == {0.0: [1, 2], 0.9: [0, 3]}
        assert calibration_error([], []) == 0.0


class TestEdges:
    def test_a_choice_without_probability_that_cannot_come_out(self) -> None:
        loss, metrics = decision_loss([torch.tensor([0.0, -math.inf])], [[1.0, 0.0]], "cross_entropy")
        assert float(loss) == 0.0 and metrics["brier"] == 0.0

    @pytest.mark.parametrize("scores", [[1.0], [[1.0, 2.0]], [-math.inf, -math.inf]])
    def test_what_is_no_decision(self, scores: list) -> None:
        with pytest.raises(DataValidationError):
            decision(torch.tensor(scores))

    def test_wrong_arguments(self) -> None:
        logs = decision(torch.tensor([0.0, 0.0]))
        with pytest.raises(ConfigurationError, match="rule='log' is unknown; use cross_entropy, brier"):
            score(logs, [1.0, 0.0], "log")  # type: ignore[arg-type]
        with pytest.raises(DataValidationError, match="3 targets for 2 choices"):
            score(logs, [1.0, 0.0, 0.0], "brier")
        with pytest.raises(DataValidationError, match="give equally many, at least one"):
            decision_loss([], [], "brier")
