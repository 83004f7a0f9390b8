"""Intervals: golden numbers, and that what varies is what makes them wide."""

import math
import random
from typing import Any

import numpy as np
import pytest

from tinker_cookbook.utils.intervals import (
    Z_95,
    _drawn_means,  # pyright: ignore[reportPrivateUsage]
    bootstrap_mean,
    clustered_mean,
    nested_mean,
    student_95,
    student_mean,
    wilson,
)


def test_wilson_golden_numbers() -> None:
    """Of the score test solved by hand: 8 of 10, and no success in 20."""
    found = wilson(8, 10)
    assert (found.mean, found.low, found.high) == pytest.approx((0.8, 0.49016, 0.94331), abs=1e-4)
    found = wilson(0, 20)
    assert (found.mean, found.low, found.high) == pytest.approx((0.0, 0.0, 0.16113), abs=1e-4)


def test_a_single_trial_and_a_part_of_one_say_little() -> None:
    """Without a failure the interval begins at n / (n + z^2)."""
    for trials, low in ((1.0, 0.20654), (0.5, 0.11517)):
        found = wilson(trials, trials)
        assert (found.mean, found.low, found.high) == pytest.approx((1.0, low, 1.0), abs=1e-5)


def test_of_no_trials_nothing_is_known() -> None:
    found = wilson(0, 0)
    assert math.isnan(found.mean) and (found.low, found.high) == (0.0, 1.0)


def test_an_interval_of_seeds_stays_in_the_range_of_its_values() -> None:
    """Student's, by hand: mean 0.91, standard error 0.04, 4.303 of them; an accuracy is not 1.08."""
    values = [0.83, 0.95, 0.95]
    free, rate = student_mean(values), student_mean(values, 0.0, 1.0)
    assert (free.mean, free.low, free.high) == pytest.approx((0.91, 0.73788, 1.08212), abs=1e-4)
    assert (rate.mean, rate.low, rate.high) == pytest.approx((0.91, 0.73788, 1.0), abs=1e-4)


@pytest.mark.parametrize("n", [*range(2, 20), 31, 101])
def test_student_s_points_hold_95_percent(n: int) -> None:
    """The density of n - 1 degrees of freedom, by Simpson's rule from 0 to the point, twice."""
    dof, end, parts = n - 1, student_95(n), 20_000
    scale = math.gamma((dof + 1) / 2) / (math.sqrt(dof * math.pi) * math.gamma(dof / 2))
    density = scale * (1 + np.linspace(0, end, parts + 1) ** 2 / dof) ** (-(dof + 1) / 2)
    inside = 2 * end / (3 * parts) * (density[0] + 4 * density[1::2].sum() + 2 * density[2:-1:2].sum() + density[-1])
    assert inside == pytest.approx(0.95, abs=1e-4)


def test_beyond_the_table_it_is_the_expansion_s_value() -> None:
    assert [student_95(n) for n in (17, 31)] == pytest.approx([2.119256, 2.042176], abs=1e-6)


def test_two_and_many_seeds_have_student_s_interval_and_one_has_none() -> None:
    found = student_mean([1.0, 3.0])  # 12.706 standard errors of 1
    assert (found.mean, found.low, found.high) == pytest.approx((2.0, -10.706, 14.706), abs=1e-3)
    found = student_mean([0.0, 1.0] * 8)  # 2.131 standard errors of 1 / sqrt(60)
    assert (found.mean, found.low, found.high) == pytest.approx((0.5, 0.5 - 0.27511, 0.5 + 0.27511), abs=1e-5)
    found = student_mean([0.0, 1.0] * 13)  # 2.0595 of 1 / sqrt(100)
    assert (found.mean, found.low, found.high) == pytest.approx((0.5, 0.29405, 0.70595), abs=1e-4)
    alone = student_mean([0.25])
    assert alone.mean == 0.25 and math.isnan(alone.low) and math.isnan(alone.high)


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


def test_values_of_another_shape_are_an_error() -> None:
    wrong: list[Any] = [[], [[]], [0.5, 0.5], [[[0.5]]]]
    for values in wrong:
        with pytest.raises(ValueError, match="values_R_I: one value per run and item, got an array of shape"):
            bootstrap_mean(values)


def test_a_bootstrap_ends_at_two_and_a_half_percent() -> None:
    """Of many items it is the normal's: 1.96 standard errors to each side."""
    values = np.random.default_rng(1).normal(3.0, 2.0, size=400)
    error = float(values.std()) / 20
    for found in (bootstrap_mean([values.tolist()], draws=10_000), nested_mean([[values.tolist()]], draws=10_000)):
        ends = [(found.low - found.mean) / error, (found.high - found.mean) / error]
        assert found.mean == pytest.approx(values.mean()) and ends == pytest.approx([-1.96, 1.96], abs=0.09)


class TestNested:
    """Means over base models, their runs, and items."""

    def test_base_models_that_differ_alone_give_student_s_interval(self) -> None:
        means = (0.15, 0.0, 0.21, 0.25)
        found, expected = nested_mean([[[mean] * 30] * 2 for mean in means]), student_mean(means)
        assert found.mean == pytest.approx(expected.mean)
        assert (found.low, found.high) == pytest.approx((expected.low, expected.high), abs=0.01)

    @pytest.mark.parametrize(
        ("values_B_R_I", "clusters_I", "expected"),
        [
            ([[[1.0, 3.0]]], [0, 1], {1.0: 0.25, 2.0: 0.5, 3.0: 0.25}),  # items
            ([[[1.0, 3.0]]], [0, 0], {2.0: 1.0}),
            ([[[1.0], [3.0]]], [0], {1.0: 0.25, 2.0: 0.5, 3.0: 0.25}),  # runs
            ([[[1.0]], [[3.0]]], [0], {1.0: 0.25, 2.0: 0.5, 3.0: 0.25}),  # base models
            ([[[1.0, math.nan]]], [0, 1], {1.0: 0.75, math.nan: 0.25}),  # of one draw in four nothing is known
            ([[[1.0]], [[math.nan]]], [0], {1.0: 0.75, math.nan: 0.25}),
        ],
    )
    def test_each_level_is_drawn_with_its_chances(
        self, values_B_R_I: list[list[list[float]]], clusters_I: list[int], expected: dict[float, float]
    ) -> None:
        bases = [np.array(values_R_I) for values_R_I in values_B_R_I]
        drawn = _drawn_means(bases, np.array(clusters_I), 4000, np.random.default_rng(0))
        found, counts = np.unique(drawn, return_counts=True)
        assert dict(zip(map(str, found), counts / 4000, strict=True)) == {
            str(value): pytest.approx(share, abs=0.03) for value, share in expected.items()
        }

    def test_items_alone_give_the_bootstrap_s(self) -> None:
        """Base models that agree add nothing; t of 2 degrees of freedom and three halves of the variance stay."""
        items = np.random.default_rng(2).random(60).tolist()
        one, found = bootstrap_mean([items]), nested_mean([[items]] * 3)
        widened = 4.303 / 1.96 * math.sqrt(3 / 2)
        assert found.high - found.low == pytest.approx(widened * (one.high - one.low), rel=0.05)

    def test_items_of_a_cluster_count_as_one(self) -> None:
        values, clusters = [1.0, 1.0, 1.0, 0.0, 0.0, 0.0] * 4, [i // 3 for i in range(24)]
        alone, together = nested_mean([[values]]), nested_mean([[values]], clusters)
        assert alone.mean == together.mean == 0.5
        ratio = (together.high - together.low) / (alone.high - alone.low)
        assert ratio == pytest.approx(math.sqrt(3), rel=0.1)

    def test_values_that_are_missing_count_nowhere(self) -> None:
        """Of one base model the mean is over the items that it has; an item that no base model has is as if it were not there."""
        nan = math.nan
        found = nested_mean([[[1.0, nan, 0.5, nan]], [[nan, 0.0, 0.25, nan]], [[1.0, 0.0, 0.5, nan]]])
        assert found.mean == pytest.approx((0.75 + 0.125 + 0.5) / 3)
        whole = nested_mean([[[1.0, 0.0, 1.0, 1.0]]])
        with_gap = nested_mean([[[1.0, 0.0, 1.0, 1.0, nan]]])
        assert with_gap.mean == whole.mean and with_gap.low == pytest.approx(whole.low, abs=0.2)
        assert all(math.isnan(one) for one in (nested_mean([[[nan]]]).mean, nested_mean([[[nan]]]).low))

    def test_all_levels_are_in_the_interval(self) -> None:
        """Base models, runs of each, and clusters of items: each spread alone makes the interval wider than none."""
        rng = random.Random(3)

        def width(base: float, run: float, item: float) -> float:
            items = [item * rng.gauss(0, 1) for _ in range(4)]
            values = [
                [
                    [level + drift + items[i // 5] for i in range(20)]
                    for drift in [run * rng.gauss(0, 1) for _ in range(3)]
                ]
                for level in [base * rng.gauss(0, 1) for _ in range(6)]
            ]
            found = nested_mean(values, [i // 5 for i in range(20)], draws=400)
            return (found.high - found.low) / 2

        assert width(0, 0, 0) == pytest.approx(0)
        # Half an interval is Student's 2.571 (5 degrees of freedom) standard errors: 1 / sqrt(6), 1 / sqrt(18), 1 / sqrt(4).
        # The spread of runs counts twice, since it also tells base models apart.
        for spread, error in (((1, 0, 0), 6), ((0, 1, 0), 18), ((0, 0, 1), 4)):
            mean = sum(width(*spread) for _ in range(20)) / 20
            assert 0.7 < mean / (2.571 / math.sqrt(error)) < 1.7, spread

    def test_intervals_stay_in_the_range_and_shapes_are_checked(self) -> None:
        found = nested_mean([[[0.0] * 5], [[1.0] * 5]], low=0.0, high=1.0)
        assert (found.low, found.high) == (0.0, 1.0)
        for wrong in ([], [[[0.5] * 3], [[0.5] * 4]]):
            with pytest.raises(ValueError, match="one value per base model, run and item"):
                nested_mean(wrong)


class TestClustered:
    """Means of values that come in groups."""

    def test_one_group_tells_nothing_of_the_others(self) -> None:
        found = clustered_mean([[1.0, 0.0, 0.5]])
        half = Z_95 / 6  # of the range divided by the number of values, half
        assert (found.mean, found.low, found.high) == pytest.approx((0.5, 0.5 - half, 0.5 + half))
        found, alone = clustered_mean([[1.0, 0.0]]), wilson(1, 2)
        assert (found.mean, found.low, found.high) == pytest.approx((0.5, alone.low, alone.high))

    def test_groups_of_one_are_independent_trials(self) -> None:
        values = [[1.0]] * 8 + [[0.0]] * 2
        found, alone = clustered_mean(values), wilson(7.2, 9)  # the variance is estimated with n - 1
        assert (found.mean, found.low, found.high) == pytest.approx((0.8, alone.low, alone.high))

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

    def test_the_variance_is_that_between_groups(self) -> None:
        """Against numbers computed by hand: the groups deviate by 0.5 and -0.5 in sum."""
        found = clustered_mean([[0.75, 0.75], [0.25, 0.25]])
        half = Z_95 * math.sqrt(0.5 / 4**2 * 2 / 1 + (1 / 8) ** 2)
        assert (found.mean, found.low, found.high) == pytest.approx((0.5, max(0.0, 0.5 - half), min(1.0, 0.5 + half)))
        wide = clustered_mean([[7.5, 7.5], [2.5, 2.5], []], 0.0, 20.0)  # the empty group is none
        half = Z_95 * math.sqrt(50 / 4**2 * 2 / 1 + (20 / 8) ** 2)
        assert (wide.mean, wide.low, wide.high) == pytest.approx((5.0, max(0.0, 5 - half), 5 + half))

    def test_a_longer_group_counts_with_all_its_values(self) -> None:
        values = [[0.5] * 6, [0.1] * 2, [0.9] * 2, [0.4] * 10]
        mean = (3.0 + 0.2 + 1.8 + 4.0) / 20
        deviations = [3.0 - 6 * mean, 0.2 - 2 * mean, 1.8 - 2 * mean, 4.0 - 10 * mean]
        half = Z_95 * math.sqrt(sum(d * d for d in deviations) / 400 * 4 / 3 + (1 / 40) ** 2)
        found = clustered_mean(values)
        assert (found.mean, found.low, found.high) == pytest.approx((mean, mean - half, mean + half))

    def test_two_values_of_any_range_have_wilson_s_interval_of_their_effective_number(self) -> None:
        values = [[1.0, 1.0], [0.0, 0.0], [1.0, 0.0]]
        variance = 2.0 / 6**2 * 3 / 2  # between groups: deviations 1, -1, 0
        alone = wilson(1.5, 6 * (0.25 / 6) / variance)
        trials = 6 * (0.25 / 6) / variance
        alone = wilson(0.5 * trials, trials)
        found = clustered_mean(values)
        assert (found.mean, found.low, found.high) == pytest.approx((0.5, alone.low, alone.high))
        scaled = clustered_mean([[8 * value - 3 for value in group] for group in values], -3.0, 5.0)
        assert (scaled.mean, scaled.low, scaled.high) == pytest.approx((1.0, -3 + 8 * alone.low, -3 + 8 * alone.high))

    def test_groups_that_do_not_differ_count_with_all_their_values(self) -> None:
        found, alone = clustered_mean([[1.0, 0.0], [0.0, 1.0]]), wilson(2, 4)
        assert (found.low, found.high) == pytest.approx((alone.low, alone.high))

    def test_groups_that_differ_less_than_chance_count_no_more_than_their_values(self) -> None:
        found, alone = clustered_mean([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0]]), wilson(5, 11)
        assert (found.low, found.high) == pytest.approx((alone.low, alone.high))
