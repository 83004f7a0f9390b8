"""Schedules of the learning rate: golden values, warm-up, functions of one's own."""

import math
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.utils.lr_scheduling import (
    compute_schedule_lr_multiplier,
    learning_rate_at,
    register_schedule,
)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("linear", [1.0, 0.75, 0.5, 0.0]),
        ("cosine", [1.0, 0.5 + 0.25 * math.sqrt(2), 0.5, 0.0]),
        ("constant", [1.0] * 4),
    ],
)
def test_lr_schedule_golden(schedule, expected: list[float]) -> None:
    got = [compute_schedule_lr_multiplier(schedule, step, total_steps=4) for step in (0, 1, 2, 4)]
    assert got == pytest.approx(expected)


@pytest.mark.parametrize(
    ("schedule", "step", "total", "error"),
    [
        ("linear", 0, 0, "total_steps=0"),
        ("linear", 0, -1, "total_steps=-1"),
        ("linear", 5, 4, "step=5"),
        ("linear", -1, 4, "step=-1"),
        ("step", 0, 4, "lr_schedule='step'"),
    ],
)
def test_lr_schedule_errors(schedule, step: int, total: int, error: str) -> None:
    with pytest.raises(ConfigurationError, match=error):
        compute_schedule_lr_multiplier(schedule, step, total)


def test_warm_up_rises_to_the_peak_and_the_schedule_runs_over_the_rest() -> None:
    got = [compute_schedule_lr_multiplier("linear", step, total_steps=7, warmup_steps=3) for step in range(8)]
    assert got == pytest.approx([0.25, 0.5, 0.75, 1.0, 0.75, 0.5, 0.25, 0.0])
    only_warm_up = [compute_schedule_lr_multiplier("cosine", step, 2, warmup_steps=4) for step in range(3)]
    assert only_warm_up == pytest.approx([0.2, 0.4, 0.6])


def halves(step: int, total_steps: int) -> float:
    return 0.5**step * total_steps


def test_a_schedule_of_ones_own() -> None:
    assert compute_schedule_lr_multiplier(halves, 2, 4) == 1.0
    assert compute_schedule_lr_multiplier(f"{__name__}:halves", 3, 6, warmup_steps=2) == 2.0
    config = SimpleNamespace(learning_rate=0.1, lr_schedule=halves, lr_warmup_steps=1)
    assert [learning_rate_at(cast(Any, config), step, 3) for step in range(3)] == pytest.approx([0.05, 0.2, 0.1])


@pytest.mark.parametrize("value", [math.nan, math.inf, -0.1, "1", None])
def test_what_is_no_multiplier_is_named(value: object) -> None:
    with pytest.raises(ConfigurationError, match=r"gives .* at step 1 of 4: must be a number of at least 0"):
        compute_schedule_lr_multiplier(lambda step, total_steps: value, 1, 4)  # pyright: ignore[reportArgumentType]


def test_a_taken_name() -> None:
    with pytest.raises(ConfigurationError, match="'cosine' is taken"):
        register_schedule("cosine", halves)
