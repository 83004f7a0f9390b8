"""How far sampler, trainer and reference are apart, and the penalty for leaving the reference, against plain numbers."""

import asyncio
from collections.abc import Awaitable
from typing import Any

import numpy as np
import pytest
import tinker
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes import FakeServiceClient, Pending, fake_logprob, said
from tests.rl.handmade import DATA, ScaledSampler, array, trajectory, turn
from tinker_cookbook.exceptions import DataValidationError
from tinker_cookbook.rl.data_processing import replace_inputs, trajectory_to_data
from tinker_cookbook.rl.metrics import (
    KLPenalty,
    compute_kl_sample_train,
    compute_post_kl,
    compute_sampling_client_metrics,
    discounted_future_sum_vectorized,
    incorporate_kl_penalty,
    kl_alarm,
    score_sequences,
)
from tinker_cookbook.runs.evaluation import compute_target_logprobs, full_sequence
from tinker_cookbook.utils.cost_estimation import TokenUsage


def with_logprobs(datum: tinker.Datum, logprobs: list[float]) -> tinker.Datum:
    return replace_inputs(datum, logprobs=np.array(logprobs, dtype=np.float32))


class TestKLSampleTrain:
    # Two tokens of context and two sampled; one and three. What stands at a context position must not matter.
    sampled = (with_logprobs(DATA[0], [9.0, -1.0, -2.0]), with_logprobs(DATA[1], [9.0, -3.0, -4.0, -5.0]))

    def test_golden(self) -> None:
        trained = [torch.tensor([-7.0, -1.5, -2.25]), torch.tensor([-7.0, -2.0, -4.5, -5.0])]
        diffs = np.array([0.5, 0.25, -1.0, 0.5, 0.0])
        assert compute_kl_sample_train(self.sampled, trained) == {
            "optim/kl_sample_train_v1": pytest.approx(diffs.sum() / 5),
            "optim/kl_sample_train_v2": pytest.approx((diffs**2).sum() / 2 / 5),
            "optim/entropy": pytest.approx((1 + 2 + 3 + 4 + 5) / 5),
            "optim/ratio_min": pytest.approx(np.exp(-0.5)),
            "optim/ratio_mean": pytest.approx(np.exp(-diffs).mean()),
            "optim/ratio_max": pytest.approx(np.exp(1.0)),
            "optim/kl_by_depth/0": pytest.approx((diffs**2).sum() / 2 / 5),
        }

    def test_by_depth_over_the_sampled_tokens_of_each_datum(self) -> None:
        """Context between the turns of a datum does not count."""
        (datum,) = trajectory_to_data(
            trajectory(turn([1] * 9, said([2] * 60)), turn([1] * 9 + [2] * 60 + [3] * 500, said([4] * 260))), 1.0
        )
        mask = datum.loss_fn_inputs["mask"].to_numpy() > 0
        shift = np.zeros(len(mask), dtype=np.float32)
        shift[np.flatnonzero(mask)[64:256]] = 0.5
        shift[np.flatnonzero(mask)[256:]] = 1.0
        trained = datum.loss_fn_inputs["logprobs"].to_torch() - torch.from_numpy(shift)
        found = compute_kl_sample_train([datum], [trained])
        depths = {key: value for key, value in found.items() if "depth" in key}
        assert depths == {
            "optim/kl_by_depth/0": pytest.approx(0, abs=1e-9),
            "optim/kl_by_depth/64": pytest.approx(0.125),
            "optim/kl_by_depth/256": pytest.approx(0.5),
        }
        alarm = kl_alarm(found, 0.01)
        assert (
            alarm is not None
            and "above kl_alarm=0.01: " in alarm
            and "0.12 from token 64 on, 0.5 from token 256 on" in alarm
        )
        assert kl_alarm(found, 0.6) is None and kl_alarm(found, 0) is None and kl_alarm({}, 0.01) is None

    def test_a_ratio_beyond_all_numbers_can_be_written(self) -> None:
        found = compute_kl_sample_train([self.sampled[0]], [torch.tensor([0.0, -1e5, 1e5])])
        assert 0 < found["optim/ratio_min"] < found["optim/ratio_max"] < np.inf

    def test_without_a_sampled_token_nothing_is_said(self) -> None:
        silent = replace_inputs(DATA[0], mask=np.zeros(3, dtype=np.float32))
        assert compute_kl_sample_train([silent], [torch.zeros(3)]) == compute_kl_sample_train([], []) == {}
        spoken, trained = self.sampled[0], torch.zeros(3)
        assert compute_kl_sample_train([silent, spoken], [trained] * 2) == compute_kl_sample_train([spoken], [trained])

    def test_logprobs_that_do_not_match_the_data_are_refused(self) -> None:
        with pytest.raises(DataValidationError, match=r"datum 1: \(4,\) sampled logprobs, the trainer returned \(3,\)"):
            compute_kl_sample_train(self.sampled, [torch.zeros(3)] * 2)
        with pytest.raises(ValueError, match="zip"):
            compute_kl_sample_train(self.sampled, [torch.zeros(3)])


class Answers:
    """Gives the same answer, whatever it is asked to score."""

    def __init__(self, *values: float | None):
        self.values = list(values)

    def compute_logprobs(self, prompt: tinker.ModelInput) -> Awaitable[list[float | None]]:
        return Pending("compute_logprobs", self.values, [])


class TestTargetLogprobs:
    def logprobs(self, *values: float | None) -> list[np.ndarray]:
        return asyncio.run(compute_target_logprobs([DATA[0]], Answers(*values)))  # pyright: ignore[reportArgumentType]

    def test_the_first_token_has_no_prediction(self) -> None:
        (found,) = self.logprobs(None, -1.0, -2.0, -3.0)
        assert found.tolist() == [-1.0, -2.0, -3.0] and found.dtype == np.float32

    @pytest.mark.parametrize("values", [(None, -1.0, -2.0), (None, -1.0, None, -3.0), (None, -1.0, -2.0, -3.0, -4.0)])
    def test_each_target_needs_one(self, values: tuple[float | None, ...]) -> None:
        message = rf"datum 0: {len(values) - 1} logprobs came back for targets of shape \(3,\)"
        with pytest.raises(DataValidationError, match=message):
            self.logprobs(*values)

    def test_full_sequence(self) -> None:
        assert full_sequence(DATA[0]).to_ints() == [1, 2, 10, 11]


def test_where_and_when_a_batch_was_sampled() -> None:
    assert compute_sampling_client_metrics([7, 3, 4, 6], [0.5, 2.0, 8.0, 1.5]) == {
        "sampling_client/step_max": 7,
        "sampling_client/step_min": 3,
        "sampling_client/step_mean": 5.0,
        "time/sampling_time_max": 8.0,
        "time/sampling_time_min": 0.5,
        "time/sampling_time_mean": 3.0,
    }


class TestKLPenalty:
    def test_golden(self) -> None:
        sampler: Any = ScaledSampler(-1.0)
        penalized, metrics, usage = asyncio.run(KLPenalty(sampler, 0.5)(DATA, [], []))
        diffs = [fake_logprob(token) + 1.0 for token in (10, 11, 12, 13, 14)]
        mean = sum(diffs) / 5
        expected = [2.0 + 0.5 * (mean - diff) for diff in diffs]
        found = [v for d in penalized for v in array(d, "advantages")[array(d, "mask") > 0]]
        assert found == pytest.approx(expected, abs=1e-6)
        assert metrics["optim/kl_policy_base"] == pytest.approx(mean)
        assert all(array(d, "advantages")[0] == 0 for d in penalized)  # the prompt pays nothing
        # The whole sequence is scored, with the last target.
        assert sampler.prompts == [[1, 2, 10, 11], [1, 2, 12, 13, 14]]
        assert usage == TokenUsage(prefill_uncached=9)
        assert [array(d, "advantages").max() for d in DATA] == [2.0, 2.0]  # the given ones are not touched
        asyncio.run(incorporate_kl_penalty(penalized, sampler, -0.5))  # but here they are: taken back
        assert [array(d, "advantages").tolist() for d in penalized] == [
            pytest.approx(array(d, "advantages").tolist(), abs=1e-6) for d in DATA
        ]

    def test_a_discounted_penalty_is_that_of_the_sampled_tokens_that_follow(self) -> None:
        """Two turns with text of the environment before each: it neither pays, nor has a penalty that others share."""
        gamma, coef = 0.5, 2.0
        (datum,) = trajectory_to_data(
            trajectory(turn([1, 2], said([10, 11])), turn([1, 2, 10, 11, 5], said([12]))), 1.0
        )
        sampler: Any = ScaledSampler(-1.0)
        (penalized,), metrics, _ = asyncio.run(KLPenalty(sampler, coef, gamma)([datum], [], []))
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

    def test_scores_of_whole_sequences_with_what_they_used(self) -> None:
        client: Any = FakeServiceClient().new_sampler(0)
        sequences = [tinker.ModelInput.from_ints([1, 2, 10]), tinker.ModelInput.from_ints([3, 4])]
        scores, usage = asyncio.run(score_sequences(client, sequences))
        assert [[None if value is None else round(value, 6) for value in row] for row in scores] == [
            [None, fake_logprob(2), fake_logprob(10)],
            [None, fake_logprob(4)],
        ]
        assert usage == TokenUsage(sampled=2, prefill_uncached=5)
        assert [call.params.max_tokens for call in client.sampled] == [1, 1]

    def test_post_kl(self) -> None:
        sampler: Any = ScaledSampler(-1.0)
        found, usage = asyncio.run(compute_post_kl(DATA, sampler))
        assert usage == TokenUsage(prefill_uncached=9)
        diffs = np.array([fake_logprob(token) + 1.0 for token in (10, 11, 12, 13, 14)])
        assert found["optim/kl_pre_post_v1"] == pytest.approx(diffs.mean())
        assert found["optim/kl_pre_post_v2"] == pytest.approx(0.5 * (diffs**2).mean())

    @pytest.mark.parametrize("discount", [0.0, 0.5])
    def test_a_datum_of_no_sampled_token_pays_nothing(self, discount: float) -> None:
        silent = replace_inputs(DATA[0], mask=np.zeros(3, dtype=np.float32))
        sampler: Any = ScaledSampler(-1.0)
        data, metrics, _ = asyncio.run(KLPenalty(sampler, 0.5, discount)([silent], [], []))
        assert data == [silent] and metrics == {}
        one = trajectory_to_data(trajectory(turn([1], said([12]))), 2.0)
        data, metrics, _ = asyncio.run(KLPenalty(sampler, 0.5, discount)([silent, *one], [], []))
        assert metrics == {"optim/kl_policy_base": fake_logprob(12) + 1.0}
        # A single token is its own mean. What comes back is float32, as losses take it.
        advantages = [datum.loss_fn_inputs["advantages"] for datum in data]
        assert [values.tolist() for values in advantages] == [[0.0, 2.0, 2.0], [2.0]]
        assert [values.dtype for values in advantages] == ["float32"] * 2
