"""Intervals: golden numbers, and that what varies is what makes them wide."""

import math

import numpy as np
import pytest

from tinker_cookbook.utils.intervals import bootstrap_mean, clustered_mean, student_mean, wilson


def test_wilson_golden_numbers() -> None:
    """Of the score test solved by hand: 8 of 10, and no success in 20."""
    found = wilson(8, 10)
    assert (found.mean, found.low, found.high) == pytest.approx((0.8, 0.49016, 0.94331), abs=1e-4)
    found = wilson(0, 20)
    assert (found.mean, found.low, found.high) == pytest.approx((0.0, 0.0, 0.16113), abs=1e-4)


def test_of_no_trials_nothing_is_known() -> None:
    found = wilson(0, 0)
    assert math.isnan(found.mean) and (found.low, found.high) == (0.0, 1.0)


def test_an_interval_of_seeds_stays_in_the_range_of_its_values() -> None:
    """Student's, by hand: mean 0.91, standard error 0.04, 4.303 of them; an accuracy is not 1.08."""
    values = [0.83, 0.95, 0.95]
    free, rate = student_mean(values), student_mean(values, 0.0, 1.0)
    assert (free.mean, free.low, free.high) == pytest.approx((0.91, 0.73788, 1.08212), abs=1e-4)
    assert (rate.mean, rate.low, rate.high) == pytest.approx((0.91, 0.73788, 1.0), abs=1e-4)


def test_bootstrap_of_one_run_is_about_the_normal_interval() -> None:
    values = np.random.default_rng(1).normal(3.0, 2.0, size=400)
    found = bootstrap_mean([values.tolist()])
    half = 1.96 * values.std() / 20
    assert (found.mean, found.low, found.high) == pytest.approx(
        (values.mean(), values.mean() - half, values.mean() + half), abs=0.03
    )


def test_items_are_the_same_in_all_runs() -> None:
    """Three runs that agree on every item say no more about the items than one."""
    items = [0.0, 1.0] * 20
    one, three = bootstrap_mean([items]), bootstrap_mean([items] * 3)
    assert three.high - three.low == pytest.approx(one.high - one.low, rel=0.1)


def test_runs_that_differ_widen_the_interval() -> None:
    found = bootstrap_mean([[0.2] * 50, [0.8] * 50, [0.5] * 50])
    assert found.low < 0.35 and found.high > 0.65


def test_runs_of_different_items_are_an_error() -> None:
    with pytest.raises(ValueError):
        bootstrap_mean([])


class TestClustered:
    """Means of values that come in groups."""

    def test_groups_of_one_are_independent_trials(self) -> None:
        values = [[1.0]] * 8 + [[0.0]] * 2
        found, alone = clustered_mean(values), wilson(8, 10)
        assert found.mean == pytest.approx(0.8)
        # The variance is estimated with n - 1.
        assert (found.low, found.high) == pytest.approx((alone.low, alone.high), abs=0.02)

    def test_groups_that_are_all_alike_count_once(self) -> None:
        found, alone = clustered_mean([[1.0] * 8, [0.0] * 8, [1.0] * 8, [0.0] * 8]), wilson(2, 4)
        assert found.high - found.low >= alone.high - alone.low

    def test_without_variance_it_is_wilson_s_interval(self) -> None:
        found, alone = clustered_mean([[1.0] * 4, [1.0] * 4]), wilson(8, 8)
        assert (found.low, found.high) == pytest.approx((alone.low, alone.high))

    def test_a_range_is_kept(self) -> None:
        found = clustered_mean([[0.5], [0.5], [-0.5]], -0.5, 0.5)
        assert found.mean == pytest.approx(1 / 6) and -0.5 <= found.low < found.mean < found.high <= 0.5
        found = clustered_mean([[1.0], [0.0], [-1.0], [0.0]], -1.0, 1.0)
        assert found.mean == 0 and found.low == -found.high and 0.25 < found.high < 1

    def test_nothing_is_known_of_no_values(self) -> None:
        found = clustered_mean([[], []], -1, 1)
        assert math.isnan(found.mean) and (found.low, found.high) == (-1, 1)

    @pytest.mark.parametrize("spread", [0.0, 0.3])
    def test_it_covers_the_truth(self, spread: float) -> None:
        """In nineteen of twenty repetitions, whether or not questions differ in difficulty."""
        rng = np.random.default_rng(0)
        hits = 0
        for _ in range(300):
            chances = np.clip(rng.normal(0.5, spread, size=40), 0, 1)
            values = [(rng.random(6) < chance).astype(float).tolist() for chance in chances]
            found = clustered_mean(values)
            hits += found.low <= 0.5 <= found.high
        assert 0.91 <= hits / 300 <= 0.985
