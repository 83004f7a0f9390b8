"""From rewards to one advantage per member: golden numbers for every baseline, and what holds for any rewards."""

import itertools
import math

import chz
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes import said
from tests.rl.handmade import group, trajectory, turn
from tinker_cookbook.exceptions import ConfigurationError, DataValidationError, ZeroAdvantageError
from tinker_cookbook.rl.advantages import (
    AdvantageConfig,
    AdvantageKeys,
    Baseline,
    RoleBaselines,
    Scale,
    check_advantages,
    compute_advantages,
    lacks_signal,
    part_rewards,
    remove_constant_reward_groups,
    token_scales,
)
from tinker_cookbook.rl.types import TrajectoryGroup


def advantages(members: TrajectoryGroup, **config) -> list[float]:
    (found,) = compute_advantages([members], AdvantageConfig(**config))
    assert found.dtype == torch.float32
    return found.tolist()


class TestAdvantages:
    @pytest.mark.parametrize(
        ("baseline", "expected"),
        [
            ("mean", [-0.75, 0.25, 0.25, 0.25]),
            ("zscore", [-(3**0.5), 3**-0.5, 3**-0.5, 3**-0.5]),
            ("constant", [1.0, 1.0, 1.0, 1.0]),
            ("none", [0.0, 1.0, 1.0, 1.0]),
        ],
    )
    def test_golden_numbers(self, baseline: str, expected: list[float]) -> None:
        assert advantages(group([0.0, 1.0, 1.0, 1.0]), baseline=baseline) == pytest.approx(expected)

    def test_default_is_reward_minus_mean(self) -> None:
        (found,) = compute_advantages([group([3.0, 1.0])])
        assert found.tolist() == [1.0, -1.0]

    def test_leave_one_out_is_reward_minus_the_mean_of_the_others(self) -> None:
        found = advantages(group([1.0, 2.0, 6.0, 9.0], trained=[True, True, True, False]), baseline="leave_one_out")
        assert found == pytest.approx([1 - 4, 2 - 3.5, 6 - 1.5, 0.0])

    def test_rewards_are_compared_in_double_precision(self) -> None:
        """Both are 16777216 in float32."""
        assert advantages(group([16777217.0, 16777216.0])) == [0.5, -0.5]

    def test_a_deviation_too_small_to_divide_by_is_none(self) -> None:
        """The rewards differ, but the squares of their differences underflow."""
        assert advantages(group([0.0, 1e-200]), baseline="zscore") == [0.0, 0.0]

    def test_a_group_without_members_has_no_advantages(self) -> None:
        for baseline in ("mean", "zscore", "leave_one_out", "constant"):
            assert advantages(group([]), baseline=baseline) == []

    def test_a_reward_that_is_no_number_is_named(self) -> None:
        with pytest.raises(DataValidationError, match="group 0: rewards must be finite"):
            advantages(group([1.0, float("nan")]))

    @pytest.mark.parametrize(
        ("baseline", "expected"),
        [
            ("mean", [-1.0, 0.0, 1.0, 0.0]),
            ("zscore", [-1.0, 0.0, 1.0, 0.0]),
            ("constant", [1.0, 0.0, 1.0, 0.0]),
        ],
    )
    def test_the_rejected_have_none_and_no_part_in_the_baseline(self, baseline: str, expected: list[float]) -> None:
        members = group([0.0, 100.0, 2.0, -50.0], trained=[True, False, True, False])
        assert advantages(members, baseline=baseline) == pytest.approx(expected)

    @given(st.floats(-1e6, 1e6), st.integers(1, 9))
    def test_equal_rewards_give_exactly_zero(self, reward: float, size: int) -> None:
        for baseline in ("mean", "zscore", "leave_one_out"):
            assert advantages(group([reward] * size), baseline=baseline) == [0.0] * size

    def test_survivors_with_equal_rewards_give_exactly_zero(self) -> None:
        members = group([0.1, 0.1, 0.1, 7.0], trained=[True, True, True, False])
        assert advantages(members) == advantages(members, baseline="zscore") == [0.0] * 4

    @pytest.mark.parametrize("baseline", ["mean", "zscore", "leave_one_out", "constant"])
    def test_all_rejected_is_all_zero(self, baseline: str) -> None:
        assert advantages(group([0.0, 1.0], trained=[False, False]), baseline=baseline) == [0.0, 0.0]

    @given(st.lists(st.floats(-100, 100), min_size=2, max_size=9))
    def test_mean_baseline_sums_to_zero(self, rewards: list[float]) -> None:
        assert sum(advantages(group(rewards))) == pytest.approx(0.0, abs=1e-3)

    def test_step_rewards_and_final_reward_add_up(self) -> None:
        first = trajectory(turn([1], said([2]), 0.25), turn([1, 2], said([3]), 0.5))
        second = trajectory(turn([1], said([2]), 0.0))
        members = TrajectoryGroup([first, second], [0.25, 0.0], [{}, {}])
        assert advantages(members) == [0.5, -0.5]

    def test_constant_groups_are_removed_by_what_trains_of_them(self) -> None:
        mixed, same = group([0.0, 1.0]), group([1.0, 1.0])
        survivors_same = group([1.0, 0.0, 1.0], trained=[True, False, True])
        assert remove_constant_reward_groups([same, mixed, survivors_same]) == [mixed]


class TestMaxRL:
    def test_golden_numbers_of_the_paper_s_estimator(self) -> None:
        """(r - m) / m: one of four passes with m = 1/4, three of four with 3/4."""
        assert advantages(group([1.0, 0.0, 0.0, 0.0]), baseline="maxrl") == [3.0, -1.0, -1.0, -1.0]
        assert advantages(group([1.0, 1.0, 0.0, 1.0]), baseline="maxrl") == pytest.approx([1 / 3, 1 / 3, -1.0, 1 / 3])

    @pytest.mark.parametrize("reward", [0.0, 1.0])
    def test_without_success_or_failure_it_is_exactly_zero(self, reward: float) -> None:
        assert advantages(group([reward] * 5), baseline="maxrl") == [0.0] * 5

    @pytest.mark.parametrize("size", [2, 4, 7])
    def test_its_expectation_is_the_gradient_of_the_truncated_logarithm(self, size: int) -> None:
        """Over all outcomes of a group: the mean of A d log p(r) is d/dp of -sum_{k=1}^{G-1} (1 - p)^k / k. With a sign
        error it would be the opposite.
        """
        p = 0.3
        expected = sum((1 - p) ** (k - 1) for k in range(1, size))
        found = 0.0
        for outcome in itertools.product([0.0, 1.0], repeat=size):
            chance = math.prod(p if r else 1 - p for r in outcome)
            scores = [1 / p if r else -1 / (1 - p) for r in outcome]
            values = advantages(group(list(outcome)), baseline="maxrl")
            found += chance * sum(value * score for value, score in zip(values, scores, strict=True)) / size
        assert found == pytest.approx(expected, rel=1e-6)

    def test_other_rewards_are_refused(self) -> None:
        with pytest.raises(DataValidationError, match="rewards must be 0 or 1, got"):
            advantages(group([0.5, 1.0]), baseline="maxrl")


def with_parts(**parts: list[float]) -> TrajectoryGroup:
    """A group whose members have these metrics in their last turn; their total rewards are all 0."""
    size = len(next(iter(parts.values())))
    made = group([0.0] * size)
    for i, member in enumerate(made.trajectories_G):
        member.transitions[-1].metrics.update({name: values[i] for name, values in parts.items()})
    return made


def advantages_of_a(config: AdvantageConfig) -> list[float]:
    (found,) = compute_advantages([with_parts(a=[0.75, 0.25], b=[0.0, 1.0])], config)
    return found.tolist()


class TestGDPO:
    def test_each_reward_is_a_z_score_and_the_batch_has_deviation_one(self) -> None:
        """Golden: z-scores by hand. In the first group `correct` is 1, -1 and `length` -1, 1; in the second only the first
        differs. S = 2 z + 0.5 z' is 1.5, -1.5, 2, -2, whose deviation is sqrt(3.125).
        """
        config = AdvantageConfig(baseline="gdpo", parts={"correct": 2.0, "length": 0.5})
        groups = [
            with_parts(correct=[1.0, 0.0], length=[-300.0, 100.0]),
            with_parts(correct=[1.0, 0.0], length=[7.0, 7.0]),
        ]
        first, second = compute_advantages(groups, config)
        deviation = math.sqrt((1.5**2 + 2.0**2) / 2)
        assert first.tolist() == pytest.approx([1.5 / deviation, -1.5 / deviation])
        assert second.tolist() == pytest.approx([2.0 / deviation, -2.0 / deviation])
        flat = torch.cat([first, second]).double()
        assert float(flat.mean()) == pytest.approx(0, abs=1e-7) and float(flat.std(correction=0)) == pytest.approx(1)

    def test_combinations_with_one_sum_stay_apart(self) -> None:
        """The motive of the paper: (0, 0), (0, 1), (1, 1) and (1, 0): with summed rewards the two in the middle would be one."""
        made = with_parts(easy=[1.0, 1.0, 0.0, 1.0], hard=[0.0, 1.0, 1.0, 0.0])
        (found,) = compute_advantages([made], AdvantageConfig(baseline="gdpo", parts={"easy": 1.0, "hard": 1.0}))
        assert found[0] == found[3] and found[0] != found[2] and found[1] > max(found[0], found[2])

    def test_constant_parts_are_exactly_zero_and_lack_a_signal(self) -> None:
        config = AdvantageConfig(baseline="gdpo", parts={"a": 1.0, "b": 1.0})
        constant, other = with_parts(a=[0.1, 0.1], b=[0.3, 0.3]), with_parts(a=[0.1, 0.1], b=[0.3, 0.4])
        assert compute_advantages([constant], config)[0].tolist() == [0.0, 0.0]
        assert lacks_signal(constant, config) and not lacks_signal(other, config)
        assert lacks_signal(other, AdvantageConfig())  # its total rewards are equal

    def test_rejected_members_are_no_part_of_it(self) -> None:
        made = with_parts(a=[1.0, 0.0, 50.0])
        made.trained_G = [True, True, False]
        (found,) = compute_advantages([made], AdvantageConfig(baseline="gdpo", parts={"a": 1.0}))
        assert found.tolist() == [1.0, -1.0, 0.0]

    def test_a_part_is_the_sum_over_the_turns_and_the_group_s_own(self) -> None:
        turns = [turn([1], said([2])) for _ in range(4)]
        for one, value in zip(turns, (1.0, 2.0, None, 0.5), strict=True):
            one.metrics.update({} if value is None else {"a": value})
        made = TrajectoryGroup(
            [trajectory(*turns[:2]), trajectory(*turns[2:]), trajectory()], [0.0] * 3, [{"a": 4.0}, {}, {"a": -1.0}]
        )
        found = part_rewards(made, "a")
        assert found.dtype == torch.float64 and found.tolist() == [7.0, 0.5, -1.0]

    def test_without_any_that_trains_there_is_no_deviation(self) -> None:
        config = AdvantageConfig(baseline="gdpo", parts={"a": 1.0})
        assert compute_advantages([], config) == []
        made = with_parts(a=[1.0, 0.0])
        made.trained_G = [False, False]
        assert [found.tolist() for found in compute_advantages([made], config)] == [[0.0, 0.0]]

    def test_weights_are_shares_and_no_scale(self) -> None:
        for weight in (0.125, 1.0, 8.0):
            config = AdvantageConfig(baseline="gdpo", parts={"a": weight, "b": 0.0})
            assert advantages_of_a(config) == [1.0, -1.0]

    def test_the_rejected_tell_no_signal(self) -> None:
        made = with_parts(a=[1.0, 1.0, 50.0], b=[2.0, 2.0, 2.0])
        made.trained_G = [True, True, False]
        assert lacks_signal(made, AdvantageConfig(baseline="gdpo", parts={"a": 1.0, "b": 1.0}))
        assert not lacks_signal(made, AdvantageConfig(credit="turn"))

    @pytest.mark.parametrize("value", [math.nan, math.inf])
    def test_a_part_that_is_no_number_is_named_with_its_group(self, value: float) -> None:
        config = AdvantageConfig(baseline="gdpo", parts={"a": 1.0})
        with pytest.raises(DataValidationError, match=rf"^group 1: advantage\.parts names 'a', which is \[{value}\]"):
            compute_advantages([with_parts(a=[1.0, 0.0]), with_parts(a=[0.0, value])], config)
        partly = with_parts(a=[1.0])
        partly.metrics_G[0]["a"] = value
        with pytest.raises(DataValidationError, match=rf"which is \[1\.0, {value}\] for a member; there are a$"):
            part_rewards(partly, "a")
        with pytest.raises(DataValidationError, match=r"^group 0: .* is missing for a member; there are none$"):
            part_rewards(group([1.0]), "a")

    def test_mistakes_are_named(self) -> None:
        config = AdvantageConfig(baseline="gdpo", parts={"corect": 1.0})
        with pytest.raises(
            DataValidationError, match=r"group 0: advantage\.parts names 'corect', .*missing.*; there are correct"
        ):
            compute_advantages([with_parts(correct=[1.0, 0.0])], config)
        with pytest.raises(ConfigurationError, match=r"baseline=gdpo needs advantage\.parts"):
            compute_advantages([with_parts(correct=[1.0])], AdvantageConfig(baseline="gdpo"))
        with pytest.raises(ConfigurationError, match="parts are for baseline=gdpo, not for baseline=zscore"):
            AdvantageConfig(baseline="zscore", parts={"correct": 1.0})
        with pytest.raises(ConfigurationError, match="no weight other than 0"):
            AdvantageConfig(baseline="gdpo", parts={"correct": 0.0})


def test_of_three_roles_each_is_compared_with_its_own() -> None:
    members = group([1.0, 10.0, 5.0, 3.0, 20.0, 7.0, 99.0, 4.0], trained=[True] * 6 + [False, True])
    members.roles_G = ["first", "second", "third", "first", "second", "third", "first", "alone"]
    assert advantages(members, baseline="role_mean") == [-1.0, -5.0, -1.0, 1.0, 5.0, 1.0, 0.0, 0.0]


class TestRoleBaselines:
    def test_golden(self) -> None:
        baselines = RoleBaselines(decay=0.75, means={"second mover": 8.0})
        first, second = group([4.0, 0.0]), group([0.0, 2.0])
        first.roles_G = second.roles_G = ["first mover", "second mover"]
        found = compute_advantages([first, second], AdvantageConfig(baseline="role"), baselines)
        # b = 0.75 b + 0.25 r: from 0 it is 1 after the reward 4, then 0.75; from 8 it is 6, then 5.
        assert [values.tolist() for values in found] == [[3.0, -6.0], [-0.75, -3.0]]
        assert baselines.means == {"first mover": 0.75, "second mover": 5.0}

    def test_a_group_of_one_trains_and_the_rejected_leave_no_trace(self) -> None:
        baselines = RoleBaselines(decay=0.9)
        found = compute_advantages(
            [group([2.0, 5.0], trained=[True, False])], AdvantageConfig(baseline="role"), baselines
        )
        assert found[0].tolist() == pytest.approx([2.0 - 0.2, 0.0]) and baselines.means == {"all": pytest.approx(0.2)}

    def test_the_decay_is_a_share_below_one(self) -> None:
        assert AdvantageConfig(role_decay=0.0).role_decay == 0.0
        for decay in (-0.1, 1.0):
            with pytest.raises(ConfigurationError, match=f"role_decay={decay}: must be at least 0 and below 1"):
                AdvantageConfig(role_decay=decay)

    def test_without_its_means_it_is_refused(self) -> None:
        with pytest.raises(
            ConfigurationError, match=r"^baseline=role needs role_baselines, the running means of the run$"
        ):
            compute_advantages([group([1.0])], AdvantageConfig(baseline="role"))

    @pytest.mark.parametrize("roles", [["first mover"], ["first mover", "second mover", "referee"]])
    def test_every_member_needs_a_role(self, roles: list[str]) -> None:
        members = group([1.0, 0.0])
        members.roles_G = roles
        with pytest.raises(ValueError, match="zip"):
            compute_advantages([members], AdvantageConfig(baseline="role"), RoleBaselines(decay=0.5))


def test_what_is_set_goes_over_what_was() -> None:
    base = AdvantageConfig(baseline="zscore", scale="token", role_decay=0.5)
    assert AdvantageKeys(scale="sum", role_decay=0.0).over(base) == chz.replace(base, scale="sum", role_decay=0.0)
    assert AdvantageKeys().over(base) == base
    assert AdvantageConfig().over(base) == AdvantageConfig() != base
    with pytest.raises(ConfigurationError, match="parts are for baseline=gdpo, not for baseline=zscore"):
        AdvantageKeys(parts={"a": 1.0}).over(base)


class TestTokenScales:
    def test_golden(self) -> None:
        groups = [group([0.0] * 3, trained=[True, False, True], lengths=[2, 3, 5]), group([0.0], lengths=[7])]
        assert token_scales(groups, "sum") == [[1.0] * 3, [1.0]]
        assert token_scales(groups, "sequence") == [[2.0, 3.0, 5.0], [7.0]]
        assert token_scales(groups, "token") == [[14.0] * 3, [14.0]]
        assert token_scales(groups, "token", [True, False]) == [[7.0] * 3, [7.0]]

    @pytest.mark.parametrize("scale", ["sequence", "token"])
    @pytest.mark.parametrize("tokens", [0, 1])
    def test_a_single_token_and_none_at_all_divide_by_one(self, scale: Scale, tokens: int) -> None:
        assert token_scales([group([0.0], lengths=[tokens])], scale) == [[1.0]]

    def test_each_member_must_be_said_to_train_or_not(self) -> None:
        with pytest.raises(ValueError, match="zip"):
            token_scales([group([0.0] * 3, trained=[True, False])], "token")


class TestZeroAdvantages:
    def test_the_message_shows_the_rewards_and_the_fix(self) -> None:
        groups = [
            group([0.25, 0.25]),
            group([1.0, 0.5], trained=[True, False]),
            group([1 / 3, 2.0], trained=[False, False]),
        ]
        with pytest.raises(ZeroAdvantageError) as raised:
            check_advantages(groups, compute_advantages(groups))
        assert str(raised.value) == (
            "every advantage of this batch is zero, so this step would train nothing: within each group the members that "
            "train all have the same reward, or fewer than two are left. Rewards:\n"
            "  group   0: 0.25 0.25\n"
            "  group   1: 1 0.5(rejected)   <- 1 survivor\n"
            "  group   2: 0.333(rejected) 2(rejected)   <- no survivors\n"
            "Use larger groups, a task or reward that varies, a higher temperature, or a judge or filter that rejects less. "
            "Rejection leaves members of equal reward (accept_min_reward with rewards of 0 and 1, say): "
            "advantage.baseline=constant gives all of them the same advantage."
        )

    def test_survivors_are_spoken_of_only_where_there_are_some(self) -> None:
        for groups in ([group([0.5, 0.5])], [group([1.0, 0.0], trained=[False, False])]):
            with pytest.raises(ZeroAdvantageError) as raised:
                check_advantages(groups, compute_advantages(groups))
            assert "baseline=constant" not in str(raised.value)

    def test_each_member_must_be_said_to_train_or_not(self) -> None:
        with pytest.raises(ValueError, match="zip"):
            check_advantages([group([0.0] * 3, trained=[True, False])], [torch.zeros(3)])

    def test_one_advantage_is_enough_also_a_negative_one(self) -> None:
        groups = [group([1.0, 1.0]), group([1.0, 1.0])]
        check_advantages(groups, [torch.zeros(2), torch.tensor([0.0, -1e-6])])


class TestCreditOfTurns:
    """Members of one and two turns: rewards (1, 5), (3,), (2, 9)."""

    def members(self, trained: list[bool] | None = None) -> TrajectoryGroup:
        rewards = [[1.0, 5.0], [3.0], [2.0, 9.0]]
        played = [trajectory(*(turn([1], said([2]), reward) for reward in own)) for own in rewards]
        return TrajectoryGroup(played, [0.0] * 3, [{}] * 3, trained_G=trained)

    def test_a_turn_is_compared_with_the_same_turn_of_the_others(self) -> None:
        assert advantages(self.members(), credit="turn") == [[-1.0, -2.0], [1.0, 0.0], [0.0, 2.0]]

    def test_rejected_members_count_for_nothing(self) -> None:
        assert advantages(self.members([True, True, False]), credit="turn") == [[-1.0, 0.0], [1.0, 0.0], [0.0, 0.0]]

    def test_the_final_reward_is_the_last_turn_s(self) -> None:
        members = self.members()
        members.final_rewards_G[:] = [10.0, 21.0, 0.0]
        assert advantages(members, credit="turn") == [[-8.0, 3.0], [15.0, 0.0], [-7.0, -3.0]]

    def test_leave_one_out_knows_how_many_have_the_turn(self) -> None:
        found = advantages(self.members(), credit="turn", baseline="leave_one_out")
        assert found == [pytest.approx([-1.5, -4.0]), pytest.approx([1.5, 0.0]), pytest.approx([0.0, 4.0])]

    @pytest.mark.parametrize("baseline", ["role", "role_mean", "constant", "gdpo"])
    def test_baselines_that_compare_no_turns_are_refused(self, baseline: Baseline) -> None:
        with pytest.raises(ConfigurationError, match=f"baseline={baseline}"):
            AdvantageConfig(credit="turn", baseline=baseline)
        with pytest.raises(ConfigurationError, match=f"later_baseline={baseline} does not do"):
            AdvantageConfig(credit="turn", later_baseline=baseline)

    def test_later_turns_may_have_another_baseline(self) -> None:
        found = advantages(self.members(), credit="turn", later_baseline="none")
        assert found == [[-1.0, 5.0], [1.0, 0.0], [0.0, 9.0]]
        found = advantages(self.members(), credit="turn", baseline="none", later_baseline="mean")
        assert found == [[1.0, -2.0], [3.0, 0.0], [2.0, 2.0]]
        with pytest.raises(ConfigurationError, match=r"later_baseline=mean needs .* each turn; add credit=turn"):
            AdvantageConfig(later_baseline="mean")
