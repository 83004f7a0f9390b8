"""Replies at the limit of tokens: a masked one trains nothing, and the penalty is the paper's line."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.fakes import said
from tests.rl.handmade import array, group, trajectory, turn
from tests.rl.loop import make_config
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.rl.advantages import AdvantageConfig, compute_advantages
from tinker_cookbook.rl.config import check_config
from tinker_cookbook.rl.minibatch import Minibatch, prepare_minibatch
from tinker_cookbook.rl.overlong import (
    OVERLONG_METRIC_KEY,
    OverlongConfig,
    is_truncated,
    penalize_overlong,
    soft_overlong_penalty,
    without_truncated,
)
from tinker_cookbook.rl.types import StopReason, Trajectory, TrajectoryGroup


@pytest.mark.parametrize(
    ("length", "expected"), [(0, 0.0), (80, 0.0), (81, -0.05), (90, -0.5), (99, -0.95), (100, -1.0), (130, -1.0)]
)
def test_golden_numbers_of_equation_13(length: int, expected: float) -> None:
    assert soft_overlong_penalty(length, max_tokens=100, penalty_tokens=20) == pytest.approx(expected)


def test_the_longest_reply_of_each_member_is_charged() -> None:
    members = [trajectory(turn([1], said([2] * 3))), trajectory(turn([1], said([2] * 9)), turn([1], said([2])))]
    before = TrajectoryGroup(members, [1.0, 1.0], [{}, {"correct": 1.0}])
    after = penalize_overlong(before, OverlongConfig(penalty_tokens=4, penalty=0.5), max_tokens=10)
    assert after.get_total_rewards() == [1.0, 1.0 - 0.5 * 0.75]
    assert after.metrics_G == [{OVERLONG_METRIC_KEY: 0.0}, {"correct": 1.0, OVERLONG_METRIC_KEY: -0.375}]
    assert before.get_total_rewards() == [1.0, 1.0]
    assert penalize_overlong(before, OverlongConfig(mask=True), max_tokens=10) is before


def test_what_counts_as_truncated() -> None:
    whole, cut = trajectory(turn([1], said([2]))), trajectory(turn([1], replace(said([2]), stop_reason="length")))
    assert (is_truncated(whole), is_truncated(cut)) == (False, True)
    for reason, expected in (
        (StopReason.MAX_TOKENS, True),
        (StopReason.COMPLETED, False),
        (StopReason.MAX_TURNS, False),
        (StopReason.CONTEXT_OVERFLOW, True),
        (StopReason.MAX_SAMPLED_TOKENS, True),
    ):
        assert is_truncated(Trajectory(whole.transitions, whole.final_ob, reason)) is expected
        assert is_truncated(Trajectory([], whole.final_ob, reason)) is expected
    earlier = trajectory(*cut.transitions, *whole.transitions)
    assert not is_truncated(earlier) and is_truncated(trajectory(*whole.transitions, *cut.transitions))


def test_a_member_that_is_cut_off_or_was_rejected_does_not_train() -> None:
    made = group([1.0, 0.0, 0.5, 0.25], trained=[True, True, False, False])
    for i in (0, 2):
        last = made.trajectories_G[i].transitions[-1]
        last.ac = replace(last.ac, stop_reason="length")
    assert without_truncated(made).is_trained() == [False, True, False, False]
    assert made.is_trained() == [True, True, False, False]
    assert without_truncated(made).get_total_rewards() == made.get_total_rewards()


def test_a_member_without_a_reply_loses_nothing() -> None:
    made = TrajectoryGroup([trajectory(), trajectory(turn([1], said([2] * 4)))], [0.5, 0.5], [{}, {}])
    found = penalize_overlong(made, OverlongConfig(penalty_tokens=2), max_tokens=4)
    assert found.final_rewards_G == [0.5, -0.5]  # a penalty of 1


class TestMask:
    def prepared(self, mask: bool, **advantage: str) -> Minibatch:
        """Rewards 1, 0 and 0, the first member cut off after four tokens."""
        made = group([1.0, 0.0, 0.0], lengths=[4, 1, 2])
        last = made.trajectories_G[0].transitions[-1]
        last.ac = replace(last.ac, stop_reason="length")
        config = AdvantageConfig(**advantage)  # pyright: ignore[reportArgumentType]
        return asyncio.run(prepare_minibatch([made], config, mask_truncated=mask, include_provenance=False))

    def test_a_truncated_member_counts_in_the_baseline_and_does_not_train(self) -> None:
        assert [meta["traj_idx"] for meta in self.prepared(False).metadata_D] == [0, 1, 2]
        masked = self.prepared(True)
        assert [meta["traj_idx"] for meta in masked.metadata_D] == [1, 2]
        assert [array(datum, "advantages").max() for datum in masked.data_D] == pytest.approx([-1 / 3, -1 / 3])
        assert torch.equal(masked.advantages_P[0], self.prepared(False).advantages_P[0])

    def test_its_tokens_count_in_no_mean(self) -> None:
        values = [array(datum, "advantages").min() for datum in self.prepared(True, scale="token").data_D]
        assert values == pytest.approx([-1 / 9, -1 / 9])  # 3 tokens, not 7


def test_gdpo_reads_the_penalty_as_a_part_or_not_at_all(tmp_path: Path) -> None:
    parts = {"correct": 1.0}
    config = make_config(
        tmp_path, overlong=OverlongConfig(penalty_tokens=2), advantage=AdvantageConfig(baseline="gdpo", parts=parts)
    )
    with pytest.raises(ConfigurationError, match=r"add advantage\.parts\.overlong_penalty=1"):
        check_config(config)
    parts[OVERLONG_METRIC_KEY] = 1.0
    check_config(config)
    made = penalize_overlong(group([0.0, 0.0], lengths=[1, 4]), OverlongConfig(penalty_tokens=2), max_tokens=4)
    (advantages,) = compute_advantages([made], AdvantageConfig(baseline="gdpo", parts={OVERLONG_METRIC_KEY: 1.0}))
    assert advantages.tolist() == [1.0, -1.0]


def test_maxrl_takes_no_penalty(tmp_path: Path) -> None:
    maxrl = AdvantageConfig(baseline="maxrl")
    check_config(make_config(tmp_path, overlong=OverlongConfig(mask=True), advantage=maxrl))
    with pytest.raises(ConfigurationError, match="makes rewards other than 0 and 1"):
        check_config(make_config(tmp_path, overlong=OverlongConfig(penalty_tokens=2), advantage=maxrl))


def test_settings_that_do_nothing_or_too_much_are_refused() -> None:
    OverlongConfig(penalty_tokens=10).check(10)
    with pytest.raises(ConfigurationError, match="overlong does nothing"):
        OverlongConfig().check(10)
    with pytest.raises(ConfigurationError, match=r"overlong\.penalty_tokens=11 is more than max_tokens=10"):
        OverlongConfig(penalty_tokens=11).check(10)
