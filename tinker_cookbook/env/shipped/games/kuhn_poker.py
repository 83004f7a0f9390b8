"""Kuhn poker: three cards, two players, one bet. The smallest game in which bluffing is part of optimal play (Kuhn 1950).

Both pay 1 and get one of jack, queen and king. `first` checks or bets 1 more; `second` may then check or bet, and a
player who faces a bet calls or folds. The higher card takes the pot at a showdown. The reward is what a player wins or
loses, from -2 to 2; in equilibrium `first` loses 1/18 per game. A forfeit costs 2.
"""

import random
from collections.abc import Mapping
from typing import Any

from tinker_cookbook.env.dataset import Environment
from tinker_cookbook.env.games import IllegalMove
from tinker_cookbook.env.multi_agent import multi_agent_env
from tinker_cookbook.env.qa import QA_SYSTEM
from tinker_cookbook.env.task import parse_solution
from tinker_cookbook.rl.types import Metrics

CARDS = ("jack", "queen", "king")
FIRST, SECOND = "first", "second"

_RULES = (
    "Kuhn poker. The cards are jack, queen and king; the higher one wins. Each of us has paid 1 and has one card. "
    "A bet is 1 more."
)


def play_at_random(game: "KuhnPoker", role: str, rng: random.Random) -> str:
    """A random legal move, uniformly."""
    return say(rng.choice(game.legal()))


def play_in_equilibrium(game: "KuhnPoker", role: str, rng: random.Random) -> str:
    """The equilibrium in which `first` never bets: no opponent wins more against it than the value of the game."""
    card = CARDS.index(game.hands[role])
    if role == FIRST:
        calls = (0.0, 1 / 3, 1.0)[card]
        return say("check" if not game.history else "call" if rng.random() < calls else "fold")
    if game.history[-1] == "bet":
        return say("call" if rng.random() < (0.0, 1 / 3, 1.0)[card] else "fold")
    return say("bet" if rng.random() < (1 / 3, 0.0, 1.0)[card] else "check")


def say(move: str) -> str:
    """A move in the players' notation."""
    return f"<SOLUTION>{move}</SOLUTION>"


class KuhnPoker:
    """One deal."""

    roles = (FIRST, SECOND)
    system_prompt = QA_SYSTEM
    forfeit_reward = -2.0
    test_opponent = "random"  # in self-play the policy's wins and losses cancel, however it plays
    scripts = {"random": play_at_random, "equilibrium": play_in_equilibrium}  # noqa: RUF012

    def __init__(self, rng: random.Random):
        first, second = rng.sample(CARDS, 2)
        self.hands: dict[str, str] = {FIRST: first, SECOND: second}
        self.history: list[str] = []

    def to_move(self) -> tuple[str, ...]:
        over = self.history[-1:] in (["call"], ["fold"]) or self.history == ["check", "check"]
        return () if over else (self.roles[len(self.history) % 2],)

    def legal(self) -> tuple[str, str]:
        """The legal moves of the role that moves next."""
        return ("call", "fold") if self.history[-1:] == ["bet"] else ("check", "bet")

    def observe(self, role: str) -> str:
        last = f"I {self.history[-1]}. " if self.history else ""
        choice = f"{last}{' or '.join(self.legal())}?"
        begins = len(self.history) < 2
        return f"{_RULES} Your card is the {self.hands[role]}. {choice}" if begins else choice

    def act(self, role: str, text: str) -> None:
        move = (parse_solution(text) or "").strip()
        if move not in self.legal():
            raise IllegalMove(f"{move!r} is none of {self.legal()}")
        self.history.append(move)

    def rewards(self) -> Mapping[str, float]:
        if self.history[-1] == "fold":
            winner = self.roles[len(self.history) % 2]  # otherwise the other player, who bet, would move
            return {role: 1.0 if role == winner else -1.0 for role in self.roles}
        stake = 2.0 if "bet" in self.history else 1.0
        winner = max(self.roles, key=lambda role: CARDS.index(self.hands[role]))
        return {role: stake if role == winner else -stake for role in self.roles}

    def metrics(self) -> Metrics:
        return {"showdown": float(self.history[-1] != "fold"), "bet": float("bet" in self.history)}


def load_environment(**settings: Any) -> Environment:
    """Kuhn poker in self-play, or against other opponents; takes the keywords of `multi_agent_env`."""
    return multi_agent_env(KuhnPoker, **settings)
