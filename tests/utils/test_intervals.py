"""Intervals: golden numbers, and that what varies is what makes them wide."""

import math

import numpy as np
import pytest

from tinker_cookbook.utils.intervals import bootstrap_mean, wilson


def test_wilson_golden_numbers() -> None:
    """Of the score test solved by hand: 8 of 10, and no success in 20."""
    found = wilson(8, 10)
    assert (found.mean, found.low, found.high) == pytest.approx((0.8, 0.49016, 0.94331), abs=1e-4)
    found = wilson(0, 20)
    assert (found.mean, found.low, found.high) == pytest.approx((0.0, 0.0, 0.16113), abs=1e-4)


def test_of_no_trials_nothing_is_known() -> None:
    found = wilson(0, 0)
    assert math.isnan(found.mean) and (found.low, found.high) == (0.0, 1.0)


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
