"""How far an update moved the policy, and the penalty for leaving a reference policy, against plain numbers."""

import asyncio
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes import fake_logprob, said
from tests.rl.handmade import DATA, ScaledSampler, array, trajectory, turn
from tinker_cookbook.rl.data_processing import trajectory_to_data
from tinker_cookbook.rl.metrics import (
    compute_post_kl,
    discounted_future_sum_vectorized,
    full_sequence,
    incorporate_kl_penalty,
)


class TestKLPenalty:
    def test_golden(self) -> None:
        sampler: Any = ScaledSampler(-1.0)
        penalized, metrics = asyncio.run(incorporate_kl_penalty(DATA, sampler, 0.5))
        diffs = [fake_logprob(token) + 1.0 for token in (10, 11, 12, 13, 14)]
        mean = sum(diffs) / 5
        expected = [2.0 + 0.5 * (mean - diff) for diff in diffs]
        found = [v for d in penalized for v in array(d, "advantages")[array(d, "mask") > 0]]
        assert found == pytest.approx(expected, abs=1e-6)
        assert metrics["optim/kl_policy_base"] == pytest.approx(mean)
        assert all(array(d, "advantages")[0] == 0 for d in penalized)  # the prompt pays nothing
        # The whole sequence is scored, with the last target.
        assert sampler.prompts == [[1, 2, 10, 11], [1, 2, 12, 13, 14]]
        assert [array(d, "advantages").max() for d in DATA] == [2.0, 2.0]  # the given ones are not touched

    def test_a_discounted_penalty_is_that_of_the_sampled_tokens_that_follow(self) -> None:
        """Two turns with text of the environment before each: it neither pays, nor has a penalty that others share."""
        gamma, coef = 0.5, 2.0
        (datum,) = trajectory_to_data(
            trajectory(turn([1, 2], said([10, 11])), turn([1, 2, 10, 11, 5], said([12]))), 1.0
        )
        sampler: Any = ScaledSampler(-1.0)
        (penalized,), metrics = asyncio.run(incorporate_kl_penalty([datum], sampler, coef, gamma))
        a, b, c = (fake_logprob(token) + 1.0 for token in (10, 11, 12))
        mean = (a + b + c) / 3
        a, b, c = (coef * (mean - diff) for diff in (a, b, c))
        # Targets are 2, 10, 11, 5, 12; the 5 between the turns is one step of discount.
        expected = [0.0, 1 + a + gamma * b + gamma**3 * c, 1 + b + gamma**2 * c, 0.0, 1 + c]
        assert array(penalized, "advantages").tolist() == pytest.approx(expected, abs=1e-6)
        assert metrics == {"optim/kl_policy_base": pytest.approx(mean)}

    @given(st.lists(st.floats(-5, 5), min_size=1, max_size=12), st.floats(0, 1))
    def test_discounted_sum(self, values: list[float], gamma: float) -> None:
        found = discounted_future_sum_vectorized(np.array(values), gamma)
        n = len(values)
        expected = [sum(gamma**k * values[t + k] for k in range(n - t)) for t in range(n)]
        assert found.tolist() == pytest.approx(expected, abs=1e-9)

    def test_post_kl(self) -> None:
        found = asyncio.run(compute_post_kl(DATA, ScaledSampler(-1.0)))  # pyright: ignore[reportArgumentType]
        diffs = np.array([fake_logprob(token) + 1.0 for token in (10, 11, 12, 13, 14)])
        assert found["optim/kl_pre_post_v1"] == pytest.approx(diffs.mean())
        assert found["optim/kl_pre_post_v2"] == pytest.approx(0.5 * (diffs**2).mean())

    def test_full_sequence(self) -> None:
        assert full_sequence(DATA[0]).to_ints() == [1, 2, 10, 11]
