"""From groups to the datums of one pass: scales, filters, penalties, and what became of each group."""

import asyncio
from typing import Any

import pytest

from tests.fakes import fake_logprob, said
from tests.rl.handmade import ScaledSampler, array, group, trajectory, turn
from tinker_cookbook.rl.advantages import AdvantageConfig, token_scales
from tinker_cookbook.rl.metrics import KLPenalty
from tinker_cookbook.rl.minibatch import Minibatch, prepare_minibatch
from tinker_cookbook.rl.types import TrajectoryGroup


def prepare(groups: list[TrajectoryGroup], *args: Any, **config: Any) -> Minibatch:
    return asyncio.run(prepare_minibatch(groups, AdvantageConfig(**config), *args))


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

    def test_turn_divides_by_the_tokens_of_each_turn(self) -> None:
        """The first turn is compared with the others' first one, later ones are worth their reward."""
        talkers = [
            trajectory(turn([1], said([2] * 4), first), turn([1, 2, 2, 2, 2, 9], said([5] * 2), second))
            for first, second in ((1.0, 1.0), (0.0, -1.0))
        ]
        members = TrajectoryGroup(talkers, [0.0, 0.0], [{}, {}])
        found = total_advantages(prepare([members], credit="turn", scale="turn", later_baseline="none"))
        assert found == [pytest.approx([0.5 / 4] * 4 + [0.5] * 2), pytest.approx([-0.5 / 4] * 4 + [-0.5] * 2)]
        found = total_advantages(prepare([members], credit="turn", scale="turn", baseline="zscore"))
        assert found[0] == pytest.approx([1 / 4] * 4 + [1 / 2] * 2)

    def test_metadata_keeps_the_places_of_filtered_groups(self) -> None:
        batch = prepare([group([1.0, 1.0]), self.members], True)
        assert [(m["group_idx"], m["traj_idx"]) for m in batch.metadata_D] == [(1, 0), (1, 1)]
        assert len(batch.groups) == 2 and batch.num_trained_groups == 1


class TestPenalties:
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


class TestCreditOfTurns:
    def test_every_token_of_a_turn_has_its_advantage(self) -> None:
        played = [
            trajectory(turn([1], said([2, 3]), first), turn([1, 2, 3, 4], said([5]), second))
            for first, second in ((1.0, 0.0), (0.0, 1.0))
        ]
        batch = prepare([TrajectoryGroup(played, [0.0, 0.0], [{}, {}])], credit="turn")
        assert total_advantages(batch) == [[0.5, 0.5, -0.5], [-0.5, -0.5, 0.5]]

    def test_equal_totals_are_not_a_constant_group(self) -> None:
        """The group of the test above has the total 1 for both; a group whose turns are equal goes."""
        same = [trajectory(turn([1], said([2]), 1.0), turn([1, 2, 3], said([4]), 0.0)) for _ in range(2)]
        zero_sum = [
            trajectory(turn([1], said([2]), first), turn([1, 2, 3], said([4]), 1 - first)) for first in (1.0, 0.0)
        ]
        groups = [TrajectoryGroup(members, [0.0, 0.0], [{}, {}]) for members in (same, zero_sum)]
        batch = prepare(groups, True, credit="turn")
        assert {meta["group_idx"] for meta in batch.metadata_D} == {1}
