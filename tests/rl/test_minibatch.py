"""From groups to datums: scales, filters, penalties, role baselines and the correction of stale data, against plain numbers."""

import asyncio
import math
from collections.abc import Awaitable, Mapping
from typing import Any

import numpy as np
import pytest
import tinker
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes import Pending, fake_logprob, said
from tests.rl.test_data_processing import group, trajectory, turn
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.rl.advantages import AdvantageConfig, RoleBaselines, compute_advantages, token_scales
from tinker_cookbook.rl.algorithms import LOSS_FNS, PRESETS, check_loss, get_preset, loss_datum
from tinker_cookbook.rl.data_processing import trajectory_to_data
from tinker_cookbook.rl.kl import KLPenalty, discounted_future_sum_vectorized, full_sequence, incorporate_kl_penalty
from tinker_cookbook.rl.metrics import compute_post_kl
from tinker_cookbook.rl.minibatch import Minibatch, prepare_minibatch
from tinker_cookbook.rl.off_policy import OffPolicyCorrection, correct_off_policy
from tinker_cookbook.rl.types import TrajectoryGroup


def prepare(groups: list[TrajectoryGroup], *args: Any, **config: Any) -> Minibatch:
    return asyncio.run(prepare_minibatch(groups, AdvantageConfig(**config), *args))


def array(datum: tinker.Datum, key: str) -> np.ndarray:
    return datum.loss_fn_inputs[key].to_numpy().astype(np.float64)


def total_advantages(batch: Minibatch) -> list[list[float]]:
    """The advantages of the action tokens of each datum."""
    return [array(datum, "advantages")[array(datum, "mask") > 0].tolist() for datum in batch.data_D]


class TestScale:
    members = group([1.0, 0.0], lengths=[2, 5])
    others = group([0.0, 3.0, 9.0], trained=[True, True, False], lengths=[1, 4, 100])

    def test_sum_leaves_advantages_as_they_are(self) -> None:
        batch = prepare([self.members, self.others])
        assert total_advantages(batch) == [[0.5] * 2, [-0.5] * 5, [-1.5], [1.5] * 4]

    def test_sequence_divides_by_what_each_member_generated(self) -> None:
        found = total_advantages(prepare([self.members, self.others], scale="sequence"))
        assert [sum(values) for values in found] == pytest.approx([0.5, -0.5, -1.5, 1.5])

    def test_token_divides_by_all_tokens_that_train(self) -> None:
        found = total_advantages(prepare([self.members, self.others], scale="token"))
        assert [values[0] for values in found] == pytest.approx([a / 12 for a in (0.5, -0.5, -1.5, 1.5)])

    def test_a_removed_group_does_not_count_in_the_mean_over_tokens(self) -> None:
        constant = group([1.0, 1.0], lengths=[50, 50])
        found = total_advantages(prepare([constant, self.members], True, scale="token"))
        assert [values[0] for values in found] == pytest.approx([0.5 / 7, -0.5 / 7])
        kept = prepare([constant, self.members], False, scale="token")
        assert total_advantages(kept)[0][0] == pytest.approx(0.5 / 107)

    def test_tokens_of_all_turns_count(self) -> None:
        talker = trajectory(turn([1], said([2, 3])), turn([1, 2, 3, 4], said([5, 6, 7])))
        members = TrajectoryGroup([talker], [0.0], [{}])
        assert token_scales([members], "sequence") == [[5.0]]
        assert total_advantages(prepare([members], baseline="constant", scale="sequence"))[0] == pytest.approx(
            [1 / 5] * 5
        )

    def test_metadata_keeps_the_places_of_filtered_groups(self) -> None:
        batch = prepare([group([1.0, 1.0]), self.members], True)
        assert [(m["group_idx"], m["traj_idx"]) for m in batch.metadata_D] == [(1, 0), (1, 1)]
        assert len(batch.groups) == 2 and batch.num_trained_groups == 1


class TestRoleBaselines:
    def test_golden(self) -> None:
        baselines = RoleBaselines(decay=0.5)
        first, second = group([1.0, 0.0]), group([0.0, 1.0])
        first.roles_G = second.roles_G = ["first mover", "second mover"]
        found = compute_advantages([first, second], AdvantageConfig(baseline="role"), baselines)
        # b = 0.5 after the reward 1, then 0.25 after the reward 0; and 0, then 0.5.
        assert [values.tolist() for values in found] == [[0.5, 0.0], [-0.25, 0.5]]
        assert baselines.means == {"first mover": 0.25, "second mover": 0.5}

    def test_a_group_of_one_trains_and_the_rejected_leave_no_trace(self) -> None:
        baselines = RoleBaselines(decay=0.9)
        found = compute_advantages(
            [group([2.0, 5.0], trained=[True, False])], AdvantageConfig(baseline="role"), baselines
        )
        assert found[0].tolist() == pytest.approx([2.0 - 0.2, 0.0]) and baselines.means == {"all": pytest.approx(0.2)}

    def test_without_its_means_it_is_refused(self) -> None:
        with pytest.raises(ConfigurationError, match="role_baselines"):
            compute_advantages([group([1.0])], AdvantageConfig(baseline="role"))


class ScaledSampler:
    """Gives every token the same logprob."""

    def __init__(self, logprob: float):
        self.logprob = logprob
        self.prompts: list[list[int]] = []

    def compute_logprobs(self, prompt: tinker.ModelInput) -> Awaitable[list[float | None]]:
        self.prompts.append(prompt.to_ints())
        values: list[float | None] = [None, *([self.logprob] * (prompt.length - 1))]
        return Pending("compute_logprobs", values, [])


DATA = [
    datum
    for tokens in ([10, 11], [12, 13, 14])
    for datum in trajectory_to_data(trajectory(turn([1, 2], said(tokens))), 2.0)
]


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

    @given(st.lists(st.floats(-5, 5), min_size=1, max_size=12), st.floats(0, 1))
    def test_discounted_sum(self, values: list[float], gamma: float) -> None:
        found = discounted_future_sum_vectorized(np.array(values), gamma)
        n = len(values)
        expected = [sum(gamma**k * values[t + k] for k in range(n - t)) for t in range(n)]
        assert found.tolist() == pytest.approx(expected, abs=1e-9)

    def test_members_without_advantage_pay_too(self) -> None:
        constant = group([1.0, 1.0], lengths=[2, 3])
        assert prepare([constant]).data_D == []
        penalty = KLPenalty(ScaledSampler(-1.0), 0.5)  # pyright: ignore[reportArgumentType]
        batch = asyncio.run(prepare_minibatch([constant], AdvantageConfig(), penalties=[penalty]))
        assert batch.metrics["optim/kl_policy_base"] == pytest.approx(1 + fake_logprob(2))
        mixed = TrajectoryGroup(
            [trajectory(turn([1], said([3]))), trajectory(turn([1], said([9])))], [1.0, 1.0], [{}, {}]
        )
        batch = asyncio.run(prepare_minibatch([mixed], AdvantageConfig(), penalties=[penalty]))
        assert len(batch.data_D) == 2
        assert sum(values[0] for values in total_advantages(batch)) == pytest.approx(0, abs=1e-6)

    def test_post_kl(self) -> None:
        found = asyncio.run(compute_post_kl(DATA, ScaledSampler(-1.0)))  # pyright: ignore[reportArgumentType]
        diffs = np.array([fake_logprob(token) + 1.0 for token in (10, 11, 12, 13, 14)])
        assert found["optim/kl_pre_post_v1"] == pytest.approx(diffs.mean())
        assert found["optim/kl_pre_post_v2"] == pytest.approx(0.5 * (diffs**2).mean())

    def test_full_sequence(self) -> None:
        assert full_sequence(DATA[0]).to_ints() == [1, 2, 10, 11]


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
        return asyncio.run(correct_off_policy(DATA, trainer, OffPolicyCorrection(**config), "ppo"))

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

    def test_a_cap_below_one_is_refused(self) -> None:
        with pytest.raises(ConfigurationError, match="cap"):
            OffPolicyCorrection(cap=0.5)


class TestLosses:
    @pytest.mark.parametrize("name", PRESETS)
    def test_presets_name_losses_with_settings_that_they_have(self, name: str) -> None:
        preset = get_preset(name)
        check_loss(preset.loss_fn, preset.loss_fn_config, "tinker")

    @pytest.mark.parametrize(
        ("loss_fn", "config", "message"),
        [
            ("reinforce", None, "unknown"),
            ("importance_sampling", {"clip_low_threshold": 0.8}, "clip_low_threshold"),
            ("ppo", {"epsilon": 0.2}, "epsilon"),
            ("ppo", {"temperature": 0.7}, "local engine"),
        ],
    )
    def test_what_a_loss_does_not_have_is_refused(self, loss_fn: str, config: Any, message: str) -> None:
        with pytest.raises(ConfigurationError, match=message):
            check_loss(loss_fn, config, "tinker")

    def test_an_unknown_preset_lists_the_known(self) -> None:
        with pytest.raises(ConfigurationError, match="dapo"):
            get_preset("grppo")

    @pytest.mark.parametrize("loss_fn", LOSS_FNS)
    def test_gspo_alone_gets_the_mask(self, loss_fn: str) -> None:
        (datum, *_) = DATA
        inputs = loss_datum(datum, loss_fn).loss_fn_inputs
        expected = {"target_tokens", "logprobs", "advantages"} | (
            {"sequence_ratio_mask"} if loss_fn == "gspo" else set()
        )
        assert set(inputs) == expected
