"""Hierarchical GRPO: proposers are compared with proposers, the solvers of a task with each other."""

import random

import pytest

from tests.env.test_multi_agent import group_of, move, play
from tinker_cookbook.env.games import Match
from tinker_cookbook.env.multi_agent import MultiAgent
from tinker_cookbook.env.shipped.games.proposer_solver import (
    ProposerSolver,
    load_environment,
    proposer_reward,
    with_solvers,
)
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.rl.advantages import AdvantageConfig, compute_advantages

GAME = with_solvers(ProposerSolver, 4)


def answer(text: str, stopped: bool = True):
    return move(f"<SOLUTION>{text}</SOLUTION>", stopped)


@pytest.mark.parametrize(("pass_rate", "expected"), [(0.0, 0.0), (0.25, 0.5), (0.5, 1.0), (0.75, 0.5), (1.0, 0.0)])
def test_a_proposal_is_best_where_half_of_the_solvers_are_right(pass_rate: float, expected: float) -> None:
    assert proposer_reward(pass_rate) == expected


def test_each_is_compared_with_its_own() -> None:
    """Golden: the first sum is solved by one of four, the second by two: proposals of .5 and 1, solvers of 1/4 and 1/2."""
    first = [[answer("3+4")], *[[answer(text)] for text in ("7", "8", "6", "1")]]
    second = [[answer(" 2 + 2 ")], *[[answer(text)] for text in ("4", "5", "4", "3")]]
    group = play(group_of(GAME, size=2), *first, *second)
    assert group.get_total_rewards() == [0.5, 1, 0, 0, 0, 1.0, 1, 0, 1, 0]
    (advantages,) = compute_advantages([group], AdvantageConfig(baseline="role_mean"))
    wanted = [-0.25, 0.75, -0.25, -0.25, -0.25, 0.25, 0.5, -0.5, 0.5, -0.5]
    assert advantages.tolist() == pytest.approx(wanted)
    assert group.metrics_G[0]["pass_rate"] == 0.25 and group.metrics_G[5]["pass_rate"] == 0.5


def test_a_solver_without_an_answer_is_wrong_and_ends_nothing() -> None:
    group = play(
        group_of(GAME), [answer("1+1")], [answer("2")], [answer("2", stopped=False)], [move("two")], [answer("2")]
    )
    assert group.get_total_rewards() == [1.0, 1.0, 0.0, 0.0, 1.0]


@pytest.mark.parametrize("said", ["", "1-1", "0+3", "10+1", "3", "1+1+1", "٣+١"])
def test_a_proposal_that_is_no_sum_is_a_forfeit(said: str) -> None:
    match = Match(GAME(random.Random(0)))
    match.submit("proposer", f"<SOLUTION>{said}</SOLUTION>")
    assert match.forfeited == "proposer" and match.rewards()["proposer"] == -1.0
    assert {match.rewards()[role] for role in GAME.solvers} == {0.0}


def test_the_number_of_solvers_is_an_argument() -> None:
    assert len(with_solvers(ProposerSolver, 7).roles) == 8 and len(ProposerSolver.roles) == 5
    env = load_environment(num_solvers=3)
    assert isinstance(env, MultiAgent) and env.roles == ("proposer", "solver_0", "solver_1", "solver_2")
    with pytest.raises(ConfigurationError, match="num_solvers=1: must be at least 2"):
        load_environment(num_solvers=1)
    with pytest.raises(ConfigurationError, match="highest=0: must be between 1 and 999"):
        ProposerSolver(random.Random(0), highest=0)
