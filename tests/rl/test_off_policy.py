"""The correction of stale data: weights, what is cut, and from where the loss measures."""

import asyncio
import math
from collections.abc import Awaitable, Mapping
from typing import Any

import numpy as np
import pytest
import tinker

from tests.fakes import Pending, fake_logprob
from tests.rl.handmade import DATA, array
from tinker_cookbook.exceptions import ConfigurationError, DataValidationError
from tinker_cookbook.rl.minibatch import Update
from tinker_cookbook.rl.off_policy import OffPolicyCorrection, correct_off_policy


class ShiftedTrainer:
    """Scores each token `shift` higher than the fake sampler did."""

    def __init__(self, shift: float):
        self.shift = shift
        self.seen: list[tuple[str, Mapping[str, Any] | None]] = []

    def forward(
        self, data: list[tinker.Datum], loss_fn: str, loss_fn_config: Mapping[str, Any] | None = None
    ) -> Awaitable[tinker.ForwardBackwardOutput]:
        self.seen.append((loss_fn, loss_fn_config))
        outputs = []
        for datum in data:
            targets = datum.loss_fn_inputs["target_tokens"].tolist()
            values = np.array([fake_logprob(int(t)) + self.shift for t in targets], dtype=np.float32)
            outputs.append({"logprobs": tinker.TensorData.from_numpy(values)})
        output = tinker.ForwardBackwardOutput(loss_fn_output_type="logprobs", loss_fn_outputs=outputs, metrics={})
        return Pending("forward", output, [])


class TestOffPolicyCorrection:
    def correct(self, shift: float, **config: Any) -> tuple[list[tinker.Datum], dict[str, float]]:
        trainer: Any = ShiftedTrainer(shift)
        scored = asyncio.run(Update(trainer, 1e-4, "ppo").score(DATA))
        assert trainer.seen == [("ppo", None)]
        return correct_off_policy(DATA, scored, OffPolicyCorrection(**config))

    @pytest.mark.parametrize(
        ("shift", "config", "weights", "cut"),
        [
            (0.1, {"cap": 2.0}, [math.exp(0.1)] * 2, 0.0),
            (1.0, {"cap": 2.0}, [2.0] * 2, 1.0),
            (-1.0, {"cap": 2.0}, [math.exp(-1)] * 2, 0.0),
            (1.0, {"cap": 2.0, "mode": "mask"}, [0.0] * 2, 1.0),
            (-1.0, {"cap": 2.0, "mode": "mask"}, [0.0] * 2, 1.0),
            (0.1, {"cap": 2.0, "level": "sequence"}, [math.exp(0.2), math.exp(0.3)], 0.0),
            (0.3, {"cap": 2.0, "level": "sequence"}, [math.exp(0.6), 2.0], 0.5),
            (1000.0, {"cap": 2.0, "mode": "mask"}, [0.0] * 2, 1.0),
            # IcePop's band is 0.5 to 5
            (1.5, {"cap": 5.0, "mode": "mask", "low": 0.5}, [math.exp(1.5)] * 2, 0.0),
            (1.7, {"cap": 5.0, "mode": "mask", "low": 0.5}, [0.0] * 2, 1.0),
            (-0.6, {"cap": 5.0, "mode": "mask", "low": 0.5}, [math.exp(-0.6)] * 2, 0.0),
            (-0.8, {"cap": 5.0, "mode": "mask", "low": 0.5}, [0.0] * 2, 1.0),
            (-9.0, {"cap": 5.0, "mode": "mask", "low": 0.0}, [math.exp(-9.0)] * 2, 0.0),
            (-0.3, {"cap": 2.0, "mode": "mask", "level": "sequence", "low": 0.5}, [math.exp(-0.6), 0.0], 0.5),
            # the bounds themselves are inside
            (0.0, {"cap": 1.0}, [1.0] * 2, 0.0),
            (0.0, {"cap": 1.0, "mode": "mask", "low": 1.0}, [1.0] * 2, 0.0),
        ],
    )
    def test_weights(self, shift: float, config: dict[str, Any], weights: list[float], cut: float) -> None:
        corrected, metrics = self.correct(shift, **config)
        for datum, weight in zip(corrected, weights, strict=True):
            mask = array(datum, "mask") > 0
            assert array(datum, "advantages")[mask] == pytest.approx(2.0 * weight, rel=1e-5)
            assert array(datum, "advantages")[~mask].tolist() == [0.0] * int((~mask).sum())
        assert metrics["off_policy/frac_cut"] == cut
        assert math.isfinite(metrics["off_policy/ratio_max"])

    def test_the_loss_measures_from_the_trainers_logprobs(self) -> None:
        corrected, metrics = self.correct(0.1)
        for before, after in zip(DATA, corrected, strict=True):
            mask = array(before, "mask")
            expected = (array(before, "logprobs") + 0.1) * mask
            assert array(after, "logprobs") == pytest.approx(expected, abs=1e-6)
        assert metrics["off_policy/ratio_mean"] == pytest.approx(math.exp(0.1), rel=1e-5)

    def test_the_ratios_that_are_reported_are_those_before_the_cut(self) -> None:
        """Sequences of 2 and 3 tokens, each with the ratio e^0.3: the second is cut to 2."""
        _, metrics = self.correct(0.3, cap=2.0, level="sequence")
        ratios = [math.exp(0.6), math.exp(0.9)]
        assert metrics == {
            "off_policy/ratio_min": pytest.approx(ratios[0], rel=1e-5),
            "off_policy/ratio_mean": pytest.approx(sum(ratios) / 2, rel=1e-5),
            "off_policy/ratio_max": pytest.approx(ratios[1], rel=1e-5),
            "off_policy/frac_cut": 0.5,
        }

    @pytest.mark.parametrize(("shift", "bound"), [(1000.0, 80.0), (-1000.0, -80.0), (79.0, 79.0), (-79.0, -79.0)])
    def test_a_ratio_is_reported_up_to_e_to_the_80th(self, shift: float, bound: float) -> None:
        _, metrics = self.correct(shift)
        assert np.log([metrics["off_policy/ratio_min"], metrics["off_policy/ratio_max"]]) == pytest.approx(
            bound, abs=1e-4
        )

    def test_each_token_needs_the_trainer_s_logprob(self) -> None:
        scored = [array(datum, "logprobs") for datum in DATA]
        with pytest.raises(DataValidationError, match=r"datum 1: \(4,\) sampled logprobs, the trainer gave \(3,\)"):
            correct_off_policy(DATA, [scored[0], scored[1][1:]], OffPolicyCorrection())

    def test_without_a_lower_bound_it_is_the_inverse_of_the_cap(self) -> None:
        assert OffPolicyCorrection().log_bounds == pytest.approx((-math.log(2), math.log(2)))
        assert OffPolicyCorrection(mode="mask", cap=5.0).log_bounds == pytest.approx((-math.log(5), math.log(5)))
        assert OffPolicyCorrection(mode="mask", cap=5.0, low=0.25).log_bounds == pytest.approx(
            (-math.log(4), math.log(5))
        )

    def test_a_lower_bound_is_a_ratio_that_masks(self) -> None:
        refused: list[dict[str, Any]] = [{"low": 0.5}, {"low": 1.5, "mode": "mask"}, {"low": -0.1, "mode": "mask"}]
        for config in refused:
            with pytest.raises(ConfigurationError, match=r"low=.*: must be between 0 and 1, and goes with mode=mask"):
                OffPolicyCorrection(**config)

    def test_a_cap_below_one_is_refused(self) -> None:
        assert OffPolicyCorrection(cap=1.0).cap == 1.0
        for cap in (0.5, math.nan):
            with pytest.raises(ConfigurationError, match=f"cap={cap}: must be at least 1"):
                OffPolicyCorrection(cap=cap)
